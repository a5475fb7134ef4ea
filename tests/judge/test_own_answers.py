"""What the harness says of its own part: a scenario that did not come to its end, a fault that was never undone."""

from __future__ import annotations

import pytest

from harness.judge import claims
from harness.judge.claim import Context
from harness.judge.own_answers import TIMELINE_FINISHED
from harness.judge.verdict import Finding, Verdict, combine
from harness.observe.history import Event, EventKind, History, Request
from tests.judge.histories import before, canary, ended, event, history, load, remedy, rollout

CONTEXT = Context(scenario="s", engine_label="reference-1")
STORY: list[Request | Event] = [
    event(-3, EventKind.SCENARIO_STARTED, scenario="s", mode="guarded"),
    *before(),
    *rollout(),
    *(load(6.2 + at * 0.25, "new-1", took_s=0.05) for at in range(8)),
    *(canary(6.3 + at * 0.5, "new-1", "neither", took_s=0.05) for at in range(4)),
    *remedy(),
    *ended(),
]
RECOVERED = claims.recovered(within_s=3)


def finished(because: str = TIMELINE_FINISHED) -> Event:
    return event(20.9, EventKind.SCENARIO_ENDED, because=because)


def verdict(claim: claims.Claim, seen: History) -> Verdict:
    return combine(claims.judge((claim,), seen, CONTEXT))


def test_a_scenario_that_came_to_its_end_is_held() -> None:
    assert verdict(RECOVERED, history(*STORY, finished())) is Verdict.HELD


@pytest.mark.parametrize(
    ("end", "said"),
    [((finished("OSError: [Errno 5] Input/output error"),), "Input/output error"), ((), "did not come to its end")],
    ids=["an error after the load", "a crash after the load"],
)
def test_a_scenario_that_did_not_come_to_its_end_is_never_held(end: tuple[Event, ...], said: str) -> None:
    seen = history(*STORY, *end)
    assert verdict(RECOVERED, seen) is Verdict.UNKNOWN
    assert verdict(claims.exposed_at_most(0), seen) is Verdict.BROKEN, "what was seen is not lost by it"
    early = next(finding for finding in claims.judge((), seen, CONTEXT) if finding.verdict is Verdict.UNKNOWN)
    assert said in early.because


def undone(*names: str) -> Finding:
    proofs = [event(20.6, EventKind.FAULT_UNDONE, fault=name, proved=True, because="b", refused=[]) for name in names]
    seen = history(
        *(each for each in STORY if getattr(each, "kind", "") != EventKind.FAULT_UNDONE), *proofs, finished()
    )
    context = Context(scenario="s", engine_label="reference-1", faults=("widen_tensor", "killed_process"))
    return next(finding for finding in claims.judge((), seen, context) if finding.claim == "faults_undone()")


def test_every_declared_fault_has_to_be_undone() -> None:
    assert undone("widen_tensor", "killed_process").verdict is Verdict.HELD
    for name, other in (("widen_tensor", "killed_process"), ("killed_process", "widen_tensor")):
        seen = undone(name)
        assert seen.verdict is Verdict.UNKNOWN
        assert other in seen.because
