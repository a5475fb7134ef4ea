"""What the scenarios here share: the load they run under and what must hold with the operator's guards.

The limits are generous: they bound hangs. How fast an engine recovers is measured and shown, not asserted here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from harness import Scenario, claims, load
from harness.judge.claim import Claim

LOAD = load.steady(rate_rps=8.0, canary_ratio=0.5, tail_s=3.0, output_tokens=6)

# Without guards: the engine notices no later than it was seen to, and the documented remedy brings service back.
BITES = (claims.layer_as_expected(), claims.recovered(within_s=180.0))


def contained(by: str) -> tuple[Claim, ...]:
    """Claim that users never notice: seen at `by` or earlier, no wrong answer, service and speed kept."""
    return (
        claims.detected_by(by),
        claims.exposed_at_most(0),
        claims.answered_ok(ratio_min=0.99),
        claims.recovered(within_s=240.0),
        claims.latency_back_in_band(factor=2.0, windows=5),
    )


def qualifying(scenarios: Iterable[Scenario], *names: str) -> list[Any]:
    """Return the parameters of a test that runs each scenario; those named are part of every qualification."""
    scenarios = tuple(scenarios)
    absent = set(names) - {scenario.name for scenario in scenarios}
    assert not absent, f"no scenario is named {absent}"
    return [
        pytest.param(each, id=each.name, marks=[pytest.mark.qualification] if each.name in names else [])
        for each in scenarios
    ]
