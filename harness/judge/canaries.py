"""Did a side of a comparison answer from the weights that it was given? How fast it is says nothing otherwise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.judge.gates import Gate, GateLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class Canaries:
    """What became of the canaries that were asked before, in and after the load of a block."""

    asked: int  # in all, those under load included
    right: int  # within the tolerance of the golden of that side
    wrong: int  # answered otherwise; those that are neither were not answered
    difference_max: float  # largest difference to the golden; infinite when something was missing or not finite
    tolerance: float
    asked_under_load: int = 0
    wrong_under_load: int = 0

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Canaries:
        """Read what was stored; null stands for infinite.

        Raises: ValueError, TypeError or KeyError when it is something else.
        """
        counts = {name: fields[name] for name in ("asked", "right", "wrong")}
        # Earlier releases asked none under load.
        counts |= {name: fields.get(name, 0) for name in ("asked_under_load", "wrong_under_load")}
        if not all(type(count) is int and count >= 0 for count in counts.values()):
            raise ValueError(f"canaries are counted by whole numbers, got {counts}")
        difference = fields["difference_max"]
        return cls(
            **counts,
            difference_max=math.inf if difference is None else float(difference),
            tolerance=float(fields["tolerance"]),
        )


def canary_gates(blocks: Mapping[str, Canaries | None], limits: GateLimits) -> tuple[Gate, ...]:
    """Return the gate of answers, over all blocks: none may be wrong. No gate where no canary was asked."""
    asked = {name: seen for name, seen in blocks.items() if seen is not None and seen.asked}
    if not asked:
        return ()
    wrong = {name: seen for name, seen in asked.items() if seen.wrong}
    total = sum(seen.asked for seen in asked.values())
    where = f"{total} canaries"
    if wrong:
        name, first = next(iter(wrong.items()))
        asked_under_load = sum(seen.asked_under_load for seen in asked.values())
        under_load = sum(seen.wrong_under_load for seen in wrong.values())
        beside = sum(seen.wrong for seen in wrong.values()) - under_load
        where += (
            f" (first in block {name}: off by {first.difference_max:.3g} from the known-good answer, tolerance "
            f"{first.tolerance:g}; {under_load} of {asked_under_load} under load, {beside} of {total - asked_under_load} "
            "beside it), so at least one side does not serve the weights that it was given"
        )
    return (
        Gate(
            name="wrong_answers",
            seen=sum(seen.wrong for seen in wrong.values()),
            limit=limits.wrong_answers,
            where=where,
        ),
    )
