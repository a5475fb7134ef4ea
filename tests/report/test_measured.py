"""The figures of a table are those that claims are judged by."""

from __future__ import annotations

from harness.judge import claims
from harness.judge.claim import Context
from harness.observe.history import EventKind
from harness.report.store import measure
from tests.judge.histories import before, canary, ended, event, history


def test_recovery_without_a_remedy_counts_from_the_rollout_as_its_claim_does() -> None:
    """A copy of a large checkpoint takes minutes, in which the old engine serves."""
    seen = history(
        *before(),
        event(5, EventKind.PUBLISH_STARTED, version="new", how="atomic"),
        event(12, EventKind.ROLLOUT_STARTED, how="restart"),
        event(12.1, EventKind.ENGINE_STARTING, incarnation="new-1", expects="new"),
        *(canary(13 + at * 0.5, "new-1", "new") for at in range(8)),
        *ended(),
    )
    context = Context(scenario="s", engine_label="reference-1")
    claim = claims.recovered(within_s=5.0)
    judged = next(finding for finding in claims.judge((claim,), seen, context) if finding.claim == str(claim))
    assert measure(seen)["recovered_after_s"] == 2.1
    assert measure(seen)["recovery_watched_s"] is None, "it was seen to its end"
    assert "after 2.1 s" in judged.because


def test_a_recovery_that_was_not_seen_says_for_how_long_it_was_watched() -> None:
    begun = (*before(), event(12, EventKind.ROLLOUT_STARTED, how="restart"))
    measured = measure(history(*begun, *ended(30)))
    assert (measured["recovered_after_s"], measured["recovery_watched_s"]) == (None, 18.0)
    assert measure(history(*before(), *ended(30)))["recovery_watched_s"] is None, "nothing was begun"
