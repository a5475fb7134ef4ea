"""Canaries of a comparison: one wrong answer voids it, and what is stored of them is not trusted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.judge.canaries import Canaries, canary_gates
from harness.judge.comparison import judge_blocks
from harness.judge.gates import GateLimits
from harness.judge.paired import Slower
from tests.judge.measured import blocks, declaration, noisy

RIGHT = Canaries(asked=2, right=2, wrong=0, difference_max=0.0002, tolerance=0.001)
WRONG = Canaries(asked=2, right=1, wrong=1, difference_max=3.25, tolerance=0.001)
SILENT = Canaries(asked=2, right=0, wrong=0, difference_max=0.0, tolerance=0.001)


def test_one_wrong_answer_makes_it_invalid_for_good() -> None:
    made = [replace(b, canaries=RIGHT) for b in blocks(noisy(0.3, 4))]
    assert judge_blocks(declaration(), made).answer is Slower.YES
    wrong = [replace(b, canaries=WRONG) if b.number == 5 else b for b in made]
    seen = judge_blocks(declaration(), wrong)
    assert (seen.answer, seen.is_final) == (Slower.INVALID, True)
    assert "0 of 0 under load, 1 of 16 beside it" in seen.because
    assert "wrong_answers is 1 in 16 canaries (first in block 005-new: off by 3.25" in seen.because
    assert "does not serve the weights that it was given, limit 0" in seen.because


def test_silence_is_noted_and_no_canaries_too() -> None:
    silent = judge_blocks(declaration(), [replace(b, canaries=SILENT) for b in blocks(noisy(0.3, 4))])
    assert silent.answer is Slower.YES
    assert "16 canaries were not answered" in silent.notes
    assert not canary_gates({"000-old": None}, GateLimits())
    none = judge_blocks(declaration(), blocks(noisy(0.3, 4)))
    assert "whether the answers are right was not checked (no canaries)" in none.notes


def test_side_that_is_wrong_from_its_start_on_needs_no_block() -> None:
    seen = judge_blocks(declaration(problems=('side "new" does not answer rightly: ...',)), [])
    assert (seen.answer, seen.is_final) == (Slower.INVALID, True)
    assert seen.because.startswith('side "new" does not answer rightly')


@pytest.mark.parametrize(
    "change", [{"asked": -1}, {"wrong_under_load": -1}, {"right": "2"}, {"wrong": True}, {"tolerance": "x"}]
)
def test_stored_counts_are_checked(change: dict[str, object]) -> None:
    stored = {"asked": 2, "right": 2, "wrong": 0, "difference_max": None, "tolerance": 0.001}
    assert Canaries.from_json(stored).difference_max == float("inf")
    assert Canaries.from_json(stored).asked_under_load == 0  # of an earlier release
    with pytest.raises((ValueError, TypeError)):
        Canaries.from_json({**stored, **change})
