"""The completions request and its answers, in the layout of vLLM's OpenAI-compatible server."""

from __future__ import annotations

import codecs
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.engine.reference.scheduler import Generation, Position, Step
from harness.engine.reference.tokenizer import NotEncodable, Tokenizer

MAX_LOGPROBS = 20
LOWEST_LOGPROB = -9999.0  # what vLLM puts in place of minus infinity


class Refused(Exception):
    """The request cannot be served as asked; carries what the HTTP answer says."""

    def __init__(self, message: str, *, status: int = 400, kind: str = "BadRequestError", param: str | None = None):
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param

    def body(self) -> dict[str, Any]:
        """Return the JSON body of the answer."""
        return error_body(str(self), status=self.status, kind=self.kind, param=self.param)


def error_body(message: str, *, status: int, kind: str, param: str | None = None) -> dict[str, Any]:
    """Return an error in the layout that clients know."""
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """A checked request."""

    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    ignores_end: bool
    top_logprobs: int | None
    top_prompt_logprobs: int | None
    is_stream: bool
    includes_usage: bool
    returns_token_ids: bool
    shows_token_ids: bool  # `token_id:5` in place of the text of token 5
    cache_salt: str = ""

    def generations(self) -> tuple[Generation, ...]:
        """Return one generation per prompt."""
        return tuple(
            Generation(
                prompt=prompt,
                max_tokens=self.max_tokens,
                ignores_end=self.ignores_end,
                top_logprobs=self.top_logprobs,
                top_prompt_logprobs=self.top_prompt_logprobs,
                salt=self.cache_salt,
            )
            for prompt in self.prompts
        )


def parse_request(
    raw: bytes, *, model_name: str, tokenizer: Tokenizer, vocabulary: int, max_model_len: int
) -> CompletionRequest:
    """Check a request body. Sampling is greedy whatever the temperature.

    Raises: Refused with status 400, or 404 for another model.
    """
    try:
        fields = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise Refused(f"JSON decode error: {error}", kind="Bad Request") from None
    if not isinstance(fields, dict):
        raise Refused("the request body is not a JSON object", kind="Bad Request")
    model = fields.get("model") or model_name
    if model != model_name:
        message = f"The model `{model}` does not exist. Valid aliases: {model_name}."
        raise Refused(message, status=404, kind="NotFoundError", param="model")
    prompts = _prompts(fields.get("prompt"), tokenizer, vocabulary)
    max_tokens = _whole(fields, "max_tokens", 16, at_least=1)
    assert max_tokens is not None
    for prompt in prompts:
        if len(prompt) + max_tokens > max_model_len:
            message = (
                f"This model's maximum context length is {max_model_len} tokens. However, you requested {max_tokens} "
                f"output tokens and your prompt contains {len(prompt)} input tokens."
            )
            raise Refused(message, param="max_tokens")
    is_stream = _flag(fields, "stream")
    top_prompt_logprobs = _whole(fields, "prompt_logprobs", None, at_least=0, at_most=MAX_LOGPROBS)
    if is_stream and top_prompt_logprobs:  # vLLM lets 0 through and leaves them out
        raise Refused("`prompt_logprobs` are not available when `stream=True`.", param="prompt_logprobs")
    temperature = fields.get("temperature")
    if temperature is not None and (type(temperature) not in (int, float) or not 0 <= temperature < math.inf):
        raise Refused(f"temperature must be non-negative, got {temperature!r}.", param="temperature")
    for name, only in (("n", 1), ("echo", False), ("suffix", None), ("use_beam_search", False)):
        if fields.get(name, only) not in (only, None):
            raise Refused(f"{name}={fields[name]!r} is not served by the reference engine", param=name)
    if fields.get("stop") not in (None, [], ""):
        raise Refused("stop strings are not served by the reference engine", param="stop")
    options = fields.get("stream_options") or {}
    if not isinstance(options, dict):
        raise Refused("stream_options is not an object", param="stream_options")
    return CompletionRequest(
        prompts=prompts,
        max_tokens=max_tokens,
        ignores_end=_flag(fields, "ignore_eos"),
        top_logprobs=_whole(fields, "logprobs", None, at_least=0, at_most=MAX_LOGPROBS),
        top_prompt_logprobs=None if is_stream else top_prompt_logprobs,
        is_stream=is_stream,
        includes_usage=_flag(options, "include_usage"),
        returns_token_ids=_flag(fields, "return_token_ids"),
        shows_token_ids=_flag(fields, "return_tokens_as_token_ids"),
        cache_salt=str(fields.get("cache_salt") or ""),
    )


def _prompts(prompt: Any, tokenizer: Tokenizer, vocabulary: int) -> tuple[tuple[int, ...], ...]:
    if prompt is None or prompt == "":
        raise Refused("Either prompt or prompt_embeds must be provided and non-empty.", param="prompt")
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and not isinstance(prompt[0], str | list)):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise Refused("You must pass at least one prompt", param="prompt")
    rows: list[tuple[int, ...]] = []
    for row in prompt:
        if isinstance(row, str):
            try:
                row = tokenizer.encode(row)
            except NotEncodable as error:
                raise Refused(str(error), param="prompt") from None
        if not isinstance(row, list) or not row or not all(type(token) is int for token in row):
            raise Refused("a prompt is a text or a non-empty list of token ids", param="prompt")
        beyond = [token for token in row if not 0 <= token < vocabulary]
        if beyond:
            raise Refused(f"Token id {beyond[0]} is out of vocabulary", param="prompt")
        rows.append(tuple(row))
    return tuple(rows)


def _whole(
    fields: Mapping[str, Any], name: str, default: int | None, *, at_least: int, at_most: int | None = None
) -> int | None:
    value = fields.get(name)
    if value is None:
        return default
    if type(value) is not int or value < at_least or (at_most is not None and value > at_most):
        limit = f"at least {at_least}" if at_most is None else f"between {at_least} and {at_most}"
        raise Refused(f"{name} must be {limit}, got {value!r}.", param=name)
    return value


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name)
    if value not in (None, True, False) or isinstance(value, int) is not isinstance(value, bool):
        raise Refused(f"{name} must be true or false, got {value!r}.", param=name)
    return bool(value)


class AnswerText:
    """The text of one answer as it grows, and where each token began in it."""

    def __init__(self, tokenizer: Tokenizer, *, shows_token_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._shows_token_ids = shows_token_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def add(self, step: Step) -> str:
        """Return what a token adds to the text; bytes of an unfinished character are held back, at the end for good."""
        return self._decoder.decode(self._tokenizer.piece(step.token))

    def logprobs(self, steps: Sequence[Step]) -> dict[str, Any]:
        """Return the `logprobs` object of a choice for these steps."""
        shown: dict[str, Any] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for step in steps:
            if step.logprobs is None:
                continue
            texts = [(self._shown(ranked.token), _bounded(ranked.logprob)) for ranked in step.logprobs]
            shown["text_offset"].append(self._offset)
            shown["tokens"].append(texts[0][0])
            shown["token_logprobs"].append(texts[0][1])
            shown["top_logprobs"].append(dict(texts))
            self._offset += len(texts[0][0])
        return shown

    def _shown(self, token: int) -> str:
        return f"token_id:{token}" if self._shows_token_ids else self._tokenizer.decoded(token)


def prompt_logprobs(positions: Sequence[Position], tokenizer: Tokenizer) -> list[dict[str, Any] | None]:
    """Return the `prompt_logprobs` list of a choice: nothing for the first token, then one object per position."""
    return [
        None,
        *(
            {
                str(ranked.token): {
                    "logprob": _bounded(ranked.logprob),
                    "rank": ranked.rank,
                    "decoded_token": tokenizer.decoded(ranked.token),
                }
                for ranked in position
            }
            for position in positions
        ),
    ]


def to_json(document: Mapping[str, Any]) -> bytes:
    """Encode an answer.

    Raises: Refused with vLLM's message when a value is NaN, which JSON cannot carry.
    """
    try:
        return json.dumps(document, allow_nan=False, separators=(",", ":"), ensure_ascii=False).encode()
    except ValueError as error:
        raise Refused(f"Out of range float values are not JSON compliant: {error}") from None


def _bounded(logprob: float) -> float:
    return LOWEST_LOGPROB if logprob == -math.inf else logprob
