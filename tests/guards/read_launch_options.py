"""Read from an installed vLLM what `vllm serve` accepts, and keep it for pre-flight: run by hand for a new release.

    PYTHON_WITH_VLLM tests/guards/read_launch_options.py harness/guards

Adds the release to `launch_options.json` and `architectures.json`, or replaces it. Needs no accelerator: where vLLM finds
no platform, set VLLM_TARGET_DEVICE=cpu. The parser itself is asked, so that spellings, choices and hidden names are the
engine's own.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any

WRAPPERS = {"_optional_type", "_parse_type"}
KINDS = {
    "int": "int",
    "float": "float",
    "loads": "json",
    "parse_dataclass": "object",
    "<lambda>": "folded",
    "union_dict_and_str": "json_or_text",
    "human_readable_int": "size",
    "human_readable_int_or_auto": "size_or_auto",
}
COUNTS = {None: "1", 0: "0"}


def main(directory: Path) -> None:
    release = version()
    options = read(directory / "launch_options.json")
    parser = serve_parser()
    by_action: dict[int, tuple[Any, list[str]]] = {}
    for name, action in parser._option_string_actions.items():
        by_action.setdefault(id(action), (action, []))[1].append(name)
    merge(options, "options", release, [described(action, names) for action, names in by_action.values()])
    import vllm.envs
    from vllm.model_executor.layers import quantization
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER

    merge(options, "load_formats", release, [{"name": name} for name in sorted(_LOAD_FORMAT_TO_MODEL_LOADER)])
    merge(options, "quantizations", release, [{"name": name} for name in sorted(quantization.QUANTIZATION_METHODS)])
    merge(options, "variables", release, [{"name": name} for name in sorted(vllm.envs.environment_variables)])
    write(directory / "launch_options.json", options, release)

    architectures = read(directory / "architectures.json")
    from vllm.model_executor.models.registry import _VLLM_MODELS

    merge(architectures, "vllm", release, [{"name": name} for name in sorted(_VLLM_MODELS)])
    merge(architectures, "transformers", release, [{"name": name} for name in sorted(transformers_architectures())])
    write(directory / "architectures.json", architectures, release)
    print(f"{release}: {len(by_action)} options")


def version() -> str:
    import vllm

    release = re.match(r"\d+(\.\d+)+", vllm.__version__)
    if release is None:
        sys.exit(f"vLLM calls itself {vllm.__version__!r}")
    return release[0]


def serve_parser() -> Any:
    from vllm.entrypoints.cli.serve import cmd_init
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    commands = FlexibleArgumentParser(prog="vllm").add_subparsers(required=False, dest="subparser")
    (serve,) = (command.subparser_init(commands) for command in cmd_init() if command.name == "serve")
    return serve


def described(action: Any, names: list[str]) -> dict[str, Any]:
    kind, is_optional = kind_of(action.type)
    entry: dict[str, Any] = {"names": sorted(names, key=lambda name: (action.option_strings + names).index(name))}
    if action.nargs == 0:
        entry["kind"] = "flag"
        off = [name for name in names if value_after(action, name) is False]
        if off and not isinstance(action, argparse._HelpAction):
            entry["off"] = off
        return entry
    if kind != "text":
        entry["kind"] = kind
    if is_optional:
        entry["optional"] = True
    count = COUNTS.get(action.nargs, action.nargs)
    if count != "1":
        entry["count"] = str(count)
    if kind == "object":
        entry["keys"] = object_keys(action.type)
    elif kind == "folded" and (action.choices is None or action.type("A-b") != "a_b"):
        del entry["kind"]
    if action.choices is not None and entry.get("kind", "text") == kind:
        entry["choices"] = [str(choice) for choice in action.choices if choice is not None]
    return entry


def kind_of(conversion: Any) -> tuple[str, bool]:
    is_optional = False
    while getattr(conversion, "__name__", "") in WRAPPERS:
        is_optional |= conversion.__name__ == "_optional_type"
        (conversion,) = (cell.cell_contents for cell in conversion.__closure__)
    return KINDS.get(getattr(conversion, "__name__", "str"), "text"), is_optional


def object_keys(conversion: Any) -> list[str]:
    """Return the keys that a JSON value may have, where a dataclass decides."""
    while conversion.__name__ in WRAPPERS:
        (conversion,) = (cell.cell_contents for cell in conversion.__closure__)
    (kind,) = conversion.__defaults__
    return sorted(field.name for field in dataclasses.fields(kind) if field.init)


def value_after(action: Any, name: str) -> Any:
    namespace = argparse.Namespace()
    try:
        action(None, namespace, [], name)
    except (AttributeError, SystemExit):  # --help
        return None
    return getattr(namespace, action.dest, None)


def transformers_architectures() -> set[str]:
    from transformers.models.auto import modeling_auto

    names: set[str] = set()
    for kind in ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ"):
        for value in getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES", {}).values():
            names.update([value] if isinstance(value, str) else value)
    return names


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {"releases": []}


def number(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split("."))


def merge(content: dict[str, Any], kind: str, release: str, entries: list[dict[str, Any]]) -> None:
    """Put a release's entries among those of others: equal ones become one, with the releases that have it."""
    releases = content["releases"]
    held: dict[str, set[str]] = {}
    for entry in content.get(kind, []):
        entry = {"name": entry} if isinstance(entry, str) else entry
        since, until = entry.pop("since", releases[0]), entry.pop("until", releases[-1])
        span = releases[releases.index(since) : releases.index(until) + 1]
        held.setdefault(json.dumps(entry), set()).update(other for other in span if other != release)
    for entry in entries:
        held.setdefault(json.dumps(entry), set()).add(release)
    order = sorted({release, *releases}, key=number)
    merged = []
    for entry, having in held.items():
        for since, until in spans([other in having for other in order]):
            found = json.loads(entry)
            if since > 0:
                found["since"] = order[since]
            if until < len(order) - 1:
                found["until"] = order[until]
            merged.append(found["name"] if found.keys() == {"name"} else found)
    content[kind] = sorted(merged, key=first_name)


def first_name(entry: dict[str, Any] | str) -> tuple[str, str]:
    if isinstance(entry, str):
        return entry, ""
    return entry["names"][0] if "names" in entry else entry["name"], json.dumps(entry)


def spans(having: list[bool]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for index, has in enumerate(having):
        if has and found and found[-1][1] == index - 1:
            found[-1] = (found[-1][0], index)
        elif has:
            found.append((index, index))
    return found


def write(path: Path, content: dict[str, Any], release: str) -> None:
    releases = sorted({release, *content.pop("releases")}, key=number)
    lines = [f'{{"releases": {json.dumps(releases)}']
    for kind, entries in content.items():
        lines.append(f'"{kind}": [\n' + ",\n".join(json.dumps(entry) for entry in entries) + "\n]")
    path.write_text(",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
