"""Recovery times are compared by an exact rank test and a margin; too few of them are no answer."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
from scipy.stats import mannwhitneyu

from harness.judge.recovery import judge_recoveries, rank_p_value, typical_ratio
from harness.judge.verdict import Verdict

OLD = (30.1, 31.4, 29.8, 30.9, 32.0)
SLOWER = tuple(1.6 * time for time in OLD)


@pytest.mark.parametrize(
    ("old", "new", "ways", "of"),
    [
        ((1, 2, 3, 4), (5, 6, 7, 8), 1, 70),  # U = 16
        ((1, 2, 3, 5), (4, 6, 7, 8), 2, 70),  # U = 15
        ((1, 2, 4, 5), (3, 6, 7, 8), 4, 70),  # U = 14
        ((5, 6, 7, 8), (1, 2, 3, 4), 70, 70),
        ((1, 2, 3, 4, 5), (6, 7, 8, 9, 10), 1, 252),
        ((1,), (2,), 1, 2),
        ((1, 1), (1, 1), 6, 6),
        ((1, 2), (2, 3), 2, 6),  # the two 2s share their rank, so that each of them may be the new one
        ((1, 2), (3, math.inf), 1, 6),
    ],
)
def test_rank_test_has_the_values_of_the_tables(
    old: tuple[float, ...], new: tuple[float, ...], ways: int, of: int
) -> None:
    assert rank_p_value([(old, new)]) == pytest.approx(ways / of)


@pytest.mark.parametrize(("old", "new"), [((3.0, 1.5, 9.0, 4.2), (2.0, 8.0, 7.5)), (OLD, (30.0, 35.0, 31.0, 29.0))])
def test_rank_test_agrees_with_scipy(old: tuple[float, ...], new: tuple[float, ...]) -> None:
    expected = mannwhitneyu(new, old, alternative="greater", method="exact").pvalue
    assert rank_p_value([(old, new)]) == pytest.approx(expected)


def test_ranks_are_exchanged_within_a_scenario_only() -> None:
    strata = [((1.0, 2.0), (3.0,)), ((100.0,), (90.0, 110.0))]
    values = [[*old, *new] for old, new in strata]
    observed = 3 + (1 + 3)  # ranks of the new ones
    sums = [
        sum(sorted(values[0]).index(each) + 1 for each in first)
        + sum(sorted(values[1]).index(each) + 1 for each in second)
        for first in combinations(values[0], 1)
        for second in combinations(values[1], 2)
    ]
    assert rank_p_value(strata) == pytest.approx(sum(each >= observed for each in sums) / len(sums))
    # One pair per scenario: the sign test.
    assert rank_p_value([((number,), (number + 1.0,)) for number in range(7)]) == pytest.approx(1 / 2**7)


def test_slower_by_more_than_the_margin_is_broken() -> None:
    (found,) = judge_recoveries({"a": OLD}, {"a": SLOWER})
    assert found.verdict is Verdict.BROKEN
    assert found.ratio == pytest.approx(1.6, abs=0.05)
    assert "more than 25% longer" in found.because


def test_slower_within_the_margin_is_held() -> None:
    (found,) = judge_recoveries({"a": OLD}, {"a": tuple(1.08 * time for time in OLD)})
    assert found.verdict is Verdict.HELD, found.because


def test_too_few_recoveries_are_unknown_however_slow() -> None:
    (found,) = judge_recoveries({"a": OLD[:4]}, {"a": (900.0,) * 9})
    assert found.verdict is Verdict.UNKNOWN
    assert "4 recoveries of the baseline" in found.because
    (found,) = judge_recoveries({"a": OLD}, {"b": SLOWER})
    assert found.verdict is Verdict.UNKNOWN, "other scenarios say nothing"


def test_noise_beyond_the_margin_is_unknown() -> None:
    (found,) = judge_recoveries({"a": (10, 20, 30, 40, 50)}, {"a": (12, 22, 33, 41, 60)})
    assert found.verdict is Verdict.UNKNOWN
    assert "more recoveries would tell" in found.because


def test_never_is_longer_than_anything() -> None:
    (found,) = judge_recoveries({"a": OLD}, {"a": (math.inf,) * 5})
    assert found.verdict is Verdict.BROKEN
    assert typical_ratio([((math.inf,), (math.inf, 3.0))]) == pytest.approx(0.5)


def test_one_scenario_alone_breaks_what_all_together_hide() -> None:
    old = {f"s{number}": OLD for number in range(9)}
    found = judge_recoveries(old, {**old, "s3": SLOWER})
    assert {each.name: each.verdict for each in found}["s3"] is Verdict.BROKEN
    assert found[0].name == "all scenarios together"
    assert found[0].verdict is Verdict.HELD


def test_what_was_not_watched_to_its_end_is_not_left_out() -> None:
    """Nine that are as fast as before would be held; those that were given up on may have been the slow ones."""
    (found,) = judge_recoveries({"a": OLD}, {"a": OLD * 2}, candidate_beyond={"a": (31.0,) * 12})
    assert found.verdict is Verdict.UNKNOWN
    assert "0 of the baseline and 12 of the candidate were not watched to their end" in found.because
    # Of the baseline the worst case is that they ended at once, which makes it fast.
    (found,) = judge_recoveries({"a": OLD}, {"a": OLD}, baseline_beyond={"a": (2.0,) * 9})
    assert found.verdict is Verdict.UNKNOWN
    assert "9 of the baseline and 0 of the candidate" in found.because
    # If none of those of the baseline ever came, the candidate is no slower; if they came at once, it is.
    (found,) = judge_recoveries({"a": OLD}, {"a": SLOWER}, baseline_beyond={"a": (2.0,) * 5})
    assert found.verdict is Verdict.UNKNOWN, found.because
    assert found.may_be_broken


def test_an_answer_that_is_the_same_wherever_they_ended_stays() -> None:
    (found,) = judge_recoveries({"a": OLD}, {"a": SLOWER}, candidate_beyond={"a": (60.0, 70.0)})
    assert found.verdict is Verdict.BROKEN
    assert "the answer is the same wherever they ended" in found.because
    assert found.candidate == 7
    (at_best,) = judge_recoveries({"a": OLD}, {"a": (*SLOWER, 60.0, 70.0)})
    assert found.p_slower == at_best.p_slower, "the weaker of the two"
    assert "watched" not in at_best.because
    (found,) = judge_recoveries({"a": OLD * 4}, {"a": OLD * 4}, candidate_beyond={"a": (31.0,)})
    assert found.verdict is Verdict.HELD, found.because
    (at_worst,) = judge_recoveries({"a": OLD * 4}, {"a": (*OLD * 4, math.inf)})
    assert found.p_not_slower == at_worst.p_not_slower, "the weaker of the two"


def test_a_scenario_in_which_no_recovery_was_seen_to_its_end_counts() -> None:
    others = {f"s{number}": OLD for number in range(9)}
    found = judge_recoveries({**others, "a": OLD}, others, candidate_beyond={"a": (1.0,) * 5})
    assert found[0].verdict is Verdict.HELD, found[0].because
    assert [each.verdict for each in found if each.name == "a"] == [Verdict.UNKNOWN], "alone it may be broken"
    found = judge_recoveries({**others, "a": OLD}, {**others, "a": OLD}, candidate_beyond={"a": (1.0,) * 3})
    assert "a" not in [each.name for each in found], "alone it may be held or not, but not broken"
    seen = judge_recoveries({**others, "a": OLD}, {**others, "a": OLD})
    assert "a" not in [each.name for each in seen if each.verdict is not Verdict.HELD]


def test_neither_is_said_between_the_levels() -> None:
    (found,) = judge_recoveries({"a": OLD}, {"a": (48.0, 49.0, 50.0, 29.9, 51.0)})
    assert found.p_slower == pytest.approx(12 / 252)
    assert found.verdict is Verdict.UNKNOWN, "one in twenty is not rare enough to break a release"
    (found,) = judge_recoveries({"a": OLD}, {"a": (31.0, 32.0, 33.0, 39.0, 40.0)})
    assert found.p_not_slower == pytest.approx(42 / 252)
    assert found.verdict is Verdict.UNKNOWN, found.because


def test_times_below_what_can_be_measured_are_alike() -> None:
    (found,) = judge_recoveries({"a": (0.0,) * 5}, {"a": (0.0005,) * 5})
    assert (found.ratio, found.verdict) == (1.0, Verdict.UNKNOWN)


def test_a_scenario_with_too_few_of_its_own_says_nothing_alone() -> None:
    times = {"a": OLD, "b": OLD[:2]}
    assert [each.name for each in judge_recoveries(times, times)] == ["all scenarios together", "a"]


def test_a_scenario_without_recoveries_of_one_side_is_not_compared() -> None:
    found = judge_recoveries({"a": OLD, "b": ()}, {"a": OLD, "b": OLD})
    assert [each.name for each in found] == ["all scenarios together"]
    assert found[0].candidate == 5
    assert typical_ratio([((0.0005,), (0.0,))]) == 1.0
