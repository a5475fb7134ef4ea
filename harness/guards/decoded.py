"""What an engine goes on with after a prompt, token by token: asked in one piece or as a stream, and compared.

Decoded answers wander under load where prompt logprobs do not (vLLM 0.32.0 on CPU: up to 0.14, and text flips where two
tokens are nearly as likely), so they are compared with a tolerance of their own, up to the first token that differs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.guards.engine_api import EngineApi

END_MARK = "[DONE]"
FIELDS = frozenset({"data", "event", "id", "retry"})
ID_PREFIX = "token_id:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Tokens that an engine decoded."""

    tokens: tuple[int, ...]  # empty where the server gives no ids
    logprobs: tuple[float, ...]  # of each token; empty where the server gives none
    margins: tuple[float, ...]  # how much more likely each token was than the second best; 0 where unknown
    count: int
    cached_tokens: int | None = None  # of the prompt, found in the prefix cache; None where the server does not say


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """The right continuation of one prompt, and how far noise moves it."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    margins: tuple[float, ...]
    noise_max: float  # largest absolute difference of logprobs seen under load, up to the first other token
    noise_checks: int
    tolerance: float

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Decoded:
        """Build it from a decoded JSON object.

        Raises: TypeError, ValueError when the object is no continuation.
        """
        known: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
        made = cls(**known)
        if len(made.margins) != max(len(made.tokens), len(made.logprobs)) or not made.margins or not made.prompt:
            raise ValueError("a continuation without tokens, or with another number of margins")
        if not 0 < made.tolerance < math.inf:
            raise ValueError(f"the tolerance of a continuation is {made.tolerance!r}, expected a number above zero")
        return made

    def difference(self, seen: Steps) -> float:
        """Return the largest absolute difference of logprobs, up to the first token that is another one.

        Infinite when another token came where this one was certain (its margin is beyond what both can move by), when
        a value is not finite, or when the number of tokens differs. Zero when the server gives neither ids nor logprobs.
        """
        return decoded_difference(self.tokens, self.logprobs, self.margins, seen, tolerance=self.tolerance)


def decoded_difference(
    tokens: Sequence[int], logprobs: Sequence[float], margins: Sequence[float], seen: Steps, *, tolerance: float
) -> float:
    """Compare as `Decoded.difference` says; `tolerance` decides which tokens are certain."""
    count = max(len(tokens), len(logprobs))
    if seen.count != count or (seen.tokens and len(seen.tokens) != count):
        return math.inf
    largest = 0.0
    for place in range(count):
        if seen.logprobs and logprobs:
            if len(seen.logprobs) != count or not math.isfinite(seen.logprobs[place]):
                return math.inf
            largest = max(largest, abs(seen.logprobs[place] - logprobs[place]))
        if seen.tokens and tokens and seen.tokens[place] != tokens[place]:
            return math.inf if margins[place] > 2 * tolerance else largest
    return largest


def decode_body(model: str, prompt: Sequence[int], *, max_tokens: int, stream: bool = False) -> dict[str, Any]:
    """Return the request for a greedy continuation with the logprobs and, where the server can, the ids of its tokens."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "logprobs": 2,
        "ignore_eos": True,
        "return_token_ids": True,  # vLLM's, as are the next; others ignore what they do not know
        "return_tokens_as_token_ids": True,
    }
    return {**body, "stream": True, "stream_options": {"include_usage": True}} if stream else body


def decode(api: EngineApi, model: str, prompt: Sequence[int], *, max_tokens: int, **more: Any) -> Steps:
    """Ask for a continuation in one piece.

    Raises: OSError, ValueError as `EngineApi.complete`; ValueError when the answer is not of that layout.
    """
    answer = api.complete({**decode_body(model, prompt, max_tokens=max_tokens), **more})
    return _steps([answer])


def stream(api: EngineApi, model: str, prompt: Sequence[int], *, max_tokens: int) -> Steps:
    """Ask for a continuation as a stream and read it to its end.

    Raises: OSError, ValueError as `EngineApi.stream`; ValueError saying what is broken in the stream: its framing, an
    event, an error inside it, no end mark, no finish_reason, or another number of tokens than the server counts.
    """
    with api.stream(decode_body(model, prompt, max_tokens=max_tokens, stream=True)) as chunks:
        messages = [_message(data) for data in _data_until_end(chunks)]
    steps = _steps(messages)
    reasons = [choice.get("finish_reason") for message in messages for choice in message.get("choices") or ()]
    if not reasons or reasons[-1] is None:
        raise ValueError(f"the stream has no finish_reason at its end, after {steps.count} of {max_tokens} tokens")
    if reasons[-1] in ("abort", "error"):
        raise ValueError(f'the stream ended with finish_reason "{reasons[-1]}" after {steps.count} tokens')
    counted = [m["usage"]["completion_tokens"] for m in messages if isinstance(m.get("usage"), dict)]
    if counted and (steps.tokens or steps.logprobs) and counted[-1] != steps.count:
        raise ValueError(f"the stream holds {steps.count} tokens, the server counts {counted[-1]}")
    return steps


def _data_until_end(chunks: Iterable[bytes]) -> Iterator[str]:
    """Yield the data of every event before the end mark; what follows it is read, so that its framing is checked too."""
    rest = b""
    is_ended = False
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for raw in lines:
            line = raw.removesuffix(b"\r").decode("utf-8", "replace")
            name, _, value = line.partition(":")
            if name and name not in FIELDS:
                raise ValueError(f'not an event of a stream: "{line[:200]}"')
            if name != "data" or is_ended:
                continue
            value = value.removeprefix(" ")
            if value == END_MARK:
                is_ended = True
            else:
                yield value
    if not is_ended:
        raise ValueError(f'the stream ended without "{END_MARK}"')


def _message(data: str) -> dict[str, Any]:
    try:
        message = json.loads(data)
    except ValueError:
        raise ValueError(f'an event of the stream is not JSON: "{data[:200]}"') from None
    if not isinstance(message, dict):
        raise ValueError(f'an event of the stream is not a JSON object: "{data[:200]}"')
    if message.get("error") is not None or message.get("object") == "error":
        raise ValueError(f"an error inside the stream: {data[:200]}")
    return message


def _steps(messages: Sequence[Mapping[str, Any]]) -> Steps:
    tokens: list[int] = []
    logprobs: list[float] = []
    margins: list[float] = []
    events = 0
    usage: Mapping[str, Any] = {}
    try:
        for message in messages:
            usage = message.get("usage") or usage
            for choice in message["choices"]:
                events += bool(choice.get("text"))
                shown = choice.get("logprobs") or {}
                logprobs += [float(value) for value in shown.get("token_logprobs") or ()]
                margins += [_margin(ranked) for ranked in shown.get("top_logprobs") or ()]
                names = [str(name) for name in shown.get("tokens") or ()]
                if choice.get("token_ids") is not None:
                    tokens += [int(token) for token in choice["token_ids"]]
                elif all(name.startswith(ID_PREFIX) for name in names):
                    tokens += [int(name.removeprefix(ID_PREFIX)) for name in names]
        counted = usage.get("completion_tokens")
        details = usage.get("prompt_tokens_details") or {}
        cached = details.get("cached_tokens")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"the answer is no completion: {type(error).__name__}: {error}") from error
    count = len(tokens) or len(logprobs) or (counted if type(counted) is int else events)
    margins += [0.0] * (count - len(margins))
    return Steps(
        tokens=tuple(tokens),
        logprobs=tuple(logprobs),
        margins=tuple(margins[:count]),
        count=count,
        cached_tokens=cached if type(cached) is int else None,
    )


def _margin(ranked: Mapping[str, Any] | None) -> float:
    best = sorted((float(value) for value in (ranked or {}).values()), reverse=True)
    return best[0] - best[1] if len(best) > 1 and all(math.isfinite(value) for value in best[:2]) else 0.0
