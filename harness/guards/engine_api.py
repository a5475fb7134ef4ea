"""Speak with an engine's OpenAI-compatible API: plain or over TLS, with or without a key, every wait with one limit."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from socket import socket
from typing import Any
from urllib.parse import urlsplit

from harness.clock import Deadline
from harness.errors import UsageError

ANSWER_BYTES_MAX = 64 * 1024**2
CHUNK_BYTES = 64 * 1024
QUOTED_CHARACTERS = 300


class Refused(ValueError):
    """An HTTP status other than 200."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text[:QUOTED_CHARACTERS]}")
        self.status = status
        self.text = text


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The first model that an engine lists."""

    model: str
    max_model_len: int | None  # None where the server does not say


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineApi:
    """Where an engine answers and how to reach it; nothing is ever sent twice.

    Every method raises OSError for transport faults, Refused for another status than 200, ValueError naming what was
    seen for an answer that is not what it should be. The key is in none of their texts.
    """

    url: str  # with or without /v1 at its end
    limit_s: float  # for a whole answer, from the connection on
    api_key: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = None  # None: the system's own authorities

    def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send one completions request and return the decoded answer."""
        with self._exchange("POST", "/v1/completions", body) as (_, chunks):
            return _object(b"".join(chunks))

    @contextmanager
    def stream(self, body: Mapping[str, Any]) -> Iterator[Iterator[bytes]]:
        """Send one completions request and give the bytes of its event stream as they arrive, to the end of the answer."""
        with self._exchange("POST", "/v1/completions", body) as (content_type, chunks):
            if "text/event-stream" not in content_type:
                raise ValueError(f'not a stream but "{content_type}": {self._text(chunks)}')
            yield chunks

    def served(self) -> Served:
        """Ask for the models and return the first."""
        with self._exchange("GET", "/v1/models", None) as (_, chunks):
            document = _object(b"".join(chunks))
        try:
            first = document["data"][0]
            length = first.get("max_model_len")
            return Served(model=str(first["id"]), max_model_len=length if type(length) is int else None)
        except (KeyError, IndexError, TypeError, AttributeError):
            raise ValueError(f"/v1/models lists no model: {str(document)[:QUOTED_CHARACTERS]}") from None

    def version(self) -> str | None:
        """Return what `/version` says, which vLLM and few others have; None where it says nothing."""
        try:
            with self._exchange("GET", "/version", None) as (_, chunks):
                return str(_object(b"".join(chunks))["version"])
        except (ValueError, KeyError):
            return None

    @contextmanager
    def _exchange(
        self, method: str, path: str, body: Mapping[str, Any] | None
    ) -> Iterator[tuple[str, Iterator[bytes]]]:
        """Send one request; give the content type and the body of a 200 in pieces as they come."""
        deadline = Deadline.after(self.limit_s)
        connection = self._connection()
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        base = urlsplit(self.url).path.rstrip("/").removesuffix("/v1")
        try:
            connection.connect()
            open_socket: socket = connection.sock
            open_socket.settimeout(_remaining(deadline))
            connection.request(method, base + path, None if body is None else json.dumps(dict(body)), headers)
            open_socket.settimeout(_remaining(deadline))
            response = connection.getresponse()
            chunks = _chunks(response, open_socket, deadline)
            if response.status != 200:
                raise Refused(response.status, self._text(chunks))
            yield response.getheader("Content-Type") or "", chunks
        except http.client.IncompleteRead as error:
            raise OSError(f"the answer broke off after {len(error.partial):,} bytes of its last piece") from error
        except http.client.HTTPException as error:
            raise OSError(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        if parts.scheme == "https":
            return http.client.HTTPSConnection(
                parts.hostname or "", parts.port, timeout=self.limit_s, context=self.tls or ssl.create_default_context()
            )
        return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=self.limit_s)

    def _text(self, chunks: Iterator[bytes]) -> str:
        text = b"".join(chunks).decode("utf-8", "replace")
        return text.replace(self.api_key, "***") if self.api_key else text


def require_address(url: str, *, insecure: bool = False) -> None:
    """Check that `url` is one to ask, and that `insecure` means something there.

    Raises: UsageError.
    """
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise UsageError(f'"{url}" is no address, expected for example http://127.0.0.1:8000')
    if insecure and url.startswith("http:"):
        raise UsageError("--insecure is about certificates, and http:// has none")


def tls_context(ca_file: Path | None, *, insecure: bool) -> ssl.SSLContext:
    """Return how servers are authenticated: by the system's authorities, by those in `ca_file`, or not at all.

    Raises: UsageError when the file holds no certificate.
    """
    try:
        context = ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f'"{ca_file}" holds no certificates that can be used: {error}') from error
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _chunks(response: http.client.HTTPResponse, open_socket: socket, deadline: Deadline) -> Iterator[bytes]:
    size_bytes = 0
    while True:
        if not response.isclosed():  # some Pythons close it with the last byte, others with the read after it
            open_socket.settimeout(_remaining(deadline))
        chunk = response.read1(CHUNK_BYTES)
        if not chunk:
            if response.length:  # read1 does not say that an answer of known length broke off
                raise http.client.IncompleteRead(b"", response.length)
            return
        size_bytes += len(chunk)
        if size_bytes > ANSWER_BYTES_MAX:
            raise ValueError(f"the answer is longer than {ANSWER_BYTES_MAX:,} bytes")
        yield chunk


def _remaining(deadline: Deadline) -> float:
    remaining_s = deadline.remaining_s()
    if remaining_s <= 0:
        raise TimeoutError(f"no whole answer within {deadline.limit_s:g} s")
    return remaining_s


def _object(raw: bytes) -> dict[str, Any]:
    text = raw.decode("utf-8", "replace")
    document = json.loads(text)
    if not isinstance(document, dict):
        raise ValueError(f"the answer is not a JSON object: {text[:QUOTED_CHARACTERS]}")
    return document
