"""Answers that users saw: whole ones, and those that broke off after some tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.judge.exposure import exposure
from harness.observe.history import Request
from tests.judge.histories import S, before, canary, ended, history, load, remedy, rollout

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
