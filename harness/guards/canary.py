"""Requests whose right answers are known: ask an engine and say which checkpoint answered.

The oracle is the logprobs of the prompt itself: under load they stay put where decoded text flips
(measured: reference runs of vLLM 0.32.0 on CPU, text differed in 12 of 48 answers, prompt logprobs in 0 of 40).
A golden may know many prompts; one pass asks two of them, so that it stays cheap and passes cover all in turn.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from harness.errors import GoldenUnusable, HarnessError
from harness.guards.decoded import Decoded
from harness.guards.engine_api import EngineApi

TokenRows = tuple[tuple[int, ...], ...]
LogprobRows = tuple[tuple[float, ...], ...]

PROMPTS_PER_PASS = 2
PASS_TOKENS_MAX = 64  # of prompts; goldens are made so that no pass asks more
UNKNOWN = "unknown"


class Answer(StrEnum):
    """Which checkpoint an answer came from, by its prompt logprobs."""

    OLD = "old"
    NEW = "new"
    NEITHER = "neither"  # corrupt weights, or a mixture
    AMBIGUOUS = "ambiguous"  # within tolerance of both


@dataclass(frozen=True, slots=True, kw_only=True)
class Golden:
    """The right answers of one checkpoint on one engine build, and how far noise moves them."""

    weights_id: str
    engine: str
    build: str
    hardware: str
    flags: tuple[str, ...]
    prompts: TokenRows
    prompt_logprobs: LogprobRows  # per prompt: one value per token after the first
    noise_max: float  # largest absolute difference seen under load
    noise_checks: int  # passes compared under load; 0 of N seen bounds nothing below 3/N
    tolerance: float
    source: str = "a cold start"
    vocabulary_size: int | None = None
    streamed: Decoded | None = None  # a short prompt, to be asked as a stream
    deep: Decoded | None = None  # a prompt longer than a block of the KV cache

    @property
    def passes(self) -> int:
        """Return how many passes ask every prompt once."""
        return pass_count(self.prompts)

    def save(self, path: Path) -> None:
        """Write the golden as JSON, whole or not at all."""
        partial = path.with_name(f"{path.name}.partial")
        partial.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> Golden:
        """Read a golden.

        Raises: HarnessError when the file is not a golden.
        """
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            if "greedy_tokens" in fields:
                raise ValueError("an older release made it; make it anew with `harness golden`")
            fields["flags"] = tuple(fields["flags"])
            for name in ("prompts", "prompt_logprobs"):
                fields[name] = tuple(tuple(row) for row in fields[name])
            for name in ("streamed", "deep"):
                if fields.get(name) is not None:
                    fields[name] = Decoded.from_json(fields[name])
            golden = cls(**fields)
            _check(golden)
            return golden
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise HarnessError(f'"{path}" is not a golden file: {error}') from error


def _check(golden: Golden) -> None:
    """Check what a comparison relies on: a tolerance that refuses something, and a value for every prompt token."""
    if not 0 < golden.tolerance < math.inf:
        raise ValueError(f"its tolerance is {golden.tolerance!r}, expected a number above zero")
    lengths = [(len(prompt) - 1, len(row)) for prompt, row in zip(golden.prompts, golden.prompt_logprobs, strict=True)]
    if not lengths or any(wanted != found or wanted < 1 for wanted, found in lengths):
        raise ValueError("its prompts and their logprobs do not fit together")
    if not all(type(token) is int for prompt in golden.prompts for token in prompt):
        raise ValueError("its prompts are not token ids")
    if not all(math.isfinite(value) for row in golden.prompt_logprobs for value in row):
        raise ValueError("its logprobs are not finite")


def pass_count(prompts: Sequence[Any]) -> int:
    """Return how many passes ask every prompt once."""
    return -(-len(prompts) // PROMPTS_PER_PASS)


def of_pass(rows: tuple[Any, ...], rotation: int | None) -> tuple[Any, ...]:
    """Return the prompts, or the answers to them, of one pass; passes repeat in turn. None: of all passes."""
    if rotation is None:
        return rows
    first = rotation % pass_count(rows) * PROMPTS_PER_PASS
    return rows[first : first + PROMPTS_PER_PASS]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What one canary answer is, and how far it is from each golden (largest absolute difference)."""

    answer: Answer
    difference_old: float
    difference_new: float


@dataclass(frozen=True, slots=True)
class GoldenPair:
    """The goldens of the old and the new checkpoint for the same prompts."""

    old: Golden
    new: Golden

    def __post_init__(self) -> None:
        if self.old.prompts != self.new.prompts:
            raise GoldenUnusable("the goldens of the old and the new checkpoint were made with different prompts")

    @property
    def tolerance(self) -> float:
        """Return the larger of the two measured tolerances."""
        return max(self.old.tolerance, self.new.tolerance)

    @property
    def separation(self) -> float:
        """Return how far apart the two checkpoints' own answers are in the pass that tells them apart least."""
        return min(
            largest_difference(of_pass(self.old.prompt_logprobs, rotation), of_pass(self.new.prompt_logprobs, rotation))
            for rotation in range(self.old.passes)
        )

    @property
    def are_alike(self) -> bool:
        """Say whether the two checkpoints cannot be told apart by some pass."""
        return self.separation <= 3 * self.tolerance

    def compare(self, rows: LogprobRows, rotation: int | None = None) -> Comparison:
        """Say which checkpoint gave this answer to the prompts of a pass, or to all; NaN and missing values are never right."""
        from_old = largest_difference(rows, of_pass(self.old.prompt_logprobs, rotation))
        from_new = largest_difference(rows, of_pass(self.new.prompt_logprobs, rotation))
        is_old, is_new = from_old <= self.tolerance, from_new <= self.tolerance
        if is_old and is_new:
            answer = Answer.AMBIGUOUS
        elif is_old:
            answer = Answer.OLD
        elif is_new:
            answer = Answer.NEW
        else:
            answer = Answer.NEITHER
        return Comparison(answer, from_old, from_new)


def largest_difference(left: LogprobRows, right: LogprobRows) -> float:
    """Return the largest absolute difference; infinite when the layouts differ or a value is not finite."""
    if [len(row) for row in left] != [len(row) for row in right]:
        return math.inf
    pairs = [(a, b) for row_a, row_b in zip(left, right, strict=True) for a, b in zip(row_a, row_b, strict=True)]
    if not pairs or not all(math.isfinite(a) and math.isfinite(b) for a, b in pairs):
        return math.inf
    return max(abs(a - b) for a, b in pairs)


def request_body(model: str, prompts: Sequence[Sequence[int]], *, max_tokens: int = 1) -> dict[str, Any]:
    """Return the completions request of one canary: all prompts as token ids in one request."""
    return {
        "model": model,
        "prompt": [list(prompt) for prompt in prompts],
        "max_tokens": max_tokens,
        "temperature": 0,
        "prompt_logprobs": 0,
        "logprobs": 0,
        "ignore_eos": True,
    }


def prompt_logprobs_of(response: Mapping[str, Any], prompts: Sequence[Sequence[int]]) -> LogprobRows:
    """Read the logprob of every prompt token after the first from a completions response.

    Raises: ValueError when the server left them out or answered other prompts.
    """
    try:
        choices = sorted(response["choices"], key=lambda choice: choice["index"])
        rows = []
        for prompt, choice in zip(prompts, choices, strict=True):
            positions = choice["prompt_logprobs"][1:]
            pairs = zip(prompt[1:], positions, strict=True)
            rows.append(tuple(float(position[str(token)]["logprob"]) for token, position in pairs))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"the answer has no prompt logprobs for these prompts: {type(error).__name__}: {error}"
        ) from error
    return tuple(rows)


def echo_body(model: str, prompts: Sequence[Sequence[int]], *, max_tokens: int = 1) -> dict[str, Any]:
    """Return the same request in OpenAI's older words, for servers that know no `prompt_logprobs`."""
    body = request_body(model, prompts, max_tokens=max_tokens)
    del body["prompt_logprobs"]
    return {**body, "echo": True, "logprobs": 1}


def echo_logprobs_of(response: Mapping[str, Any], prompts: Sequence[Sequence[int]]) -> LogprobRows:
    """Read the logprob of every prompt token after the first from the answer to an `echo_body`.

    Raises: ValueError when the server did not echo these prompts with logprobs.
    """
    try:
        choices = sorted(response["choices"], key=lambda choice: choice["index"])
        rows = []
        for prompt, choice in zip(prompts, choices, strict=True):
            values = choice["logprobs"]["token_logprobs"]
            if len(values) < len(prompt) or values[0] is not None:
                raise ValueError(f"{len(values)} logprobs for a prompt of {len(prompt)} tokens")
            rows.append(tuple(float(value) for value in values[1 : len(prompt)]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"the answer echoes no logprobs of these prompts: {type(error).__name__}: {error}") from error
    return tuple(rows)


def complete(endpoint: str, body: Mapping[str, Any], *, api_key: str | None, limit_s: float) -> dict[str, Any]:
    """Send one completions request without retries and return the decoded answer.

    Raises: OSError for transport faults, ValueError naming status and body for anything but a JSON 200.
    """
    return EngineApi(url=endpoint, api_key=api_key, limit_s=limit_s).complete(body)
