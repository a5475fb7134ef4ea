"""One HTTP request under gevent, timed, and its end in exactly one class. Imported by `locustfile` alone.

Only POST, never sent twice: on a new connection each, or on one that is kept alive. geventhttpclient's parser is used
on a socket of our own, because its `HTTPClient` connects, sends and reads the header in one call: that leaves no point
to stamp the send, and no way to tell a slow connect from a slow answer.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import monotonic_ns
from typing import Any

import gevent
import gevent.socket
from geventhttpclient.response import HTTPConnectionClosed, HTTPParseError, HTTPSocketResponse

from harness.clock import Deadline
from harness.guards.canary import prompt_logprobs_of
from harness.load.connections import IdleConnections, connect_result
from harness.load.shape import RequestLimits
from harness.load.sse import (
    Completion,
    StreamFault,
    check_finish_reason,
    check_identity,
    decode_object,
    endpoint_address,
)
from harness.observe.history import RequestResult

ERROR_CHARACTERS_MAX = 300
ANSWER_BYTES_MAX = 64 * 1024**2
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
        return exchange.run(body, _StreamedAnswer(max_tokens, model=str(body["model"])))


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
        return exchange.run(body, _WholeAnswer(prompts, model=str(body["model"])))


@dataclass(slots=True)
class _Received:
    """What has come in on a connection."""

    size_bytes: int = 0
    last_ns: int = 0
    has_body: bool = False
    is_ended: bool = False


class _Response(HTTPSocketResponse):
    """A response that notes when its bytes arrive; `received` is there even if the header never is."""

    def __init__(self, sock: gevent.socket.socket, received: _Received) -> None:
        self._received = received
        super().__init__(sock, method="POST")

    def feed(self, data: str | bytes) -> None:
        # Called with what `recv` just returned: the stamp comes before any parsing.
        self._received.last_ns = monotonic_ns()
        self._received.size_bytes += len(data)
        self._received.is_ended = not data
        if self._received.size_bytes > ANSWER_BYTES_MAX:
            raise StreamFault(RequestResult.MALFORMED, f"the answer is longer than {ANSWER_BYTES_MAX:,} bytes")
        super().feed(data)

    def _on_body(self, buf: bytearray) -> None:
        self._received.has_body = True
        super()._on_body(buf)


class _StreamedAnswer:
    """Reads an event stream, restarting the gap limit at every token."""

    def __init__(self, max_tokens: int, *, model: str) -> None:
        self._completion = Completion(max_tokens, model=model)

    def read(self, exchange: _Exchange, response: _Response) -> None:
        content_type = str(response.get("content-type", ""))
        if "text/event-stream" not in content_type:
            text = exchange.read_text(response)
            decode_object(text)
            raise StreamFault(RequestResult.MALFORMED, f'not a stream, content type "{content_type}": {text}')
        while not self._completion.is_done:
            line = response.readline(b"\n") or response.read()
            if not line:
                break
            if self._completion.feed(line, exchange.received.last_ns):
                exchange.limit(RequestResult.STALL, exchange.limits.gap_s)
        self._completion.check_end()

    def drain(self, response: _Response) -> None:
        while response.readline(b"\n"):
            pass

    def fields(self) -> dict[str, Any]:
        return {
            "first_token_ns": self._completion.first_token_ns,
            "token_ns": tuple(self._completion.token_ns),
            "output_sha256": self._completion.output_sha256,
            "output_tokens": self._completion.output_tokens,
        }


class _WholeAnswer:
    """Reads an answer that comes in one piece and holds the logprobs of the prompts."""

    def __init__(self, prompts: Sequence[Sequence[int]], *, model: str) -> None:
        self._prompts = prompts
        self._model = model
        self._fields: dict[str, Any] = {}

    def read(self, exchange: _Exchange, response: _Response) -> None:
        exchange.limit(RequestResult.STALL, exchange.limits.gap_s)
        text = exchange.read_text(response)
        answer = decode_object(text)
        check_identity(answer, {}, model=self._model)
        try:
            rows = prompt_logprobs_of(answer, self._prompts)
            texts = [str(choice.get("text")) for choice in answer["choices"]]
            tokens = int((answer.get("usage") or {}).get("completion_tokens", 0))
            reasons = [choice.get("finish_reason") for choice in answer["choices"]]
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise StreamFault(RequestResult.MALFORMED, str(error)) from error
        for reason in reasons:
            check_finish_reason(reason)
        digest = hashlib.sha256(json.dumps(texts).encode()).hexdigest()
        self._fields = {"prompt_logprobs": rows, "output_sha256": digest, "output_tokens": tokens}

    def drain(self, response: _Response) -> None:
        pass

    def fields(self) -> dict[str, Any]:
        return self._fields


class _Expired(Exception):
    """A limit of the request passed."""


class _Exchange:
    """One request on one connection, which is closed afterwards unless its answer was whole and it is to be kept."""

    def __init__(self, endpoint: str, *, limits: RequestLimits, api_key: str, idle: IdleConnections | None) -> None:
        self.limits = limits
        self.received = _Received()
        self._address = endpoint_address(endpoint)
        self._api_key = api_key
        self._total = Deadline.after(limits.total_s)
        self._timer: gevent.Timeout | None = None
        self._limit_result = RequestResult.DEADLINE
        self._idle = idle
        self._socket: gevent.socket.socket | None = None
        self._response: _Response | None = None
        self._connection = ""
        self._connected_ns: int | None = None
        self._sent_ns: int | None = None
        self._headers_ns: int | None = None
        self._status: int | None = None

    def __enter__(self) -> _Exchange:
        return self

    def __exit__(self, *_: object) -> None:
        self._end_limit()
        if self._socket is None:
            return
        if self._idle is not None and self._response is not None and not self._response.should_close():
            self._idle.keep(self._address, self._socket)
        else:
            self._socket.close()

    def limit(self, result: RequestResult, limit_s: float) -> None:
        """Give what follows `limit_s` seconds, less if the total limit comes first; it ends in `result` otherwise."""
        self._end_limit()
        remaining_s = self._total.remaining_s()
        if remaining_s <= limit_s:
            self._limit_result, seconds, named = RequestResult.DEADLINE, remaining_s, self.limits.total_s
        else:
            self._limit_result, seconds, named = result, limit_s, limit_s
        because = f"limit of {named:g} s passed"
        self._timer = gevent.Timeout.start_new(seconds, _Expired(because))

    def read_text(self, response: _Response) -> str:
        """Read the whole body as text."""
        try:
            return bytes(response.read()).decode("utf-8")
        except UnicodeDecodeError as error:
            raise StreamFault(RequestResult.MALFORMED, f"the answer is not UTF-8: {error}") from error

    def run(self, body: Mapping[str, Any], answer: _StreamedAnswer | _WholeAnswer) -> Outcome:
        """Send the request, read the answer and say what became of it."""
        try:
            self._connect()
            response = self._send(body)
            self._check_status(response)
            answer.read(self, response)
            ended_ns = self.received.last_ns
            self._drain(answer, response)
            result, error = RequestResult.OK, ""
        except StreamFault as fault:
            result, error = fault.result, fault.because
        except _Expired as expired:
            result, error = self._expired_result(), str(expired)
        # The library's errors are no OSErrors; what the socket said is their context.
        except HTTPConnectionClosed as closed:
            result = RequestResult.RESET if isinstance(closed.__context__, OSError) else RequestResult.CLOSED
            error = "no byte of an answer"
        except HTTPParseError as bad:
            result = RequestResult.TRUNCATED_FRAMING if self.received.is_ended else RequestResult.MALFORMED
            error = str(bad)
        except OSError as lost:
            result = RequestResult.RESET_MID_STREAM if self.received.size_bytes else RequestResult.RESET
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
            received_bytes=self.received.size_bytes,
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
        self.limit(RequestResult.CONNECT_TIMEOUT, self.limits.connect_s)
        host, port = self._address
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # Kept before connecting, so that an expired limit closes it too. Addresses skip the resolver's thread.
        self._socket = gevent.socket.socket(family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            self._socket.connect((host, port))
        except OSError as error:
            raise StreamFault(connect_result(error), f"{type(error).__name__}: {error}") from error
        self._connected_ns = monotonic_ns()

    def _send(self, body: Mapping[str, Any]) -> _Response:
        assert self._socket is not None
        content = json.dumps(dict(body), separators=(",", ":")).encode()
        host, port = self._address
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {f'[{host}]' if ':' in host else host}:{port}\r\n"
            "Content-Type: application/json\r\nAccept: text/event-stream, application/json\r\n"
            f"Connection: {'close' if self._idle is None else 'keep-alive'}\r\n"
            f"Authorization: Bearer {self._api_key}\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        self.limit(RequestResult.FIRST_TOKEN_TIMEOUT, self.limits.first_token_s)
        self._sent_ns = monotonic_ns()
        refused: OSError | None = None
        try:
            self._socket.sendall(head.encode("ascii") + content)
        except OSError as error:
            refused = error  # an answer may still be there: a server may refuse before it has read everything
        try:
            self._response = _Response(self._socket, self.received)
            self._headers_ns = self.received.last_ns
            return self._response
        except (OSError, HTTPParseError):
            if refused is not None:
                raise refused from None
            raise

    def _check_status(self, response: _Response) -> None:
        self._status = response.get_code()
        if self._status == 200:
            return
        result = {4: RequestResult.HTTP_4XX, 5: RequestResult.HTTP_5XX}.get(self._status // 100)
        text = ""
        try:
            self.limit(RequestResult.STALL, self.limits.gap_s)
            text = bytes(response.read(ERROR_BODY_BYTES_MAX)).decode("utf-8", "replace")
        except (_Expired, OSError, HTTPParseError):
            text = "(the body could not be read)"
        if result is None:
            raise StreamFault(RequestResult.MALFORMED, f"unexpected HTTP status {self._status}: {text}")
        raise StreamFault(result, self._scrubbed(text))

    def _drain(self, answer: _StreamedAnswer | _WholeAnswer, response: _Response) -> None:
        """Let the server close first: an early close would look to it like a client that went away."""
        self._end_limit()
        try:
            with gevent.Timeout(DRAIN_LIMIT_S, _Expired("drain")):
                answer.drain(response)
        except (_Expired, OSError, HTTPParseError, StreamFault):
            return  # the answer was whole; how the connection ends changes nothing

    def _expired_result(self) -> RequestResult:
        """Return the class of the limit that passed; with a header but no token it is another kind of silence."""
        is_silent = self._limit_result is RequestResult.FIRST_TOKEN_TIMEOUT and self._headers_ns is not None
        if is_silent or (self._limit_result is RequestResult.STALL and not self.received.has_body):
            return RequestResult.HEADERS_THEN_SILENCE
        return self._limit_result

    def _end_limit(self) -> None:
        if self._timer is not None:
            self._timer.close()
            self._timer = None

    def _scrubbed(self, text: str) -> str:
        hidden = text.replace(self._api_key, "***") if self._api_key else text
        return hidden[:ERROR_CHARACTERS_MAX]
