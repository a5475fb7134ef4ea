"""What an answer holds: a stream of tokens, or the logprobs of canary prompts. Imported under gevent alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from harness.guards.canary import prompt_logprobs_of
from harness.load.response import Received, Response
from harness.load.sse import Completion, StreamFault, check_finish_reason, check_identity, decode_object
from harness.load.timer import RequestTimer
from harness.observe.history import RequestResult


class StreamedAnswer:
    """Reads an event stream, restarting the gap limit at every token."""

    def __init__(self, max_tokens: int, *, model: str) -> None:
        self._completion = Completion(max_tokens, model=model)

    def read(self, response: Response, received: Received, timer: RequestTimer) -> None:
        """Read to the end mark, or to the end.

        Raises: StreamFault, and what the socket and the parser raise.
        """
        content_type = str(response.get("content-type", ""))
        if "text/event-stream" not in content_type:
            text = response.read_text()
            decode_object(text)
            raise StreamFault(RequestResult.MALFORMED, f'not a stream, content type "{content_type}": {text}')
        while not self._completion.is_done:
            line = response.readline(b"\n") or response.read()
            if not line:
                break
            if self._completion.feed(line, received.last_ns):
                timer.limit(RequestResult.STALL, timer.limits.gap_s)
        self._completion.check_end()

    def drain(self, response: Response) -> None:
        """Read what comes after the end mark."""
        while response.readline(b"\n"):
            pass

    def fields(self) -> dict[str, Any]:
        """Return what an outcome takes of it."""
        return {
            "first_token_ns": self._completion.first_token_ns,
            "token_ns": tuple(self._completion.token_ns),
            "output_sha256": self._completion.output_sha256,
            "output_tokens": self._completion.output_tokens,
        }


class WholeAnswer:
    """Reads an answer that comes in one piece and holds the logprobs of the prompts."""

    def __init__(self, prompts: Sequence[Sequence[int]], *, model: str) -> None:
        self._prompts = prompts
        self._model = model
        self._fields: dict[str, Any] = {}

    def read(self, response: Response, received: Received, timer: RequestTimer) -> None:
        """Read all of it.

        Raises: StreamFault, and what the socket and the parser raise.
        """
        timer.limit(RequestResult.STALL, timer.limits.gap_s)
        text = response.read_text()
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

    def drain(self, response: Response) -> None:
        """Return: all of it was read."""

    def fields(self) -> dict[str, Any]:
        """Return what an outcome takes of it."""
        return self._fields
