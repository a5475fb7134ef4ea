"""A claim that cannot be meant is refused when it is made: it would be broken, or held, whatever an engine does."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from harness import claims
from harness.errors import ScenarioInvalid
from harness.judge.claim import Claim

ANY_NUMBER = (math.nan, math.inf, -math.inf, -1, True, "5")


@pytest.mark.parametrize(
    ("make", "wrong", "named"),
    [
        (lambda value: claims.detected_within(limit_s=value), (*ANY_NUMBER, 0), "limit_s"),
        (lambda value: claims.recovered(within_s=value), (*ANY_NUMBER, 0), "within_s"),
        (lambda value: claims.health_told(within_s=value), (*ANY_NUMBER, 0), "within_s"),
        (lambda value: claims.exposed_at_most(value), (*ANY_NUMBER, 0.5), "answers"),
        (lambda value: claims.answered_ok(ratio_min=value), (*ANY_NUMBER, 0, 95, 1.01), "ratio_min"),
        (lambda value: claims.prefix_cache_went_cold(ratio_before_min=value), (*ANY_NUMBER, 0, 30), "ratio_before_min"),
        (lambda value: claims.latency_back_in_band(factor=value, windows=5), (*ANY_NUMBER, 0), "factor"),
        (lambda value: claims.latency_back_in_band(factor=2.0, windows=value), (*ANY_NUMBER, 0, 2.5), "windows"),
        (lambda value: claims.spike_at_most(factor=value), (*ANY_NUMBER, 0, 1), "factor"),
        (lambda value: claims.answered_ok(ratio_min=0.9, window=value), ("befor", "", 1), "window"),
        (lambda value: claims.only_weights_served("new", window=value), ("later", ""), "window"),
        (lambda value: claims.only_weights_served(value), ("newer", "", "neither", "ambiguous", 1), "old, new"),
    ],
    ids=[
        "detected_within",
        "recovered",
        "health_told",
        "exposed_at_most",
        "answered_ok",
        "prefix_cache_went_cold",
        "factor",
        "windows",
        "spike_at_most",
        "window of answered_ok",
        "window of only_weights_served",
        "weights",
    ],
)
def test_what_cannot_be_meant_is_named(make: Callable[[object], Claim], wrong: tuple[object, ...], named: str) -> None:
    for value in wrong:
        with pytest.raises(ScenarioInvalid, match=named):
            make(value)


def test_what_can_be_meant_is_taken() -> None:
    assert claims.exposed_at_most(0).parameters == {"answers": 0}
    assert claims.answered_ok(ratio_min=1, window="after").parameters == {"ratio_min": 1, "window": "after"}
    assert claims.only_weights_served("old").parameters == {"which": "old", "window": "all"}
    assert claims.recovered(within_s=0.5).parameters == {"within_s": 0.5}
