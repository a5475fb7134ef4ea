"""A table of what a canary noticed, from the lines of JSON that `canary.py sensitivity` writes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from canary_sensitivity import Outcome

FAMILIES = {
    **dict.fromkeys(("q", "k", "v", "o"), "attention"),
    **dict.fromkeys(("gate", "up", "down"), "MLP"),
    **dict.fromkeys(("input norm", "post norm", "final norm"), "norms"),
}
COLUMNS = ("attention", "MLP", "norms", "embedding", "embedding, row read", "embedding, row not read")
WIDER_TOLERANCES = (0.01, 0.1, 0.5)
NOT_ASKED = (Outcome.REFUSED, Outcome.ALIKE)

Line = Mapping[str, Any]


def table(lines: Iterable[Line]) -> list[str]:
    """Return a Markdown table: a row for each damage, a column for each family of tensors.

    A cell says how many the first pass noticed, how many more a later one, of how many, and the smallest difference that
    any of them made. Damages that change nothing, or that no engine loads, are one line below the table.
    """
    cells: dict[tuple[str, str], list[Line]] = {}
    apart: dict[Outcome, list[str]] = {outcome: [] for outcome in NOT_ASKED}
    by_row: dict[str, list[Line]] = {}
    for line in lines:
        by_row.setdefault(line["row"], []).append(line)
    for row, found in by_row.items():
        outcomes = {Outcome(line["outcome"]) for line in found}
        if outcomes <= set(NOT_ASKED):
            apart[Outcome.ALIKE if Outcome.ALIKE in outcomes else Outcome.REFUSED].append(row)
            continue
        for line in found:
            cells.setdefault((row, FAMILIES.get(line["column"], line["column"])), []).append(line)
    rows = dict.fromkeys(row for row, _ in cells)
    columns = dict.fromkeys([*COLUMNS, *(column for _, column in cells)])
    shown = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for row in rows:
        shown.append(
            f"| {_named(row)} | " + " | ".join(_cell(cells.get((row, column), [])) for column in columns) + " |"
        )
    for outcome, said in ((Outcome.ALIKE, "the same weights are served"), (Outcome.REFUSED, "does not load")):
        shown += ["", f"{said}: {', '.join(_named(row) for row in apart[outcome])}"] if apart[outcome] else []
    return shown


def summary(lines: Sequence[Line], tolerance: float) -> list[str]:
    """Return the counts, what one pass would notice with a wider tolerance, and what was missed."""
    counts = {outcome: sum(line["outcome"] == outcome for line in lines) for outcome in Outcome}
    asked = [line for line in lines if line["outcome"] not in NOT_ASKED]
    said = [
        f"{len(lines)} damages: {counts[Outcome.REFUSED]} are refused at start, {counts[Outcome.ALIKE]} serve the same weights, "
        f"{len(asked)} serve others; of these the first pass notices {counts[Outcome.FIRST]}, a later pass "
        f"{counts[Outcome.LATER]} more, no pass {counts[Outcome.MISSED]} (tolerance {tolerance:g})"
    ]
    for wider in WIDER_TOLERANCES:
        seen = sum(_number(line["difference_first"]) > wider for line in asked)
        said.append(f"with a tolerance of {wider:g} the first pass alone would notice {seen} of {len(asked)}")
    missed: dict[tuple[str, str], list[float]] = {}
    for line in asked:
        if line["outcome"] == Outcome.MISSED:
            missed.setdefault((line["row"], line["column"]), []).append(_number(line["difference"]))
    return said + [
        f"missed: {row}, {column}: {len(far)}, differences up to {max(far):.2g}"
        for (row, column), far in missed.items()
    ]


def _cell(lines: Sequence[Line]) -> str:
    if not lines:
        return ""
    asked = [line for line in lines if line["outcome"] not in NOT_ASKED]
    if not asked:
        return "refused" if lines[0]["outcome"] == Outcome.REFUSED else "same"
    first, later = (sum(line["outcome"] == outcome for line in asked) for outcome in (Outcome.FIRST, Outcome.LATER))
    least = min(_number(line["difference"]) for line in asked)
    return f"{first}{f' + {later}' if later else ''} of {len(asked)}, {'not finite' if math.isinf(least) else f'{least:.2g}'}"


def _number(value: float | None) -> float:
    return math.inf if value is None else value


def _named(row: str) -> str:
    name, space, rest = row.partition(" ")
    return f"`{name}`{space}{rest}"
