"""What nobody asked, nobody knows: `/health` of a struck engine that was not looked at."""

from __future__ import annotations

import pytest

from harness.judge import claims
from harness.judge.claim import Context
from harness.judge.verdict import Finding, Verdict
from harness.observe.history import Event, EventKind
from tests.judge.histories import before, ended, event, history

CONTEXT = Context(scenario="s", engine_label="reference-1", faults=("frozen_process",))
TOLD = claims.health_told(within_s=5.0)


def health(at_s: float, status: int) -> Event:
    return event(at_s, EventKind.HEALTH, incarnation="old-1", status=status, refused=False, took_ms=1.0)


def failed(at_s: float, incarnation: str = "old-1") -> Event:
    return event(at_s, EventKind.OBSERVER_FAILED, observer=f"health of {incarnation}", because="OSError: no files left")


def judged(*probes: Event) -> Finding:
    """Judge an engine that is struck at 5 s and remedied at 18 s."""
    struck = event(5, EventKind.INCIDENT_STARTED, incarnation="old-1", undo={"frozen_process": "SIGCONT"})
    remedied = event(18, EventKind.REMEDY_STARTED, what="restart")
    seen = history(*before(), struck, remedied, *probes, *ended())
    return next(finding for finding in claims.judge((TOLD,), seen, CONTEXT) if finding.claim == str(TOLD))


@pytest.mark.parametrize(
    ("probes", "verdict"),
    [
        ((health(0.2, 200), health(6.0, 200), health(11.0, 200)), Verdict.BROKEN),
        ((health(0.2, 200), health(6.0, 200), failed(9.0)), Verdict.UNKNOWN),
        ((health(0.2, 200), failed(3.0)), Verdict.UNKNOWN),
        ((health(0.2, 200),), Verdict.UNKNOWN),
        ((), Verdict.UNKNOWN),
        ((health(0.2, 200), health(6.0, 503), failed(9.0)), Verdict.HELD),
        ((health(0.2, 200), health(6.0, 200), health(11.0, 200), failed(9.0, "old-2")), Verdict.BROKEN),
        ((health(0.2, 200), health(6.0, 200), health(11.0, 200), failed(19.0)), Verdict.BROKEN),
    ],
    ids=[
        "it said 200",
        "the observer failed in time",
        "it failed before",
        "nobody asked since",
        "nobody ever asked",
        "it was bad before the observer failed",
        "another observer failed",
        "it failed after the remedy",
    ],
)
def test_health_that_nobody_asked_for_said_nothing(probes: tuple[Event, ...], verdict: Verdict) -> None:
    seen = judged(*probes)
    assert seen.verdict is verdict, seen.because
