"""Pairs of blocks: A B or A B B A, whole or left out."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from harness.judge.comparison import judge_blocks
from harness.judge.paired import Slower
from harness.judge.pairs import pairs_of
from tests.judge.measured import block, declaration, failing_gate, noisy


def doubled(factors: list[float], *, wobble: float = 0.0) -> list:
    """Return pairs A B B A in which the second block of B is slower than its first by `wobble`."""
    made = []
    for pair, factor in enumerate(factors):
        arms = (("old", 1.0), ("new", factor), ("new", factor * (1 + wobble)), ("old", 1.0))
        made += [block(4 * pair + n, arm, pair, slower) for n, (arm, slower) in enumerate(arms)]
    return made


def test_difference_is_the_mean_over_the_blocks_of_each_arm() -> None:
    whole, void = pairs_of(doubled([1.2], wobble=0.1), is_null=False, blocks_per_arm=2)
    assert (len(whole), void) == (1, ())
    assert whole[0].difference("ttft_ms_p50") == pytest.approx(math.log(1.2) + math.log(1.1) / 2)
    assert [b.number for b in whole[0].old] == [0, 3]


def test_pair_that_lacks_a_block_is_left_out_and_one_failed_gate_voids_all_four() -> None:
    made = doubled([1.2, 1.2, 1.2])
    made = [replace(b, gates=(failing_gate(),)) if b.number == 6 else b for b in made[:-1]]
    whole, void = pairs_of(made, is_null=False, blocks_per_arm=2)
    assert [pair.number for pair in whole] == [0]
    assert void == (1,)


def test_block_without_a_finite_quantile_makes_its_pair_not_finite() -> None:
    made = [replace(b, values={**b.values, "ttft_ms_p50": math.inf}) if b.number == 2 else b for b in doubled([1.2])]
    whole, _ = pairs_of(made, is_null=False, blocks_per_arm=2)
    assert not math.isfinite(whole[0].difference("ttft_ms_p50"))
    assert math.isfinite(whole[0].difference("tpot_ms_p50"))


def test_comparison_counts_pairs_and_not_blocks() -> None:
    made = doubled(noisy(0.3, 4))
    assert judge_blocks(declaration(blocks_per_arm=2), made).answer is Slower.YES
    assert judge_blocks(declaration(blocks_per_arm=2), made).pairs == 4
    short = judge_blocks(declaration(blocks_per_arm=2), made[:12])
    assert short.because == "3 valid pairs, the first look is at 4"
    assert judge_blocks(declaration(blocks_per_arm=2), made[:10]).pairs == 2  # A B of a third is no pair
