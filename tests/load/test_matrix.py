"""Every way in which a request can end has its own class, on a new connection and on one that was kept alive."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import gevent
import pytest
from ends import CANARY_ENDS, ENDS
from stub import Stub

from harness.guards.canary import request_body
from harness.load.client import Outcome, send_canary, send_completion
from harness.load.connections import IdleConnections
from harness.load.shape import RequestLimits
from harness.load.sse import completion_body
from harness.observe.history import OURS, RequestResult

KEY = "key-that-must-not-leak"
GENEROUS = RequestLimits(connect_s=10.0, first_token_s=10.0, gap_s=10.0, total_s=20.0)
SHORT_S = 0.3
SHORT = {  # only what must pass is short, so that a slow machine changes no class
    RequestResult.FIRST_TOKEN_TIMEOUT: replace(GENEROUS, first_token_s=SHORT_S),
    RequestResult.HEADERS_THEN_SILENCE: replace(GENEROUS, first_token_s=SHORT_S, gap_s=SHORT_S),
    RequestResult.STALL: replace(GENEROUS, gap_s=SHORT_S),
    RequestResult.DEADLINE: replace(GENEROUS, total_s=3 * SHORT_S),
}
TOKENS = 8
PROMPTS = ((5, 6, 7), (8, 9))
AT_ONCE = 10  # more answers under way would make the limits a matter of the machine
CONNECTIONS = ("fresh", "reused")
REPEATS = [pytest.param(5, id="5"), pytest.param(50, marks=pytest.mark.slow, id="50")]

Send = Callable[[str, str, RequestLimits, IdleConnections | None], Outcome]


@pytest.fixture(scope="module")
def stub() -> Iterator[Stub]:
    with Stub(lambda served: str(served.body["model"])) as running:  # the model name is the fault wanted
        yield running


def complete(endpoint: str, fault: str, limits: RequestLimits, idle: IdleConnections | None) -> Outcome:
    body = completion_body(fault, (3, 4, 5), TOKENS)
    return send_completion(endpoint, body, max_tokens=TOKENS, limits=limits, api_key=KEY, idle=idle)


def ask_canary(endpoint: str, fault: str, limits: RequestLimits, idle: IdleConnections | None) -> Outcome:
    body = request_body(fault, PROMPTS)
    return send_canary(endpoint, body, prompts=PROMPTS, limits=limits, api_key=KEY, idle=idle)


def outcomes_of(
    send: Send, stub: Stub, fault: str, expected: RequestResult, connection: str, repeats: int
) -> list[Outcome]:
    limits = SHORT.get(expected, GENEROUS)

    def once() -> Outcome:
        if connection == "fresh":
            return send(stub.endpoint, fault, limits, None)
        idle = IdleConnections()
        assert send(stub.endpoint, "ok", GENEROUS, idle).connection == "new"
        outcome = send(stub.endpoint, fault, limits, idle)
        idle.close()
        return outcome

    outcomes: list[Outcome] = []
    for start in range(0, repeats, AT_ONCE):
        greenlets = [gevent.spawn(once) for _ in range(min(AT_ONCE, repeats - start))]
        gevent.joinall(greenlets, raise_error=True)
        outcomes += [greenlet.value for greenlet in greenlets]
    return outcomes


@pytest.mark.parametrize("repeats", REPEATS)
@pytest.mark.parametrize("connection", CONNECTIONS)
@pytest.mark.parametrize(("fault", "expected"), ENDS.items())
def test_every_fault_of_a_stream_has_its_class(
    stub: Stub, fault: str, expected: RequestResult, connection: str, repeats: int
) -> None:
    before = len(stub.served)
    outcomes = outcomes_of(complete, stub, fault, expected, connection, repeats)
    sent = repeats * (1 if connection == "fresh" else 2)

    assert [outcome.result for outcome in outcomes] == [expected] * repeats, outcomes
    assert {outcome.connection for outcome in outcomes} == {connection}
    assert len(stub.served) - before == sent, "a request was sent more than once"
    for outcome in outcomes:
        assert (outcome.error == "") == (expected is RequestResult.OK)
        assert KEY not in outcome.error
        assert len(outcome.error) <= 300


@pytest.mark.parametrize("repeats", REPEATS)
@pytest.mark.parametrize("connection", CONNECTIONS)
@pytest.mark.parametrize(("fault", "expected"), CANARY_ENDS.items())
def test_every_fault_of_a_canary_has_its_class(
    stub: Stub, fault: str, expected: RequestResult, connection: str, repeats: int
) -> None:
    outcomes = outcomes_of(ask_canary, stub, fault, expected, connection, repeats)

    assert [outcome.result for outcome in outcomes] == [expected] * repeats, outcomes
    for outcome in outcomes:
        assert outcome.first_token_ns is None
        assert bool(outcome.prompt_logprobs) == (expected is RequestResult.OK)


def test_every_class_of_an_answer_is_in_the_matrix() -> None:
    never_sent = {RequestResult.NO_ENDPOINT, RequestResult.DNS, RequestResult.UNREACHABLE, RequestResult.REFUSED}
    elsewhere = OURS | never_sent | {RequestResult.CONNECT_TIMEOUT}  # these are seen in test_client and test_driver

    assert {*ENDS.values(), *CANARY_ENDS.values()} == set(RequestResult) - elsewhere - {RequestResult.TRUNCATED}
