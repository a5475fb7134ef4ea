"""Comparisons that share blocks: a copy is no further evidence, whatever it is called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.judge.blocks import Block


def copies_among(comparisons: Mapping[str, Sequence[Block]]) -> dict[str, str]:
    """Return the names of comparisons that have a block of another one, and the name of that one, which is kept.

    Of those that share blocks the one with most blocks is kept, the first among equals: a copy may have been made while
    the comparison still went on.
    """
    kept: dict[str, str] = {}  # digest of a block → the comparison that has it
    copies: dict[str, str] = {}
    for name, blocks in sorted(comparisons.items(), key=lambda item: -len(item[1])):
        digests = [block.digest for block in blocks if block.digest]
        other = next((kept[digest] for digest in digests if digest in kept), None)
        if other is not None:
            copies[name] = other
            continue
        kept |= dict.fromkeys(digests, name)
    return copies
