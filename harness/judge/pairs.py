"""Pairs of blocks, the unit that a verdict counts: as many blocks of the one arm as of the other, side by side in time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from harness.judge.blocks import Block, difference


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One pair: A B, or A B B A where each arm has two blocks in it; `null` blocks stand where new ones would."""

    number: int
    old: tuple[Block, ...]
    new: tuple[Block, ...]

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Return all its blocks."""
        return (*self.old, *self.new)

    def difference(self, metric: str) -> float:
        """Return the mean of ln T(B) less that of ln T(A); not finite when some quantile is infinite or is not known."""
        return fmean(difference(old, new, metric) for old, new in zip(self.old, self.new, strict=True))


def pairs_of(
    blocks: Sequence[Block], *, is_null: bool, blocks_per_arm: int
) -> tuple[tuple[Pair, ...], tuple[int, ...]]:
    """Return the whole pairs in which no gate failed, and the numbers of the void ones; one cut short is neither."""
    members: dict[int, list[Block]] = {}
    for block in blocks:
        if block.is_null is is_null:
            members.setdefault(block.pair, []).append(block)
    whole, void = [], []
    for number, found in sorted(members.items()):
        old = tuple(block for block in found if block.arm == "old")
        new = tuple(block for block in found if block.arm == ("null" if is_null else "new"))
        if not len(old) == len(new) == blocks_per_arm:
            continue
        if any(block.failed_gates for block in found):
            void.append(number)
        else:
            whole.append(Pair(number=number, old=old, new=new))
    return tuple(whole), tuple(void)
