"""A request that was sent while an engine reloaded cannot have tokens of both checkpoints: it proves nothing."""

from __future__ import annotations

from dataclasses import replace

from harness.judge import claims
from harness.judge.claim import Context
from harness.judge.verdict import Verdict
from harness.observe.history import EventKind, Request
from tests.judge.histories import S, before, ended, event, history, load

CONTEXT = Context(scenario="s", engine_label="reference-1")
RELOAD = [
    event(5, EventKind.PUBLISH_STARTED, version="new", how="atomic"),
    event(5.1, EventKind.ROLLOUT_STARTED, how="reload"),
    event(5.2, EventKind.RELOAD_STARTED, incarnation="old-1", expects="new", pause="wait"),
    event(
        8.2,
        EventKind.RELOAD_ENDED,
        incarnation="old-1",
        succeeded=True,
        was_answered=True,
        because="",
        call_ns=[6 * S, 8 * S],
    ),
]


def streamed(sent_s: float, *token_s: float) -> Request:
    request = load(sent_s, "old-1", took_s=token_s[-1] - sent_s + 0.05)
    return replace(request, token_ns=tuple(round(at_s * S) for at_s in token_s))


def verdict(*answers: Request) -> Verdict:
    seen = history(*before(), *RELOAD, *answers, *ended())
    return next(f for f in claims.judge((claims.answers_unmixed(),), seen, CONTEXT) if "unmixed" in f.claim).verdict


def test_answers_that_began_after_the_weights_had_changed_prove_nothing() -> None:
    assert verdict(streamed(7.0, 8.3, 8.5), streamed(7.5, 8.4, 8.6)) is Verdict.UNKNOWN
    assert verdict(streamed(7.0, 8.3, 8.5), streamed(5.0, 5.3, 5.9)) is Verdict.HELD
    assert verdict(streamed(7.0, 8.3, 8.5), streamed(5.0, 5.3, 8.9)) is Verdict.BROKEN
