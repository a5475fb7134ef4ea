"""Every way a request can end, on real sockets, ends in its own class and no other."""

from __future__ import annotations

import errno
import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import gevent
import pytest
from stub import Served, Stub, logprob

from harness.errors import UsageError
from harness.guards.canary import request_body
from harness.load.client import Outcome, connect_result, send_canary, send_completion
from harness.load.plan import RequestLimits
from harness.load.sse import completion_body, endpoint_address
from harness.observe.history import RequestResult

KEY = "key-that-must-not-leak"
REPEATS = 10
LIMITS = RequestLimits(connect_s=0.3, first_token_s=0.3, gap_s=0.3, total_s=5.0)
TOKENS = 8
PROMPTS = ((5, 6, 7), (8, 9))

ENDS = {
    "ok": RequestResult.OK,
    "coalesced": RequestResult.OK,
    "drip": RequestResult.OK,
    "ping_first": RequestResult.OK,
    "no_usage": RequestResult.OK,
    "held_open": RequestResult.OK,
    "reset": RequestResult.RESET,
    "close": RequestResult.CLOSED,
    "http_401": RequestResult.HTTP_4XX,
    "http_429": RequestResult.HTTP_4XX,
    "http_500": RequestResult.HTTP_5XX,
    "http_503_cut": RequestResult.HTTP_5XX,
    "redirect": RequestResult.MALFORMED,
    "bad_http": RequestResult.MALFORMED,
    "header_cut": RequestResult.TRUNCATED,
    "header_reset": RequestResult.RESET_MID_STREAM,
    "header_then_reset": RequestResult.RESET_MID_STREAM,
    "silence": RequestResult.FIRST_TOKEN_TIMEOUT,
    "header_then_silence": RequestResult.FIRST_TOKEN_TIMEOUT,
    "pings": RequestResult.FIRST_TOKEN_TIMEOUT,
    "stall": RequestResult.STALL,
    "silent_done": RequestResult.STALL,
    "reset_mid_stream": RequestResult.RESET_MID_STREAM,
    "cut_chunk": RequestResult.TRUNCATED,
    "bad_chunk": RequestResult.MALFORMED,
    "no_done": RequestResult.TRUNCATED,
    "done_cut": RequestResult.TRUNCATED,
    "no_finish": RequestResult.TRUNCATED,
    "too_few": RequestResult.TRUNCATED,
    "too_many": RequestResult.TRUNCATED,
    "inband_error": RequestResult.INBAND_ERROR,
    "old_inband_error": RequestResult.INBAND_ERROR,
    "json_error": RequestResult.INBAND_ERROR,
    "abort": RequestResult.ABORTED,
    "bad_json": RequestResult.MALFORMED,
    "not_an_object": RequestResult.MALFORMED,
    "no_choices": RequestResult.MALFORMED,
    "bad_utf8": RequestResult.MALFORMED,
    "bad_sse": RequestResult.MALFORMED,
    "html": RequestResult.MALFORMED,
}

CANARY_ENDS = {
    "ok": RequestResult.OK,
    "reversed": RequestResult.OK,
    "no_logprobs": RequestResult.MALFORMED,
    "bad_json": RequestResult.MALFORMED,
    "json_error": RequestResult.INBAND_ERROR,
    "abort": RequestResult.ABORTED,
    "body_cut": RequestResult.TRUNCATED,
    "body_stall": RequestResult.STALL,
    "silence": RequestResult.FIRST_TOKEN_TIMEOUT,
    "close": RequestResult.CLOSED,
    "reset": RequestResult.RESET,
    "http_503": RequestResult.HTTP_5XX,
}


@pytest.fixture
def stub() -> Iterator[Stub]:
    with Stub(lambda served: str(served.body["model"])) as running:  # the model name is the fault wanted
        yield running


def complete(endpoint: str, fault: str = "ok", *, limits: RequestLimits = LIMITS, key: str = KEY) -> Outcome:
    body = completion_body(fault, (3, 4, 5), TOKENS)
    return send_completion(endpoint, body, max_tokens=TOKENS, limits=limits, api_key=key)


def ask_canary(endpoint: str, fault: str = "ok") -> Outcome:
    return send_canary(endpoint, request_body(fault, PROMPTS), prompts=PROMPTS, limits=LIMITS, api_key=KEY)


def at_once(send: Callable[[str, str], Outcome], endpoint: str, fault: str) -> list[Outcome]:
    greenlets = [gevent.spawn(send, endpoint, fault) for _ in range(REPEATS)]
    gevent.joinall(greenlets, raise_error=True)
    return [greenlet.value for greenlet in greenlets]


@pytest.mark.parametrize(("fault", "expected"), ENDS.items())
def test_every_fault_of_a_stream_has_its_class(stub: Stub, fault: str, expected: RequestResult) -> None:
    outcomes = at_once(complete, stub.endpoint, fault)

    assert [outcome.result for outcome in outcomes] == [expected] * REPEATS, outcomes
    assert len(stub.served) == REPEATS, "a request was sent more than once"
    for outcome in outcomes:
        assert (outcome.error == "") == (expected is RequestResult.OK)
        assert KEY not in outcome.error
        assert len(outcome.error) <= 300


@pytest.mark.parametrize(("fault", "expected"), CANARY_ENDS.items())
def test_every_fault_of_a_canary_has_its_class(stub: Stub, fault: str, expected: RequestResult) -> None:
    outcomes = at_once(ask_canary, stub.endpoint, fault)

    assert [outcome.result for outcome in outcomes] == [expected] * REPEATS, outcomes
    for outcome in outcomes:
        assert outcome.first_token_ns is None
        assert bool(outcome.prompt_logprobs) == (expected is RequestResult.OK)


def test_a_canary_brings_the_logprobs_of_its_prompts(stub: Stub) -> None:
    outcome = ask_canary(stub.endpoint)

    assert outcome.prompt_logprobs == tuple(tuple(logprob(token) for token in row[1:]) for row in PROMPTS)
    assert outcome.output_tokens == len(PROMPTS)


def test_a_whole_stream_is_fully_recorded(stub: Stub) -> None:
    outcome = complete(stub.endpoint)
    served = stub.served[0]

    assert outcome.status == 200
    assert outcome.output_tokens == len(outcome.token_ns) == TOKENS
    assert outcome.first_token_ns == outcome.token_ns[0]
    assert len(outcome.output_sha256) == 64
    assert served.authorization == f"Bearer {KEY}"
    assert outcome.sent_ns is not None
    assert outcome.sent_ns <= served.read_ns <= served.sent_ns[0] <= outcome.token_ns[0]
    assert list(outcome.token_ns) == sorted(outcome.token_ns)
    assert outcome.token_ns[-1] <= outcome.ended_ns


def test_tokens_are_stamped_when_they_arrive_and_not_when_the_stream_ends() -> None:
    with Stub(pace_s=0.05) as stub:
        outcome = complete(stub.endpoint)
        sent_ns = stub.served[0].sent_ns
    errors_s = [(seen - sent) / 1e9 for seen, sent in zip(outcome.token_ns, sent_ns, strict=True)]

    assert min(errors_s) >= 0
    assert errors_s[0] < (outcome.ended_ns - sent_ns[0]) / 1e9 / 2, "the first token was held back"


def test_a_broken_stream_keeps_the_tokens_that_came(stub: Stub) -> None:
    outcome = complete(stub.endpoint, "reset_mid_stream")

    assert len(outcome.token_ns) == TOKENS // 2
    assert outcome.first_token_ns is not None


def test_the_total_limit_ends_a_stream_that_never_pauses(stub: Stub) -> None:
    limits = RequestLimits(connect_s=1.0, first_token_s=1.0, gap_s=1.0, total_s=0.3)

    outcome = complete(stub.endpoint, "endless", limits=limits)

    assert outcome.result is RequestResult.DEADLINE
    assert len(outcome.token_ns) > TOKENS


def test_an_error_body_is_kept_short_and_without_the_key(stub: Stub) -> None:
    outcome = complete(stub.endpoint, "http_401")

    assert outcome.status == 401
    assert "status http_401 for key ***" in outcome.error
    assert len(outcome.error) == 300


def test_a_closed_port_is_refused() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, but nobody listens
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
        outcomes = at_once(complete, endpoint, "ok")

    assert {outcome.result for outcome in outcomes} == {RequestResult.REFUSED}
    assert {outcome.sent_ns for outcome in outcomes} == {None}


def test_a_full_queue_of_connections_is_a_connect_timeout() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        waiting = []
        try:
            for _ in range(4):  # fill the queue; nobody accepts
                waiting.append(socket.socket())
                waiting[-1].setblocking(False)
                waiting[-1].connect_ex(address)
            outcome = complete(f"http://127.0.0.1:{address[1]}")
        finally:
            for connection in waiting:
                connection.close()

    assert outcome.result is RequestResult.CONNECT_TIMEOUT
    assert outcome.error == "limit of 0.3 s passed"


def test_no_route_is_unreachable() -> None:
    outcome = complete("http://127.255.255.255:80")  # a broadcast address: no TCP route on any host

    assert outcome.result is RequestResult.UNREACHABLE


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.EHOSTUNREACH, "no route"), RequestResult.UNREACHABLE),
        (OSError(errno.ENETUNREACH, "no network"), RequestResult.UNREACHABLE),
        (socket.gaierror(socket.EAI_NONAME, "no such name"), RequestResult.UNREACHABLE),
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), RequestResult.REFUSED),
        (TimeoutError(errno.ETIMEDOUT, "the kernel gave up"), RequestResult.CONNECT_TIMEOUT),
        (ConnectionResetError(errno.ECONNRESET, "reset"), RequestResult.RESET),
        (OSError(errno.EMFILE, "too many open files"), RequestResult.HARNESS_BUG),
        (OSError(errno.EADDRNOTAVAIL, "no port left"), RequestResult.HARNESS_BUG),
    ],
)
def test_a_failed_connect_is_ours_only_when_it_is(error: OSError, expected: RequestResult) -> None:
    assert connect_result(error) is expected


@pytest.mark.parametrize("endpoint", ["https://h:1", "http://h", "h:1", "http://h:x", "http://h:1/v1", ""])
def test_an_endpoint_that_is_none_is_refused_by_name(endpoint: str) -> None:
    with pytest.raises(UsageError, match="is not http://HOST:PORT"):
        endpoint_address(endpoint)


def test_no_connection_is_left_open(stub: Stub) -> None:
    before = _open_sockets()
    for fault in ("ok", "stall", "reset_mid_stream", "http_503_cut", "bad_sse", "held_open", "silence"):
        complete(stub.endpoint, fault)

    assert _open_sockets() - before <= _server_ends(stub)


def _open_sockets() -> int:
    descriptors = Path("/proc/self/fd").iterdir()
    return sum(entry.is_symlink() and "socket" in str(entry.readlink()) for entry in descriptors)


def _server_ends(stub: Stub) -> int:
    """Count the connections that the stub itself may hold open: it is in this process too."""
    return sum(served.fault in ("stall", "held_open", "silence") for served in stub.served)


def test_the_stub_itself_says_what_it_was_asked(stub: Stub) -> None:
    complete(stub.endpoint)
    served: Served = stub.served[0]

    assert json.loads(json.dumps(served.body))["stream_options"] == {"include_usage": True}
    assert served.body["prompt"] == [3, 4, 5]
    assert served.body["ignore_eos"] is True
