"""Ask an engine what a golden knows the answers of: one pass, all passes, a stream, a long prompt twice."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from harness.clock import now_ns, seconds_between
from harness.guards.canary import (
    Golden,
    LogprobRows,
    TokenRows,
    echo_body,
    echo_logprobs_of,
    of_pass,
    pass_count,
    prompt_logprobs_of,
    request_body,
)
from harness.guards.decoded import Decoded, decode, stream
from harness.guards.engine_api import EngineApi, Refused

# A server that does not know `prompt_logprobs` ignores it or refuses it so; anything else is no question of words.
NOT_UNDERSTOOD = frozenset({400, 404, 422, 501})
NOT_FINITE = "Out of range float values are not JSON compliant"  # how vLLM answers when a logprob is NaN


class How(StrEnum):
    """In which words a server was asked for the logprobs of prompts."""

    PROMPT_LOGPROBS = "prompt_logprobs"
    ECHO = "echo with logprobs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The answers to some prompts, and what they cost."""

    rows: LogprobRows  # empty when the engine said that its values are not finite
    how: How
    prompt_tokens: int
    output_tokens: int
    took_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What became of a stream or of a long prompt; `because` is empty when nothing is wrong."""

    because: str
    difference: float
    tolerance: float
    prompt_tokens: int
    output_tokens: int
    took_s: float
    saw: str  # what was compared, in words

    def as_json(self) -> dict[str, Any]:
        """Return it for a JSON document, in which a difference beyond measure is null."""
        return {
            "right": not self.because,
            "because": self.because,
            "difference": self.difference if math.isfinite(self.difference) else None,
            "tolerance": self.tolerance,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "took_s": round(self.took_s, 4),
            "saw": self.saw,
        }


def ask(api: EngineApi, model: str, prompts: TokenRows, *, rotation: int | None) -> Asked:
    """Ask the prompts of one pass in one request, or those of all passes in one request each.

    Raises: OSError for transport faults; ValueError when the server gives no logprobs of prompts, or refuses.
    """
    started_ns = now_ns()
    passes = [of_pass(prompts, rotation)] if rotation is not None else _passes(prompts)
    rows: list[tuple[float, ...]] = []
    how = How.PROMPT_LOGPROBS
    for number, asked in enumerate(passes):
        if number == 0:
            answered, how = _first(api, model, asked)
        else:
            answered = _ask(api, model, asked, how)
        rows += answered
        if not answered:
            rows = []
            break
    return Asked(
        rows=tuple(rows),
        how=how,
        prompt_tokens=sum(len(prompt) for prompts in passes for prompt in prompts),
        output_tokens=sum(len(prompts) for prompts in passes),
        took_s=seconds_between(started_ns, now_ns()),
    )


def check_stream(api: EngineApi, model: str, golden: Golden) -> Checked:
    """Ask one prompt as a stream, and compare its framing, its number of tokens and the tokens with the golden.

    Raises: OSError when the server cannot be reached; what breaks off later is a finding.
    """
    started_ns = now_ns()
    known = golden.streamed
    prompt = golden.prompts[0] if known is None else known.prompt
    count = 4 if known is None else max(len(known.tokens), len(known.logprobs))
    difference, because, saw = math.inf, "", "nothing"
    try:
        steps = stream(api, model, prompt, max_tokens=count)
    except ConnectionRefusedError:
        raise
    except (OSError, ValueError) as error:
        because = str(error) or type(error).__name__
    else:
        compared = [
            name for name, values in (("token ids", steps.tokens), ("logprobs", steps.logprobs)) if values and known
        ]
        saw = ", ".join(["framing", "number of tokens", *compared])
        difference = 0.0 if known is None else known.difference(steps)
        if steps.count != count:
            because = f"{steps.count} tokens came, {count} were expected"
        elif known is not None and difference > known.tolerance:
            because = _far("the stream's tokens", difference, known)
    return Checked(
        because=because,
        difference=difference,
        tolerance=math.inf if known is None else known.tolerance,
        prompt_tokens=len(prompt),
        output_tokens=count,
        took_s=seconds_between(started_ns, now_ns()),
        saw=saw,
    )


def check_deep(api: EngineApi, model: str, known: Decoded) -> Checked:
    """Ask a prompt of several KV blocks twice, so that the second answer comes from the prefix cache, and compare both.

    An engine that got other weights and kept the KV of the old ones answers short prompts rightly and this one not:
    requests for prompt logprobs skip the prefix cache. Asked with a salt of its own, vLLM answers without the cache; if
    that is right, the cache is what is stale.
    Raises: OSError, ValueError as `decode`.
    """
    started_ns = now_ns()
    count = len(known.logprobs)
    answers = [decode(api, model, known.prompt, max_tokens=count) for _ in range(2)]
    difference = max(known.difference(steps) for steps in answers)
    because = ""
    asked = 2
    if difference > known.tolerance:
        asked = 3
        cold = known.difference(decode(api, model, known.prompt, max_tokens=count, cache_salt=secrets.token_hex(8)))
        because = _far(f"a prompt of {len(known.prompt)} tokens", difference, known)
        if cold <= known.tolerance:
            because += (
                f"; asked past the prefix cache it is right ({cold:.3g}): the KV cache is stale, reset it or start anew"
            )
        else:
            because += f"; and asked past the prefix cache too ({cold:.3g}): it is not the KV cache"
    cached = answers[1].cached_tokens
    hit = "the server does not say how much of it it had cached" if cached is None else f"{cached} of its tokens cached"
    return Checked(
        because=because,
        difference=difference,
        tolerance=known.tolerance,
        prompt_tokens=asked * len(known.prompt),
        output_tokens=asked * count,
        took_s=seconds_between(started_ns, now_ns()),
        saw=f"a prompt of {len(known.prompt)} tokens twice, the second time: {hit}",
    )


def _passes(prompts: TokenRows) -> list[TokenRows]:
    return [of_pass(prompts, rotation) for rotation in range(pass_count(prompts))]


def _first(api: EngineApi, model: str, prompts: TokenRows) -> tuple[LogprobRows, How]:
    """Ask in the words that the server understands."""
    try:
        return _ask(api, model, prompts, How.PROMPT_LOGPROBS), How.PROMPT_LOGPROBS
    except Refused as refused:
        if refused.status not in NOT_UNDERSTOOD:
            raise
        first: ValueError = refused
    except ValueError as error:
        first = error
    try:
        return _ask(api, model, prompts, How.ECHO), How.ECHO
    except ValueError as second:
        raise ValueError(
            f"the server gives no logprobs of prompts, so it cannot be checked: asked for `prompt_logprobs`: {first}; asked "
            f"for `echo` with `logprobs`: {second}"
        ) from None


def _ask(api: EngineApi, model: str, prompts: TokenRows, how: How) -> LogprobRows:
    try:
        if how is How.ECHO:
            return echo_logprobs_of(api.complete(echo_body(model, prompts)), prompts)
        return prompt_logprobs_of(api.complete(request_body(model, prompts)), prompts)
    except Refused as refused:
        if NOT_FINITE in refused.text:
            return ()
        raise


def _far(what: str, difference: float, known: Decoded) -> str:
    if math.isfinite(difference):
        return f"{what}: logprobs differ by {difference:.3g} from the golden's (tolerance {known.tolerance:.3g})"
    return f"{what}: another token came where the golden's was certain, or another number of tokens"
