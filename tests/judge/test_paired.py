"""The paired verdict: what it says, when it looks, and that it treats both arms alike."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from harness.errors import UsageError
from harness.judge.multiplicity import adjusted, holm
from harness.judge.paired import Slower, decide, evidence
from harness.judge.profiles import PROFILES, profile_named
from harness.judge.ranks import rank_distribution, rank_interval, walsh_averages
from tests.judge.measured import noisy

NIGHTLY = PROFILES["nightly"]
RELEASE = PROFILES["release"]


def logs(effect: float, pairs: int, *, sd: float = 0.02, seed: int = 1) -> list[float]:
    return [math.log(factor) for factor in noisy(effect, pairs, sd=sd, seed=seed)]


@pytest.mark.parametrize(
    ("effect", "pairs", "answer", "looked"),
    [
        (0.30, 16, Slower.YES, 4),
        (0.00, 16, Slower.NO, 4),
        (0.05, 16, Slower.INCONCLUSIVE, 16),
        (0.30, 3, Slower.INVALID, 3),
        (0.12, 5, Slower.INCONCLUSIVE, 4),
    ],
)
def test_answers_of_the_nightly_profile(effect: float, pairs: int, answer: Slower, looked: int) -> None:
    seen = decide({"ttft_ms_p50": logs(effect, pairs)}, NIGHTLY)
    assert (seen.answer, seen.pairs) == (answer, looked)
    if answer is Slower.INVALID:
        assert seen.because == "3 pairs are there, the first look is at 4"
    if answer is Slower.INCONCLUSIVE and pairs == 16:
        assert "pairs would be needed" in seen.because


def test_what_is_always_reported() -> None:
    seen = decide({"ttft_ms_p50": logs(0.30, 4)}, NIGHTLY).metrics[0].evidence
    assert seen.low < 0.30 < seen.high
    assert seen.pair_sd == pytest.approx(np.std(logs(0.30, 4), ddof=1))
    assert 0.05 < seen.detectable < 0.60
    assert seen.method == "t"
    assert evidence(logs(0.0, 12), 0.05, alpha_yes=0.003).method == "signed ranks"


def test_first_look_that_decides_stands() -> None:
    late = [0.0, 0.001, -0.001, 0.0005, *[0.5] * 12]
    assert decide({"m": late}, NIGHTLY).answer is Slower.NO
    assert decide({"m": late[::-1]}, NIGHTLY).answer is Slower.YES


def test_looks_and_levels_are_those_of_the_profiles() -> None:
    assert (NIGHTLY.looks, RELEASE.looks, PROFILES["incident"].looks) == ((4, 8, 16), (6, 12, 24), (4, 8))
    for profile in (NIGHTLY, RELEASE, PROFILES["incident"]):
        assert profile.level_yes == pytest.approx(0.01)
        assert profile.level_no == pytest.approx(0.05)
    assert (NIGHTLY.margin, RELEASE.margin, PROFILES["incident"].margin) == (0.05, 0.02, 0.15)
    with pytest.raises(UsageError, match='profile "weekly" is unknown; profiles: nightly'):
        profile_named("weekly")


def test_bounds_are_those_of_students_t() -> None:
    d = logs(0.08, 8, sd=0.03)
    found = evidence(d, 0.05, alpha_yes=0.003)
    t = stats.ttest_1samp(d, math.log1p(0.05), alternative="greater")
    assert found.p_slower == pytest.approx(t.pvalue)
    low, high = stats.t.interval(0.95, 7, np.mean(d), stats.sem(d))
    assert (found.low, found.high) == pytest.approx((math.expm1(low), math.expm1(high)))


@pytest.mark.parametrize("n", [12, 16, 24])
def test_signed_ranks_are_exact(n: int) -> None:
    d = np.array(logs(0.06, n, sd=0.03, seed=n))
    found = evidence(d.tolist(), 0.05, alpha_yes=0.003)
    centred = d - math.log1p(0.05)
    assert found.p_slower == pytest.approx(stats.wilcoxon(centred, alternative="greater", method="exact").pvalue)
    assert found.p_not_slower == pytest.approx(stats.wilcoxon(centred, alternative="less", method="exact").pvalue)
    # An interval's end is where the test of that very centre stops rejecting.
    low, high = rank_interval(walsh_averages(d), n, 0.025)
    for centre, alternative in ((low, "greater"), (high, "less")):
        inside = 1e-9 if alternative == "greater" else -1e-9
        assert stats.wilcoxon(d - centre + inside, alternative=alternative, method="exact").pvalue <= 0.025
        assert stats.wilcoxon(d - centre - inside, alternative=alternative, method="exact").pvalue > 0.025


def test_interval_of_too_few_pairs_is_everything() -> None:
    assert rank_interval(walsh_averages(np.array([1.0, 2.0])), 2, 0.025) == (-math.inf, math.inf)
    assert rank_distribution(12)[0] == 2.0**-12


def test_outlier_block_does_not_hide_a_regression_from_the_ranks() -> None:
    d = logs(0.10, 16, sd=0.01)
    d[3] = -1.0
    assert evidence(d, 0.05, alpha_yes=0.005).p_slower < 0.005
    assert stats.ttest_1samp(d, math.log1p(0.05), alternative="greater").pvalue > 0.05


def test_infinite_quantile_decides_nothing() -> None:
    seen = decide({"m": [*logs(0.3, 15), math.nan]}, PROFILES["confirm"])
    assert seen.answer is Slower.INCONCLUSIVE
    assert "infinite in some blocks" in seen.because


def test_every_metric_must_be_not_slower() -> None:
    both = {"a": logs(0.0, 16), "b": logs(0.05, 16, seed=2)}
    assert decide(both, NIGHTLY).answer is Slower.INCONCLUSIVE
    one = decide({"a": logs(0.0, 16), "b": logs(0.4, 16)}, NIGHTLY)
    assert (one.answer, one.slower) == (Slower.YES, ("b",))


def test_more_comparisons_ask_for_more() -> None:
    d = {"m": logs(0.0477, 6, sd=0.009, seed=11)}
    alone = decide(d, RELEASE)
    assert alone.answer is Slower.YES
    assert decide(d, RELEASE, family=1000).answer is Slower.INCONCLUSIVE


def test_holm_steps_down() -> None:
    p = {"a": 0.001, "b": 0.02, "c": 0.03, "d": 0.04}
    assert holm(p, 0.05) == {"a"}
    assert holm({"a": 0.001, "b": 0.012, "c": 0.02, "d": 0.04}, 0.05) == {"a", "b", "c", "d"}
    assert holm(p, 0.05, hypotheses=60) == set()
    assert adjusted(p) == pytest.approx({"a": 0.004, "b": 0.06, "c": 0.06, "d": 0.06})


DIFFERENCES = st.lists(st.floats(-0.5, 0.5), min_size=4, max_size=24)


@given(DIFFERENCES)
def test_swapping_the_arms_turns_the_sign(d: list[float]) -> None:
    there, back = (evidence(each, 0.05, alpha_yes=0.003) for each in (d, [-value for value in d]))
    assert math.log1p(there.effect) == pytest.approx(-math.log1p(back.effect), abs=1e-9)
    assert math.log1p(there.low) == pytest.approx(-math.log1p(back.high), abs=1e-9)
    assert there.pair_sd == pytest.approx(back.pair_sd)
    both = {decide({"m": each}, NIGHTLY).answer for each in (d, [-value for value in d])}
    assert both != {Slower.YES}  # never slower both ways


@given(DIFFERENCES)
def test_yes_and_no_exclude_each_other(d: list[float]) -> None:
    found = evidence(d, 0.05, alpha_yes=0.003)
    assert found.p_slower + found.p_not_slower >= 1 - 1e-9
    assert found.low <= found.effect <= found.high or math.isclose(found.low, found.high, abs_tol=1e-9)
