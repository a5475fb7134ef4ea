"""What a request says about its answer, on real sockets. Which class each fault has is in `test_matrix.py`."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from stub import Stub, logprob

from harness.clock import poll_until
from harness.errors import UsageError
from harness.guards.canary import request_body
from harness.load.client import Outcome, send_canary, send_completion
from harness.load.connections import IdleConnections, connect_result
from harness.load.shape import RequestLimits
from harness.load.sse import completion_body, endpoint_address
from harness.observe.history import RequestResult

KEY = "key-that-must-not-leak"
LIMITS = RequestLimits(connect_s=0.3, first_token_s=0.3, gap_s=0.3, total_s=5.0)
TOKENS = 8
PROMPTS = ((5, 6, 7), (8, 9))


@pytest.fixture
def stub() -> Iterator[Stub]:
    with Stub(lambda served: str(served.body["model"])) as running:  # the model name is the fault wanted
        yield running


def complete(
    endpoint: str, fault: str = "ok", *, limits: RequestLimits = LIMITS, idle: IdleConnections | None = None
) -> Outcome:
    body = completion_body(fault, (3, 4, 5), TOKENS)
    return send_completion(endpoint, body, max_tokens=TOKENS, limits=limits, api_key=KEY, idle=idle)


def ask_canary(endpoint: str, fault: str = "ok") -> Outcome:
    return send_canary(endpoint, request_body(fault, PROMPTS), prompts=PROMPTS, limits=LIMITS, api_key=KEY)


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
    assert outcome.connected_ns is not None
    assert outcome.headers_ns is not None
    assert outcome.connected_ns <= outcome.sent_ns <= served.read_ns <= served.sent_ns[0] <= outcome.token_ns[0]
    assert outcome.sent_ns < outcome.headers_ns <= outcome.token_ns[0]
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
        outcome = complete(endpoint)

    assert outcome.result is RequestResult.REFUSED
    assert (outcome.sent_ns, outcome.connected_ns, outcome.connection) == (None, None, "fresh")


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
        (socket.gaierror(socket.EAI_NONAME, "no such name"), RequestResult.DNS),
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


def test_a_name_that_does_not_exist_has_its_own_class() -> None:
    limits = RequestLimits(connect_s=10.0, first_token_s=10.0, gap_s=10.0, total_s=10.0)  # a resolver may be slow

    assert complete("http://no-such-host.invalid:80", limits=limits).result is RequestResult.DNS


def test_kept_connections_are_used_again_and_fresh_ones_never(stub: Stub) -> None:
    idle = IdleConnections()
    kept = [complete(stub.endpoint, idle=idle).connection for _ in range(3)]
    fresh = [complete(stub.endpoint).connection for _ in range(2)]

    assert kept == ["new", "reused", "reused"]
    assert fresh == ["fresh", "fresh"]
    assert [served.connection for served in stub.served] == [0, 0, 0, 1, 2]
    idle.close()


def test_a_broken_answer_ends_its_connection(stub: Stub) -> None:
    idle = IdleConnections()
    for fault in ("stall", "inband_error", "held_open", "too_few", "http_503_cut", "bad_sse"):
        complete(stub.endpoint, fault, idle=idle)
        assert complete(stub.endpoint, idle=idle).result is RequestResult.OK, fault
    idle.close()


def test_a_connection_closed_while_idle_is_replaced_before_anything_is_sent(stub: Stub) -> None:
    idle = IdleConnections()
    assert complete(stub.endpoint, "ok_then_close", idle=idle).connection == "new"
    poll_until(lambda: stub.closed or None, what="the end of the connection", limit_s=5.0)
    outcome = complete(stub.endpoint, idle=idle)

    assert (outcome.result, outcome.connection) == (RequestResult.OK, "new")
    assert idle.closed_while_idle == 1
    assert len(stub.served) == 2, "a request was sent more than once"
    idle.close()


def test_a_reset_of_a_kept_connection_after_the_send_is_not_sent_again(stub: Stub) -> None:
    idle = IdleConnections()
    complete(stub.endpoint, idle=idle)
    outcome = complete(stub.endpoint, "reset", idle=idle)

    assert (outcome.result, outcome.connection) == (RequestResult.RESET, "reused")
    assert len(stub.served) == 2
    idle.close()


def test_no_connection_is_left_open(stub: Stub) -> None:
    before = _open_sockets()
    for fault in ("ok", "stall", "reset_mid_stream", "http_503_cut", "bad_sse", "held_open", "silence"):
        complete(stub.endpoint, fault)
    idle = IdleConnections()
    complete(stub.endpoint, idle=idle)
    idle.close()

    # The stub is in this process too, and closes its end of a connection a moment after ours.
    poll_until(lambda: _open_sockets() - before <= _server_ends(stub) or None, what="closed sockets", limit_s=5.0)


def _open_sockets() -> int:
    descriptors = Path("/proc/self/fd").iterdir()
    return sum(entry.is_symlink() and "socket" in str(entry.readlink()) for entry in descriptors)


def _server_ends(stub: Stub) -> int:
    """Count the connections that the stub itself may hold open: it is in this process too."""
    return sum(served.fault in ("stall", "held_open", "silence") for served in stub.served)
