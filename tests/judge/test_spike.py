"""Was a rollout slow: claimed to be bearable, or needed so that anything can be concluded."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from harness.errors import ScenarioInvalid
from harness.judge import claims
from harness.judge.claim import Claim, Context
from harness.judge.spike import spike_at_least, spike_at_most
from harness.judge.verdict import Verdict
from harness.observe.history import EventKind, History, Request
from tests.judge.histories import event, history, load

CONTEXT = Context(scenario="s", engine_label="e")


def told(during_s: float, *, fails: bool = False) -> History:
    """Return a history of 10 s before and 10 s of a rollout, whose requests take so long to their first token."""

    def one(number: int) -> Request:
        at_s, took_s = number / 10, 0.1 if number < 100 else during_s
        failed = fails and number >= 100
        made = load(at_s, "new-1", took_s=took_s, result="reset" if failed else "ok")
        first_ns = None if failed else made.ended_ns
        return replace(made, id=f"load-{number}", first_token_ns=first_ns, token_ns=() if failed else (made.ended_ns,))

    return history(
        *(one(number) for number in range(200)),
        event(0.0, EventKind.LOAD_STARTED),
        event(10.0, EventKind.ROLLOUT_STARTED, how="blue_green"),
        event(20.0, EventKind.LOAD_ENDED),
    )


@pytest.mark.parametrize(
    ("seen", "at_most", "at_least"),
    [
        (told(0.2), Verdict.HELD, Verdict.UNKNOWN),  # twice as slow
        (told(0.6), Verdict.BROKEN, Verdict.HELD),
        (told(0.1, fails=True), Verdict.BROKEN, Verdict.HELD),
        (history(event(0.0, EventKind.LOAD_STARTED)), Verdict.UNKNOWN, Verdict.UNKNOWN),
    ],
)
def test_a_spike_is_borne_up_to_a_factor_and_bites_from_it_on(
    seen: History, at_most: Verdict, at_least: Verdict
) -> None:
    assert spike_at_most(seen, CONTEXT, factor=4.0)[0] is at_most
    assert spike_at_least(seen, CONTEXT, factor=4.0)[0] is at_least


def test_the_sentence_names_what_was_seen() -> None:
    assert spike_at_most(told(0.6), CONTEXT, factor=4.0)[1] == (
        "the slowest 2 s of the rollout had 6.00 times the median first token before it (100 ms), 10 s were slow, "
        "0 requests failed, claimed at most 4"
    )
    assert spike_at_least(told(0.2), CONTEXT, factor=4.0)[1].startswith("the fault did not bite: the slowest 2 s")
    assert "most requests of some 2 s failed" in spike_at_most(told(0.1, fails=True), CONTEXT, factor=4.0)[1]


def test_both_are_claims_of_a_scenario() -> None:
    for claim in (claims.spike_at_most(factor=4.0), claims.spike_at_least(factor=4.0)):
        findings = {each.claim: each.verdict for each in claims.judge((claim,), told(0.6), CONTEXT)}
        assert findings[str(claim)] in (Verdict.BROKEN, Verdict.HELD)
    assert claims.spike_at_most(factor=4.0) == Claim("spike_at_most", {"factor": 4.0})


@pytest.mark.parametrize("factor", [0.0, 1.0, inf, float("nan")])
@pytest.mark.parametrize("make", [claims.spike_at_most, claims.spike_at_least])
def test_a_factor_that_says_nothing_is_refused(make: object, factor: float) -> None:
    with pytest.raises(ScenarioInvalid, match=r"factor is .*: it must be a number above 1"):
        make(factor=factor)  # type: ignore[operator]
