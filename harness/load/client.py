"""One HTTP request under gevent, timed, and its end in exactly one class. Imported under gevent alone.

Only POST, never sent twice: on a new connection each, or on one that is kept alive. geventhttpclient's parser is used
on a socket of our own, because its `HTTPClient` connects, sends and reads the header in one call: that leaves no point
to stamp the send, and no way to tell a slow connect from a slow answer.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import monotonic_ns
from typing import Any

import gevent
from geventhttpclient.response import HTTPConnectionClosed, HTTPParseError

from harness.load.answer import StreamedAnswer, WholeAnswer
from harness.load.connections import IdleConnections, connect_result
from harness.load.response import Received, Response
from harness.load.shape import RequestLimits
from harness.load.sse import StreamFault, endpoint_address
from harness.load.stamps import StampedSocket
from harness.load.timer import Expired, RequestTimer
from harness.observe.history import RequestResult

ERROR_CHARACTERS_MAX = 300
ERROR_BODY_BYTES_MAX = 4096
DRAIN_LIMIT_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one request; times are monotonic nanoseconds."""

    result: RequestResult
    error: str
    sent_ns: int | None
    ended_ns: int
    status: int | None = None
    connected_ns: int | None = None
    headers_ns: int | None = None
    first_token_ns: int | None = None
    token_ns: tuple[int, ...] = ()
    output_sha256: str = ""
    output_tokens: int = 0
    prompt_logprobs: tuple[tuple[float, ...], ...] = ()
    received_bytes: int = 0
    connection: str = ""  # "fresh", or kept alive: "new" or "reused"; "" when none was tried


def send_completion(
    endpoint: str,
    body: Mapping[str, Any],
    *,
    max_tokens: int,
    limits: RequestLimits,
    api_key: str,
    idle: IdleConnections | None = None,
) -> Outcome:
    """Send a streamed completions request and read its answer to the end; without `idle` on a new connection."""
    with _Exchange(endpoint, limits=limits, api_key=api_key, idle=idle) as exchange:
        return exchange.run(body, StreamedAnswer(max_tokens, model=str(body["model"])))


def send_canary(
    endpoint: str,
    body: Mapping[str, Any],
    *,
    prompts: Sequence[Sequence[int]],
    limits: RequestLimits,
    api_key: str,
    idle: IdleConnections | None = None,
) -> Outcome:
    """Send a completions request that is answered at once, and read the logprobs of its prompts."""
    with _Exchange(endpoint, limits=limits, api_key=api_key, idle=idle) as exchange:
        return exchange.run(body, WholeAnswer(prompts, model=str(body["model"])))


class _Exchange:
    """One request on one connection, which is closed afterwards unless its answer was whole and it is to be kept."""

    def __init__(self, endpoint: str, *, limits: RequestLimits, api_key: str, idle: IdleConnections | None) -> None:
        self._limits = limits
        self._timer = RequestTimer(limits)
        self._received = Received()
        self._address = endpoint_address(endpoint)
        self._api_key = api_key
        self._idle = idle
        self._socket: StampedSocket | None = None
        self._response: Response | None = None
        self._connection = ""
        self._connected_ns: int | None = None
        self._sent_ns: int | None = None
        self._headers_ns: int | None = None
        self._status: int | None = None

    def __enter__(self) -> _Exchange:
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.end()
        if self._socket is None:
            return
        if self._idle is not None and self._response is not None and not self._response.should_close():
            self._idle.keep(self._address, self._socket)
        else:
            self._socket.close()

    def run(self, body: Mapping[str, Any], answer: StreamedAnswer | WholeAnswer) -> Outcome:
        """Send the request, read the answer and say what became of it."""
        try:
            self._connect()
            response = self._send(body)
            self._check_status(response)
            answer.read(response, self._received, self._timer)
            ended_ns = self._received.last_ns
            self._drain(answer, response)
            result, error = RequestResult.OK, ""
        except StreamFault as fault:
            result, error = fault.result, fault.because
        except Expired as expired:
            result, error = self._expired_result(), str(expired)
        # The library's errors are no OSErrors; what the socket said is their context.
        except HTTPConnectionClosed as closed:
            result = RequestResult.RESET if isinstance(closed.__context__, OSError) else RequestResult.CLOSED
            error = "no byte of an answer"
        except HTTPParseError as bad:
            result = RequestResult.TRUNCATED_FRAMING if self._received.is_ended else RequestResult.MALFORMED
            error = str(bad)
        except OSError as lost:
            result = RequestResult.RESET_MID_STREAM if self._received.size_bytes else RequestResult.RESET
            error = f"{type(lost).__name__}: {lost}"
        if result is not RequestResult.OK:
            ended_ns = monotonic_ns()
        return Outcome(
            result=result,
            error=self._scrubbed(error),
            sent_ns=self._sent_ns,
            ended_ns=ended_ns,
            status=self._status,
            connection=self._connection,
            connected_ns=self._connected_ns,
            headers_ns=self._headers_ns,
            received_bytes=self._received.size_bytes,
            **answer.fields(),
        )

    def _connect(self) -> None:
        if self._idle is not None:
            self._socket = self._idle.take(self._address)
            self._connection = "new" if self._socket is None else "reused"
            if self._socket is not None:
                self._connected_ns = monotonic_ns()
                return
        else:
            self._connection = "fresh"
        self._timer.limit(RequestResult.CONNECT_TIMEOUT, self._limits.connect_s)
        host, port = self._address
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # Kept before connecting, so that an expired limit closes it too. Addresses skip the resolver's thread.
        self._socket = StampedSocket(family)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            self._socket.connect((host, port))
        except OSError as error:
            raise StreamFault(connect_result(error), f"{type(error).__name__}: {error}") from error
        self._connected_ns = monotonic_ns()

    def _send(self, body: Mapping[str, Any]) -> Response:
        assert self._socket is not None
        content = json.dumps(dict(body), separators=(",", ":")).encode()
        host, port = self._address
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {f'[{host}]' if ':' in host else host}:{port}\r\n"
            "Content-Type: application/json\r\nAccept: text/event-stream, application/json\r\n"
            f"Connection: {'close' if self._idle is None else 'keep-alive'}\r\n"
            f"Authorization: Bearer {self._api_key}\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        self._timer.limit(RequestResult.FIRST_TOKEN_TIMEOUT, self._limits.first_token_s)
        self._sent_ns = self._socket.arrived_ns = monotonic_ns()  # nothing can come before it was asked for
        refused: OSError | None = None
        try:
            self._socket.sendall(head.encode("ascii") + content)
        except OSError as error:
            refused = error  # an answer may still be there: a server may refuse before it has read everything
        try:
            self._response = Response(self._socket, self._received)
            self._headers_ns = self._received.last_ns
            return self._response
        except (OSError, HTTPParseError):
            if refused is not None:
                raise refused from None
            raise

    def _check_status(self, response: Response) -> None:
        self._status = response.get_code()
        if self._status == 200:
            return
        result = {4: RequestResult.HTTP_4XX, 5: RequestResult.HTTP_5XX}.get(self._status // 100)
        text = ""
        try:
            self._timer.limit(RequestResult.STALL, self._limits.gap_s)
            text = bytes(response.read(ERROR_BODY_BYTES_MAX)).decode("utf-8", "replace")
        except (Expired, OSError, HTTPParseError):
            text = "(the body could not be read)"
        if result is None:
            raise StreamFault(RequestResult.MALFORMED, f"unexpected HTTP status {self._status}: {text}")
        raise StreamFault(result, self._scrubbed(text))

    def _drain(self, answer: StreamedAnswer | WholeAnswer, response: Response) -> None:
        """Let the server close first: an early close would look to it like a client that went away."""
        self._timer.end()
        try:
            with gevent.Timeout(DRAIN_LIMIT_S, Expired("drain")):
                answer.drain(response)
        except (Expired, OSError, HTTPParseError, StreamFault):
            return  # the answer was whole; how the connection ends changes nothing

    def _expired_result(self) -> RequestResult:
        """Return the class of the limit that passed; with a header but no token it is another kind of silence."""
        passed = self._timer.result
        is_silent = passed is RequestResult.FIRST_TOKEN_TIMEOUT and self._headers_ns is not None
        if is_silent or (passed is RequestResult.STALL and not self._received.has_body):
            return RequestResult.HEADERS_THEN_SILENCE
        return passed

    def _scrubbed(self, text: str) -> str:
        hidden = text.replace(self._api_key, "***") if self._api_key else text
        return hidden[:ERROR_CHARACTERS_MAX]
