"""Answers that users saw: whole ones, and those that broke off after some tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.judge.exposure import exposure
from harness.observe.history import Event, EventKind, History, Request
from tests.judge.histories import S, before, canary, ended, event, history, load, remedy, rollout

WRONG = [canary(6.3 + at * 0.5, "new-1", "neither", took_s=0.05) for at in range(4)]


def streamed(at_s: float, result: str, *, tokens: int) -> Request:
    """Return a request to the new engine that got so many tokens before it ended."""
    request = load(at_s, "new-1", took_s=0.2, result=result)
    token_ns = tuple(round((at_s + 0.1 + number / 1000) * S) for number in range(tokens))
    return replace(request, token_ns=token_ns, first_token_ns=token_ns[0] if token_ns else None, output_tokens=tokens)


@pytest.mark.parametrize("result", ["reset_mid_stream", "stall", "wrong_content", "mixed_version", "inband_error"])
def test_an_answer_that_broke_off_was_seen_as_far_as_it_went(result: str) -> None:
    users = [streamed(6.45 + at * 0.5, result, tokens=3) for at in range(3)]
    seen = exposure(history(*before(), *rollout(), *users, *WRONG, *remedy(), *ended()))
    assert (seen.lower, seen.upper) == (3, 3)


def test_an_answer_of_which_no_token_came_was_not_seen() -> None:
    users = [streamed(6.45 + at * 0.5, "http_5xx", tokens=0) for at in range(3)]
    assert exposure(history(*before(), *rollout(), *users, *WRONG, *remedy(), *ended())).upper == 0


def reloaded(*more: Request | Event, succeeded: bool = True) -> History:
    """Return an engine that read other weights at 5 s and answered users since."""
    return history(
        *before(),
        event(5, EventKind.PUBLISH_STARTED, version="new", how="atomic"),
        event(5.1, EventKind.ROLLOUT_STARTED, how="reload"),
        event(5.2, EventKind.RELOAD_STARTED, incarnation="old-1", expects="new", pause="wait"),
        event(
            5.5, EventKind.RELOAD_ENDED, incarnation="old-1", succeeded=succeeded, was_answered=True, because="refused"
        ),
        *(load(5.6 + at * 0.25, "old-1", took_s=0.05) for at in range(8)),
        *more,
        *ended(),
    )


@pytest.mark.parametrize("succeeded", [True, False], ids=["reloaded", "refused to"])
def test_what_vouched_for_the_weights_before_a_reload_does_not_vouch_for_those_after_it(succeeded: bool) -> None:
    """Canaries that got no answer since say nothing of weights, and no other canary does."""
    silent = [canary(5.7 + at * 0.5, "old-1", None, result="first_token_timeout") for at in range(4)]
    assert exposure(reloaded(*silent, succeeded=succeeded)).upper == 8
    assert exposure(reloaded(succeeded=succeeded)).upper == 8
    right = canary(7.9, "old-1", "new" if succeeded else "old")
    assert exposure(reloaded(*silent, right, succeeded=succeeded)).upper == 0


@pytest.mark.parametrize("answer", ["no answer (Refused: HTTP 500)", "neither"])
def test_what_an_engine_answered_before_it_was_told_to_reload_is_not_suspected_for_what_came_after(answer: str) -> None:
    """Passes of the canary prompts take turns, so the last right one of each may be seconds older than the reload."""
    turns = [replace(canary(2.0 + at * 0.75, "old-1", "old", took_s=0.05), rotation=at) for at in range(4)]
    users = [load(2.2 + at * 0.25, "old-1", took_s=0.05) for at in range(12)]  # the last is over at 5.0
    drained = load(5.1, "old-1", took_s=0.18)  # under way when the reload began, over before weights were read
    met = load(5.25, "old-1", took_s=0.15)
    told = {"was_answered": True, "because": "refused", "call_ns": [round(5.3 * S), round(5.45 * S)]}
    things: list[Request | Event] = [
        *turns,
        *users,
        drained,
        event(5.2, EventKind.RELOAD_STARTED, incarnation="old-1", expects="new", pause="wait"),
        event(5.5, EventKind.RELOAD_ENDED, incarnation="old-1", succeeded=False, **told),
        event(5.6, EventKind.CANARY_CHECKED, incarnation="old-1", answer=answer),
    ]
    assert exposure(history(*before(), *things, *ended())).upper == 0
    assert exposure(history(*before(), *things, met, *ended())).upper == 1
    assert exposure(history(*before(), *things, load(5.7, "old-1", took_s=0.05), *ended())).upper == 1
