"""The old band of latency is made of what came before the fault, and of nothing that the fault itself touched."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.judge import claims
from harness.judge.claim import Context
from harness.judge.latency import band_finding
from harness.judge.verdict import Finding, Verdict
from harness.observe.history import Request
from tests.judge.histories import S, before, canary, ended, history, load, remedy, rollout

CONTEXT = Context(scenario="s", engine_label="reference-1")
BAND = claims.latency_back_in_band(factor=1.5, windows=5)
# The service that comes back takes four times as long as the one before: 0.1 s there.
SLOW = [each for each in remedy() if not (isinstance(each, Request) and each.kind == "load")]
SLOW += [load(10.2 + at * 0.25, "new-2", took_s=0.4) for at in range(36)]


def judged(*more: Request) -> Finding:
    wrong = [canary(6.3 + at * 0.5, "new-1", "neither", took_s=0.05) for at in range(4)]
    seen = history(*before(), *rollout(), *more, *wrong, *SLOW, *ended())
    return next(f for f in claims.judge((BAND,), seen, CONTEXT) if f.claim == str(BAND))


def test_a_service_that_came_back_four_times_slower_is_out_of_band() -> None:
    assert judged().verdict is Verdict.BROKEN


@pytest.mark.parametrize("result", ["reset_mid_stream", "ok"], ids=["ended by the fault", "held up by it"])
def test_requests_that_the_fault_met_do_not_widen_the_old_band(result: str) -> None:
    """They were sent before it and were still under way: how long they took says what the fault did."""
    under_way = [load(4.8 + at * 0.03, "old-1", took_s=2.0, result=result) for at in range(5)]
    seen = judged(*under_way)
    assert seen.verdict is Verdict.BROKEN, seen.because


def test_a_time_before_in_which_most_requests_failed_has_no_band() -> None:
    failed = [load(4.0 + at * 0.02, "old-1", took_s=0.05, result="http_5xx") for at in range(20)]
    seen = judged(*failed)
    assert seen.verdict is Verdict.UNKNOWN, seen.because
    assert "before the fault" in seen.because


def test_a_time_after_under_another_load_cannot_be_compared() -> None:
    """Four requests a second before, twenty after: what is slower then is slower for the load."""
    more = [load(10.21 + at * 0.05, "new-2", took_s=0.4) for at in range(180)]
    seen = judged(*more)
    assert seen.verdict is Verdict.UNKNOWN, seen.because
    assert "another load" in seen.because


def late(request: Request, by_s: float) -> Request:
    """Return a request that the generator took up late: its latency has that delay in it, from the planned start on."""
    taken_up_ns = request.planned_ns + round(by_s * S)
    return replace(request, dispatched_ns=taken_up_ns, sent_ns=taken_up_ns)


@pytest.mark.parametrize(
    ("before_s", "after_s", "expected"),
    [(0.0, 0.0, Verdict.HELD), (0.0, 0.3, Verdict.UNKNOWN), (0.3, 0.3, Verdict.HELD)],
    ids=["never late", "late after", "as late before"],
)
def test_a_generator_that_was_late_is_not_taken_for_a_slow_engine(
    before_s: float, after_s: float, expected: Verdict
) -> None:
    old = [late(load(0.1 + at * 0.25, "old-1", took_s=0.1 + before_s), before_s) for at in range(18)]
    new = [late(load(10.1 + at * 0.25, "new-2", took_s=0.1 + after_s), after_s) for at in range(36)]
    verdict, because, _ = band_finding(old, new, factor=1.5, windows=5)
    assert verdict is expected, because


def test_a_generator_that_was_late_before_does_not_hide_a_slow_engine() -> None:
    old = [late(load(0.1 + at * 0.25, "old-1", took_s=0.4), 0.3) for at in range(18)]
    new = [load(10.1 + at * 0.25, "new-2", took_s=0.4) for at in range(36)]
    verdict, because, _ = band_finding(old, new, factor=1.5, windows=5)
    assert verdict is Verdict.UNKNOWN, because
    assert "generator" in because
