"""Ask about each damage in turn whether a canary notices it, and make a table of the answers."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
from canary_damages import Case

from harness.damage import damage_copy
from harness.engine.reference.defects import PlantedDefect
from harness.engine.reference.loading import Contract, Loaded, load
from harness.engine.reference.model import Llama, log_softmax
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


def asking(loaded: Loaded) -> Ask:
    """Return how our own forward pass answers a canary's prompts from these weights."""
    model = Llama(loaded.shape, loaded.tensors)

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


def examined(
    case: Case,
    split: Path,
    old: Path,
    place: Path,
    *,
    pair: GoldenPair,
    whole: Loaded,
    ask: Callable[[Path], Ask] | None,
) -> Result | None:
    """Damage a copy, load it, and ask; None where this tensor cannot have this damage.

    `ask` makes another engine serve a checkpoint, None asks our own forward pass.
    """
    out = place / "damaged"
    try:
        damage_copy(split, out, case.damage, old=old, seed=case.seed)
    except FaultNotApplicable:
        return None
    except FaultNotProved as error:  # nothing has changed on disk, such as a tail that was zero before
        return _result(case, Outcome.ALIKE, because=str(error))
    try:
        tokens_max = whole.shape.max_positions
        try:
            loaded = loaded_like_vllm(out, tokens_max=tokens_max)
        except CheckpointDefect as defect:
            if case.damage.name == "add_bias":  # refused by our own engine alone: vLLM drops it without a word
                return _result(case, Outcome.ALIKE)
            return _result(case, Outcome.REFUSED, because=defect.reason)
        names = [name for name in case.tensors if name in whole.tensors]
        if all(np.array_equal(loaded.tensors[name], whole.tensors[name]) for name in names):
            return _result(case, Outcome.ALIKE)
        try:
            return judged(case, pair, asking(loaded) if ask is None else ask(out))
        except (OSError, ValueError) as error:
            return _result(case, Outcome.REFUSED, because=f"by the engine: {error}")
    finally:
        out.chmod(0o755)
        shutil.rmtree(out)


def table(results: Iterable[Result]) -> list[str]:
    """Return a Markdown table: a row for each damage, a column for each kind of tensor."""
    cells: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        cells.setdefault((result.case.row, result.case.column), []).append(result)
    rows, columns = (list(dict.fromkeys(key[place] for key in cells)) for place in (0, 1))
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for row in rows:
        found = [_cell(cells.get((row, column), [])) for column in columns]
        lines.append(f"| `{row.split(' ')[0]}`{row.removeprefix(row.split(' ')[0])} | " + " | ".join(found) + " |")
    return lines


def _cell(results: Sequence[Result]) -> str:
    """Return how many were noticed by the first pass, how many more by a later one, of how many, and the least difference."""
    if not results:
        return ""
    asked = [each for each in results if each.outcome not in (Outcome.REFUSED, Outcome.ALIKE)]
    if not asked:
        return "refused" if results[0].outcome is Outcome.REFUSED else "="
    first, later = (sum(each.outcome is outcome for each in asked) for outcome in (Outcome.FIRST, Outcome.LATER))
    least = min(each.difference for each in asked)
    shown = "not finite" if math.isinf(least) else f"{least:.2g}"
    return f"{first}{f' + {later}' if later else ''} of {len(asked)}, {shown}"


def summary(results: Sequence[Result], tolerance: float) -> list[str]:
    """Return the counts, what one pass would notice with a wider tolerance, and everything that was missed."""
    counts = {outcome: sum(each.outcome is outcome for each in results) for outcome in Outcome}
    asked = [each for each in results if each.outcome not in (Outcome.REFUSED, Outcome.ALIKE)]
    lines = [
        f"{len(results)} damages: {counts[Outcome.REFUSED]} refused at start, {counts[Outcome.ALIKE]} serve the same weights, "
        f"{len(asked)} serve others; of these the first pass notices {counts[Outcome.FIRST]}, a later pass "
        f"{counts[Outcome.LATER]} more, no pass {counts[Outcome.MISSED]} (tolerance {tolerance:g})"
    ]
    for wider in (0.01, 0.1, 0.5):
        seen = sum(each.difference_first > wider for each in asked)
        lines.append(f"with a tolerance of {wider:g} the first pass alone would notice {seen} of {len(asked)}")
    missed: dict[str, list[float]] = {}
    for each in asked:
        if each.outcome is Outcome.MISSED:
            missed.setdefault(f"{each.case.row}, {each.case.column}", []).append(each.difference)
    lines += [f"missed: {what}: {len(far)}, differences up to {max(far):.2g}" for what, far in missed.items()]
    return lines
