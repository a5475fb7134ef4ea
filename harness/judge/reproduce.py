"""How to see for oneself what a scenario found: by `harness damage` and `vllm serve`, and by the harness alone."""

from __future__ import annotations

import inspect
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.checkpoint.models import ModelSource, adapted_llama, tiny_llama
from harness.faults.catalogue import CATALOGUE
from harness.faults.compiler import ABSENT, COMPILER
from harness.faults.documents import is_damage, is_of_adapter
from harness.judge.finding_texts import Text
from harness.judge.finding_texts.text import ASK

MODEL_LEN = 256
MAKERS: Mapping[str, Callable[..., ModelSource]] = {
    "tiny": tiny_llama,
    "adapted": adapted_llama,
}  # by how the names of their checkpoints begin
LAUNCHES = ("launch_dtype", "launch_argument", "launch_environment", "missing_compiler")
READY = "curl -s -o /dev/null --retry 60 --retry-connrefused --retry-delay 2 http://127.0.0.1:8000/health"
END = "kill %1; wait %1"  # the next block asks the same port


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """What a scenario does, as far as it takes to do it by hand."""

    name: str
    file: str  # the module that declares it, as it is named on the command line
    faults: tuple[tuple[str, Mapping[str, Any]], ...]  # names and parameters
    how: str  # of the rollout: "restart", ...
    kind: str = "tiny"  # which of `MAKERS` makes its checkpoints
    old: Mapping[str, Any] = field(default_factory=dict)  # parameters of the tiny model; empty: it is another one
    new: Mapping[str, Any] = field(default_factory=dict)


def by_hand(declared: Declared, text: Text | None) -> tuple[str, ...]:
    """Return the shell lines that show it on vLLM alone; none where a damaged copy, a request and the text do not suffice."""
    damages = [(name, given) for name, given in declared.faults if is_damage(name) or is_of_adapter(name)]
    others = [name for name, _ in declared.faults if (name, _) not in damages and name not in LAUNCHES]
    is_live = declared.how != "restart"
    damaged = f"damaged-{declared.name}"  # a block of its own for each: none may serve what another one left
    # Where nothing is damaged, what is loaded is the new checkpoint.
    loaded = f'"$PWD/{damaged}"' if damages else '"$NEW/adapter"' if declared.how == "adapter" else '"$NEW"'
    steps = tuple(step.replace('"$PWD/damaged"', loaded) for step in (text.by_hand if text is not None else ()))
    if not declared.new or len(damages) > 1 or (not steps and (others or is_live)):
        return ()
    needs_old = is_live or any("old" in CATALOGUE[name].needs for name, _ in damages)
    lines = [_make("NEW", declared.kind, declared.new)]
    lines += [_make("OLD", declared.kind, declared.old)] if needs_old and declared.old else []
    lines += [_damage(name, given, damaged) for name, given in damages]
    served = '"$OLD"' if is_live else damaged if damages else '"$NEW"'
    asked = () if steps and not is_live else (ASK,)
    has_ended = any("wait %1" in step for step in steps)
    return (*lines, _serve(served, declared, text), READY, *steps, *asked, *(() if has_ended else (END,)))


def by_harness(declared: Declared) -> str:
    """Return the one command that shows it on a vLLM that is installed in an interpreter."""
    return (
        f"harness expectations measure {shlex.quote(declared.file)} -k {declared.name} --starts 1 --into seen "
        '--engine process --python "$(command -v python)"'
    )


def _make(variable: str, kind: str, parameters: Mapping[str, Any]) -> str:
    """Return the line that makes a tiny checkpoint, or finds it made; what need not be said of it is not."""
    usual = {each.name: each.default for each in inspect.signature(MAKERS[kind]).parameters.values()}
    said = {key: value for key, value in parameters.items() if key == "seed" or usual.get(key) != value}
    given = ", ".join(f"{key}={_literal(value)}" for key, value in said.items())
    return f"{variable}=$(python -c 'from harness import models; print(models.{kind}_llama({given}).build())')"


def _literal(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _damage(name: str, parameters: Mapping[str, Any], out: str) -> str:
    settings = [
        f"--set {shlex.quote(f'{key}={_value(value)}')}" for key, value in parameters.items() if value is not None
    ]
    beside = ['--old "$OLD"'] if "old" in CATALOGUE[name].needs else ['--base "$NEW"'] if is_of_adapter(name) else []
    whole = '"$NEW/adapter"' if is_of_adapter(name) else '"$NEW"'
    return " ".join([f"harness damage {whole} --fault", name, *settings, *beside, f"--out {out}"])


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _serve(served: str, declared: Declared, text: Text | None) -> str:
    environment, arguments = [], []
    for name, given in declared.faults:
        if name == "launch_dtype":
            arguments += ["--dtype", str(given.get("dtype"))]
        elif name == "launch_argument":
            arguments += [str(each) for each in given.get("arguments", ())]
        elif name == "launch_environment":
            environment.append(f"{given.get('variable')}={shlex.quote(str(given.get('value')))}")
        elif name == "missing_compiler":
            environment.append(f"{COMPILER}={ABSENT}")
    more = text.serve if text is not None else ""
    name = "base" if declared.how == "adapter" else "tiny"  # which then is the adapter's
    parts = [*environment, more, "vllm serve", served, f"--served-model-name {name} --max-model-len {MODEL_LEN}"]
    return " ".join(
        part for part in (*parts, shlex.join(arguments), text.arguments if text is not None else "", "&") if part
    )


def as_block(lines: Sequence[str]) -> str:
    """Return shell lines as a block of Markdown."""
    return "\n".join(["```sh", *lines, "```"])
