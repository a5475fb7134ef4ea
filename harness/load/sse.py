"""Server-sent events of a streamed completion: bytes in, one result out; no sockets and no clock here.

Source: the WHATWG HTML standard, section 9.2 (event stream format); the OpenAI completions API as vLLM serves it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from harness.errors import UsageError
from harness.observe.history import RequestResult

END_MARK = "[DONE]"
KNOWN_FIELDS = frozenset({"data", "event", "id", "retry"})
IDENTITY = ("id", "model", "system_fingerprint")


def completion_body(model: str, prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
    """Return a streamed completions request of fixed work: token ids in, exactly `max_tokens` tokens out."""
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,  # vLLM; without it a token that prints as nothing yet cannot be seen
    }


def endpoint_address(endpoint: str) -> tuple[str, int]:
    """Return host and port of `http://HOST:PORT`.

    Raises: UsageError for anything else.
    """
    try:
        parts = urlsplit(endpoint)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise UsageError(f'endpoint "{endpoint}" is not http://HOST:PORT: {error}') from error
    if parts.scheme != "http" or not host or port is None or parts.path.strip("/"):
        raise UsageError(f'endpoint "{endpoint}" is not http://HOST:PORT')
    return host, port


class StreamFault(Exception):
    """The bytes of an answer say that it failed, and how."""

    def __init__(self, result: RequestResult, because: str) -> None:
        super().__init__(because)
        self.result = result
        self.because = because


class EventDecoder:
    """Cuts a byte stream into the data of its events; how the bytes are cut into chunks makes no difference."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> Iterator[str]:
        """Yield the data of every event that ends within `chunk`.

        Raises: StreamFault (malformed) on bytes that are not an event stream.
        """
        self._rest += chunk
        *lines, rest = self._rest.split(b"\n")
        self._rest = rest
        for line in lines:
            data = self._take(bytes(line.removesuffix(b"\r")))
            if data is not None:
                yield data

    def _take(self, line: bytes) -> str | None:
        if not line:
            data, self._data = self._data, []
            return "\n".join(data) if data else None
        try:
            name, _, value = line.decode("utf-8").partition(":")
        except UnicodeDecodeError as error:
            raise StreamFault(RequestResult.MALFORMED, f"the stream is not UTF-8: {error}") from error
        if name == "data":
            self._data.append(value.removeprefix(" "))
        elif name and name not in KNOWN_FIELDS:
            raise StreamFault(RequestResult.MALFORMED, f'not a server-sent event: "{line.decode("utf-8")}"')
        return None


class Completion:
    """What a streamed answer has said so far.

    A token event is one with token ids or text; role, usage and ping events are not. Several tokens may share
    an event, so the number of tokens is the server's usage where it is given. An answer names its server (`id`, `model`,
    `system_fingerprint`): what changes within one stream came from two of them.
    """

    def __init__(self, max_tokens: int, *, model: str = "") -> None:
        self.max_tokens = max_tokens
        self.token_ns: list[int] = []
        self.is_done = False
        self._model = model
        self._decoder = EventDecoder()
        self._digest = hashlib.sha256()
        self._identity: dict[str, Any] = {}
        self._first_choice_ns: int | None = None
        self._finish_reason: str | None = None
        self._usage_tokens: int | None = None
        self._ids: int | None = None  # token ids seen; None where the server gives none

    @property
    def first_token_ns(self) -> int | None:
        """Return when the first token came; an answer whose tokens all print as nothing began with its first event."""
        return self.token_ns[0] if self.token_ns else self._first_choice_ns

    @property
    def output_tokens(self) -> int:
        """Return the number of tokens answered, by the server's count if it gave one."""
        if self._usage_tokens is not None:
            return self._usage_tokens
        return len(self.token_ns) if self._ids is None else self._ids

    @property
    def output_sha256(self) -> str:
        """Return the digest of the token ids, or of the text where the server gives none; nothing without either."""
        return self._digest.hexdigest() if self.token_ns else ""

    def feed(self, chunk: bytes, at_ns: int) -> bool:
        """Take bytes that arrived at `at_ns` and say whether a token was among them.

        Raises: StreamFault when they tell of a failure.
        """
        before = len(self.token_ns)
        for data in self._decoder.feed(chunk):
            if data == END_MARK:
                self.is_done = True
            elif not self.is_done:
                self._take(data, at_ns)
        return len(self.token_ns) > before

    def check_end(self) -> None:
        """Check that the answer was whole, and that it can be what was asked for.

        Raises: StreamFault (truncated in its protocol, wrong content) saying what is missing.
        """
        asked, counted, ids = self.max_tokens, self.output_tokens, self._ids
        by = "token events, no usage given" if self._usage_tokens is None and ids is None else "tokens"
        result = RequestResult.TRUNCATED_PROTOCOL
        if not self.is_done:
            because = f'the stream ended without "{END_MARK}" after {counted} of {asked} tokens'
        elif self._finish_reason is None:
            because = f"no finish_reason after {counted} of {asked} tokens"
        elif counted < asked:
            because = f"{counted} {by}, {asked} were asked for"
        else:
            result = RequestResult.WRONG_CONTENT
            if counted > asked:
                because = f"{counted} {by}, {asked} were asked for"
            elif ids is not None and ids != counted:
                because = f"{ids} token ids, but the server counts {counted} tokens"
            elif not self.token_ns:
                because = f"neither text nor token ids in an answer that the server counts as {counted} tokens"
            else:
                return
        raise StreamFault(result, because)

    def _take(self, data: str, at_ns: int) -> None:
        message = decode_object(data)
        check_identity(message, self._identity, model=self._model)
        try:
            usage = message.get("usage")
            if usage is not None:
                self._usage_tokens = int(usage["completion_tokens"])
            for choice in message["choices"]:
                if self._first_choice_ns is None:
                    self._first_choice_ns = at_ns
                ids = choice.get("token_ids")
                if ids is not None:
                    self._ids = len(ids) + (self._ids or 0)
                content = "".join(f"{int(token)} " for token in ids or ()) or choice.get("text")
                if content:
                    self.token_ns.append(at_ns)
                    self._digest.update(content.encode("utf-8", "surrogatepass"))
                self._finish_reason = choice.get("finish_reason") or self._finish_reason
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            because = f"not a completion event ({type(error).__name__}: {error}): {data}"
            raise StreamFault(RequestResult.MALFORMED, because) from error
        check_finish_reason(self._finish_reason)


def check_identity(message: Mapping[str, Any], seen: dict[str, Any], *, model: str) -> None:
    """Check that an answer comes from the model asked, and from the same server as what was `seen` of it before.

    A server that does not name itself is believed. `seen` is updated.
    Raises: StreamFault (wrong model, mixed version).
    """
    for name in IDENTITY:
        value = message.get(name)
        if value is None or value == seen.get(name):
            continue
        if name in seen:
            because = f'"{name}" was "{seen[name]}" and is "{value}" in the same answer'
            raise StreamFault(RequestResult.MIXED_VERSION, because)
        if name == "model" and model and value != model:
            raise StreamFault(RequestResult.WRONG_MODEL, f'model "{model}" was asked, "{value}" answered')
        seen[name] = value


def decode_object(data: str) -> Mapping[str, Any]:
    """Decode one JSON object of an answer.

    Raises: StreamFault (malformed) when it is none, (in-band error) when it tells of an error.
    """
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise StreamFault(RequestResult.MALFORMED, f"not JSON ({error}): {data}") from error
    if not isinstance(message, dict):
        raise StreamFault(RequestResult.MALFORMED, f"not a JSON object: {data}")
    if message.get("error") is not None or message.get("object") == "error":
        raise StreamFault(RequestResult.INBAND_ERROR, data)
    return message


def check_finish_reason(reason: str | None) -> None:
    """Check that the engine did not give the request up.

    Raises: StreamFault (aborted or in-band error).
    """
    if reason == "abort":
        raise StreamFault(RequestResult.ABORTED, 'finish_reason is "abort"')
    if reason == "error":
        raise StreamFault(RequestResult.INBAND_ERROR, 'finish_reason is "error"')
