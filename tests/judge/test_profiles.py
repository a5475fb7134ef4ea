"""The profiles: that their levels add up, and what they say about the noise that they can bear."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from harness.judge.paired import Slower, decide
from harness.judge.profiles import PROFILES, Profile


@pytest.mark.parametrize("profile", PROFILES.values(), ids=lambda profile: profile.name)
def test_any_look_says_no_at_the_margin_in_five_percent_at_most(profile: Profile) -> None:
    # At the margin each look's statistic is standard normal; two of them share the pairs of the earlier one.
    shared = [[math.sqrt(min(a, b) / max(a, b)) for b in profile.looks] for a in profile.looks]
    bounds = stats.norm.isf(profile.alpha_no)
    normal = stats.multivariate_normal(np.zeros(len(bounds)), shared)
    no = 1 - normal.cdf(bounds)
    assert 0.04 < no < 0.05
    assert profile.level_no == 0.05


@pytest.mark.parametrize("profile", PROFILES.values(), ids=lambda profile: profile.name)
def test_levels_of_yes_sum_to_the_whole(profile: Profile) -> None:
    assert len(profile.alpha_yes) == len(profile.alpha_no) == len(profile.looks)
    assert profile.level_yes <= 0.02
    assert [profile.alpha_at(pairs) for pairs in (0, profile.looks[0], 99)] == [
        profile.alpha_yes[0],
        profile.alpha_yes[0],
        profile.alpha_yes[-1],
    ]


def share(profile: Profile, answer: Slower, effect: float, sd: float, metrics: int) -> float:
    random = np.random.default_rng(5)
    d = random.normal(math.log1p(effect), sd, (300, profile.looks[-1], metrics))
    said = [decide({str(k): each[:, k].tolist() for k in range(metrics)}, profile).answer for each in d]
    return sum(each is answer for each in said) / len(said)


@pytest.mark.parametrize("name", ["nightly", "release"])
def test_noise_that_a_profile_says_it_can_bear_is_borne(name: str) -> None:
    profile = PROFILES[name]
    find, clear = profile.spread_to_find(profile.effect, 1), profile.spread_to_clear(1)
    assert 0.91 < share(profile, Slower.YES, profile.effect, find, 1) < 0.99
    assert share(profile, Slower.YES, profile.effect, 1.6 * find, 1) < 0.85
    assert 0.91 < share(profile, Slower.NO, 0.0, clear, 1) < 0.99
    assert share(profile, Slower.NO, 0.0, 1.6 * clear, 1) < 0.85
    assert profile.spread_to_find(profile.margin, 1) == 0
    assert profile.spread_to_clear(4) < clear
