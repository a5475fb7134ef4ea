"""What is said beside an answer: which effect could have been found, and what to keep in mind."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from harness.judge.comparison import judge_blocks
from tests.judge.measured import blocks, declaration, noisy


def test_smallest_effect_is_said_with_the_spread_that_it_comes_from_and_the_one_that_is_needed() -> None:
    seen = judge_blocks(declaration(), blocks(noisy(0.05, 16, sd=0.05)))
    found = seen.reported["ttft_ms_p50"]
    assert f"with 16 pairs (95 % probability): ttft_ms_p50 {found.detectable:+.1%}, tpot_ms_p50" in seen.power
    assert f"pairs spread by ttft_ms_p50 {found.pair_sd:.1%}" in seen.power
    assert "16 pairs find +10% up to a spread of 3.7%, and clear an unchanged engine up to 4.7%" in seen.power
    assert seen.as_json()["power"] == seen.power


def test_calmer_pairs_would_have_found_less() -> None:
    loud, calm = (judge_blocks(declaration(), blocks(noisy(0.05, 16, sd=sd))) for sd in (0.05, 0.01))
    assert loud.reported["ttft_ms_p50"].detectable > calm.reported["ttft_ms_p50"].detectable > 0.05


def test_nothing_is_said_of_what_is_not_known() -> None:
    made = [replace(b, values=dict.fromkeys(b.values, math.inf)) for b in blocks(noisy(0.0, 4))]
    assert judge_blocks(declaration(), made).power == ""
    assert judge_blocks(declaration(), []).power == ""


@pytest.mark.parametrize(
    ("profile", "said"),
    [
        ("nightly", "one start of each side"),
        ("release", "each side was started once"),
    ],
)
def test_one_start_of_each_side_is_noted(profile: str, said: str) -> None:
    seen = judge_blocks(declaration(profile=profile), blocks(noisy(0.3, 6)))
    assert [note for note in seen.notes if note.startswith(said)]
    assert (said in seen.because) is (profile == "release")  # where it is not the default, the answer itself says so
    assert not [
        note
        for note in judge_blocks(declaration(fresh=True), blocks(noisy(0.3, 6))).notes
        if note.startswith(("one start", "each side was started once"))
    ]
