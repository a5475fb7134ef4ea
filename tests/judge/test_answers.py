"""A verdict names what it rests on: service that is not back for what its log says is told with that line."""

from __future__ import annotations

from harness.judge import claims
from harness.judge.claim import Context
from harness.judge.verdict import Verdict
from harness.observe.history import EventKind
from tests.judge.histories import before, ended, event, history, remedy, rollout


def test_a_load_error_in_the_log_is_named_where_it_is_why_service_does_not_count_as_back() -> None:
    line = event(
        11, EventKind.LOG_LINE, incarnation="new-2", **{"class": "load", "line": "ValueError: 3 weights are missing"}
    )
    seen = history(*before(), *rollout(), *remedy(), line, *ended())
    claim = claims.recovered(within_s=3.0)
    context = Context(scenario="s", engine_label="reference-1")
    found = next(finding for finding in claims.judge((claim,), seen, context) if finding.claim == str(claim))
    assert found.verdict is Verdict.BROKEN
    assert 'the log of "new-2" says since: "ValueError: 3 weights are missing"' in found.because
    assert line.id in found.evidence
