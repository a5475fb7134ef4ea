"""Ask about each damage in turn whether a canary notices it, and make a table of the answers."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
from canary_damages import Case

from harness.damage import damage_copy
from harness.engine.reference.defects import PlantedDefect
from harness.engine.reference.loading import Contract, Loaded, load
from harness.engine.reference.model import Floats, Llama, _layer, log_softmax
from harness.engine.reference.tensor_source import CheckpointFiles
from harness.errors import CheckpointDefect, FaultNotApplicable, FaultNotProved
from harness.guards.canary import Answer, GoldenPair, LogprobRows, TokenRows, of_pass

# What vLLM lets through is let through, so that the canary is asked about it.
LIKE_VLLM = Contract(frozenset({PlantedDefect.LENIENT_LIKE_VLLM}))

Ask = Callable[[TokenRows], LogprobRows]


class Outcome(StrEnum):
    """What became of one damage."""

    REFUSED = "refused"  # the checkpoint does not load: not the canary's business
    ALIKE = "alike"  # the same weights are served as without it
    FIRST = "first pass"
    LATER = "later pass"
    MISSED = "missed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One damage and what the canary said."""

    case: Case
    outcome: Outcome
    noticed_by: int | None  # number of the pass, from 1
    difference_first: float  # of the first pass; infinite when a value is not finite
    difference: float  # the largest of the passes that were asked
    because: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return it as one line of a record; a difference beyond measure is null."""
        shown = {"difference_first": self.difference_first, "difference": self.difference}
        return {
            "row": self.case.row,
            "column": self.case.column,
            "tensor": self.case.tensors[0],
            "parameters": dict(self.case.damage.parameters()),
            "seed": self.case.seed,
            "outcome": self.outcome,
            "noticed_by": self.noticed_by,
            "because": self.because,
            **{name: value if math.isfinite(value) else None for name, value in shown.items()},
        }


def loaded_like_vllm(checkpoint: Path, *, tokens_max: int) -> Loaded:
    """Load a checkpoint as vLLM would: cut what is too long, leave what is absent, cast what has another dtype.

    Raises: CheckpointDefect where vLLM refuses.
    """
    return load(checkpoint, dtype="auto", max_model_len=tokens_max, source=CheckpointFiles(), contract=LIKE_VLLM)


class Variant(Llama):
    """A model that differs from another one in some tensors; everything else is that one's."""

    def __init__(self, whole: Llama, tensors: Mapping[str, Floats], changed: Iterable[str]) -> None:
        """Take the tensors of the other one, with those that are `changed` replaced."""
        vars(self).update(vars(whole))
        layers = list(self._layers)
        for number in sorted({int(name.split(".")[2]) for name in changed if name.startswith("model.layers.")}):
            layers[number] = _layer(tensors, f"model.layers.{number}.")
        self._layers = tuple(layers)
        self._embedding, self._norm = tensors["model.embed_tokens.weight"], tensors["model.norm.weight"]
        self._head = (self._embedding if self.shape.is_tied else tensors["lm_head.weight"]).T


def asking(model: Llama) -> Ask:
    """Return how our own forward pass answers a canary's prompts."""

    def ask(prompts: TokenRows) -> LogprobRows:
        rows = []
        with np.errstate(all="ignore"):
            for prompt in prompts:
                logprobs = log_softmax(model.forward(prompt, model.new_cache(len(prompt))))
                rows.append(tuple(float(logprobs[place, token]) for place, token in enumerate(prompt[1:])))
        return tuple(rows)

    return ask


def judged(case: Case, pair: GoldenPair, ask: Ask) -> Result:
    """Ask pass after pass, as `harness canary` compares them, until one is not the golden's."""
    first = largest = 0.0
    for rotation in range(pair.old.passes):
        comparison = pair.compare(ask(of_pass(pair.old.prompts, rotation)), rotation)
        largest = max(largest, comparison.difference_old)
        first = comparison.difference_old if rotation == 0 else first
        if comparison.answer is Answer.NEITHER:
            outcome = Outcome.LATER if rotation else Outcome.FIRST
            return _result(case, outcome, noticed_by=rotation + 1, first=first, largest=largest)
    return _result(case, Outcome.MISSED, first=first, largest=largest)


def _result(
    case: Case,
    outcome: Outcome,
    *,
    noticed_by: int | None = None,
    first: float = 0.0,
    largest: float = 0.0,
    because: str = "",
) -> Result:
    return Result(
        case=case,
        outcome=outcome,
        noticed_by=noticed_by,
        difference_first=first,
        difference=largest,
        because=because,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What damaged checkpoints are made of and compared with."""

    split: Path  # the whole checkpoint
    old: Path  # the one before it
    place: Path
    pair: GoldenPair
    model: Llama
    tensors: Mapping[str, Floats]  # of the model
    serve: Callable[[Path], Ask] | None  # makes another engine serve a checkpoint; None: our own forward pass answers


@dataclass(frozen=True, slots=True, kw_only=True)
class Excerpt:
    """A part of the checkpoint that is small enough to be damaged and loaded quickly."""

    split: Path
    old: Path
    names: Mapping[str, str]  # of its tensors, by their names in the whole checkpoint
    loaded: Loaded


def examined(case: Case, small: Case, excerpt: Excerpt, bench: Bench) -> Result | None:
    """Damage a copy of the excerpt, load it, and ask the whole model; None where this tensor cannot have this damage.

    `small` is the same case with the names of the excerpt.
    """
    try:
        with damaged(excerpt.split, excerpt.old, small, bench.place) as out:
            loaded = loaded_like_vllm(out, tokens_max=excerpt.loaded.shape.max_positions)
    except FaultNotApplicable:
        return None
    except FaultNotProved as error:  # nothing has changed on disk, such as a tail that was zero before
        return _result(case, Outcome.ALIKE, because=str(error))
    except CheckpointDefect as defect:
        if case.damage.name == "add_bias":  # refused by our own engine alone: vLLM drops it without a word
            return _result(case, Outcome.ALIKE)
        return _result(case, Outcome.REFUSED, because=defect.reason)
    changed = {
        name: loaded.tensors[excerpt.names[name]]
        for name in case.tensors
        if not np.array_equal(loaded.tensors[excerpt.names[name]], excerpt.loaded.tensors[excerpt.names[name]])
    }
    if not changed:
        return _result(case, Outcome.ALIKE)
    if bench.serve is None:
        return judged(case, bench.pair, asking(Variant(bench.model, {**bench.tensors, **changed}, changed)))
    with damaged(bench.split, bench.old, case, bench.place) as out:
        try:
            return judged(case, bench.pair, bench.serve(out))
        except (OSError, ValueError) as error:
            return _result(case, Outcome.REFUSED, because=f"by the engine: {error}")


@contextmanager
def damaged(split: Path, old: Path, case: Case, place: Path) -> Iterator[Path]:
    """Give a damaged copy, and remove it.

    Raises: FaultNotApplicable, FaultNotProved as `damage_copy`.
    """
    out = place / "damaged"
    damage_copy(split, out, case.damage, old=old, seed=case.seed)
    try:
        yield out
    finally:
        out.chmod(0o755)
        shutil.rmtree(out)
