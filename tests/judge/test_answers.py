"""A verdict names what it rests on: service that is not back for what its log says is told with that line."""

from __future__ import annotations

import pytest

from harness.judge import claims
from harness.judge.claim import Context
from harness.judge.verdict import Verdict
from harness.observe.history import EventKind
from tests.judge.histories import before, canary, ended, event, history, load, remedy, rollout


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


def test_the_time_to_notice_is_counted_from_the_publish_and_the_sentence_says_so() -> None:
    """What is published may be read at once: a copy of minutes belongs to the time in which nobody noticed."""
    things = [event(1.5, EventKind.PUBLISH_STARTED, version="new", how="overwrite"), *rollout()[1:]]
    wrong = [canary(6.3 + at * 0.5, "new-1", "neither", took_s=0.05) for at in range(4)]
    claim = claims.detected_within(limit_s=3.0)
    context = Context(scenario="s", engine_label="reference-1")
    judged = claims.judge((claim,), history(*before(), *things, *wrong, *ended()), context)
    found = next(finding for finding in judged if finding.claim == str(claim))
    assert found.verdict is Verdict.BROKEN
    assert "noticed 4.85 s after the publish began" in found.because


@pytest.mark.parametrize(("limit_s", "expected"), [(3.9, Verdict.BROKEN), (4.1, Verdict.UNKNOWN)])
def test_who_was_watched_for_less_than_the_limit_may_still_have_noticed(limit_s: float, expected: Verdict) -> None:
    """The remedy came 4 s after the fault: whether somebody would have noticed a little later is not known."""
    users = [load(6.2 + at * 0.25, "new-1", took_s=0.05) for at in range(8)]
    claim = claims.detected_within(limit_s=limit_s)
    context = Context(scenario="s", engine_label="reference-1")
    judged = claims.judge((claim,), history(*before(), *rollout(), *users, *remedy(), *ended()), context)
    found = next(finding for finding in judged if finding.claim == str(claim))
    assert found.verdict is expected, found.because
