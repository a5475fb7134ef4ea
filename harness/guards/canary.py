"""Requests whose right answers are known: ask an engine and say which checkpoint answered.

The oracle is the logprobs of the prompt itself: under load they stay put where decoded text flips
(measured: reference runs of vLLM 0.32.0 on CPU, text differed in 12 of 48 answers, prompt logprobs in 0 of 40).
"""

from __future__ import annotations

import http.client
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from harness.errors import GoldenUnusable, HarnessError

TokenRows = tuple[tuple[int, ...], ...]
LogprobRows = tuple[tuple[float, ...], ...]


class Answer(StrEnum):
    """Which checkpoint an answer came from, by its prompt logprobs."""

    OLD = "old"
    NEW = "new"
    NEITHER = "neither"  # corrupt weights, or a mixture
    AMBIGUOUS = "ambiguous"  # within tolerance of both


@dataclass(frozen=True, slots=True, kw_only=True)
class Golden:
    """The right answers of one checkpoint on one engine build, from a cold start, and how far noise moves them."""

    weights_id: str
    engine: str
    build: str
    hardware: str
    flags: tuple[str, ...]
    prompts: TokenRows
    prompt_logprobs: LogprobRows  # per prompt: one value per token after the first
    greedy_tokens: TokenRows
    noise_max: float  # largest absolute difference seen under load
    noise_checks: int  # answers compared under load; 0 of N seen bounds nothing below 3/N
    tolerance: float

    def save(self, path: Path) -> None:
        """Write the golden as JSON, whole or not at all."""
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> Golden:
        """Read a golden.

        Raises: HarnessError when the file is not a golden.
        """
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            fields["flags"] = tuple(fields["flags"])
            for name in ("prompts", "prompt_logprobs", "greedy_tokens"):
                fields[name] = tuple(tuple(row) for row in fields[name])
            return cls(**fields)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise HarnessError(f'"{path}" is not a golden file: {error}') from error


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
        """Return how far apart the two checkpoints' own answers are."""
        return largest_difference(self.old.prompt_logprobs, self.new.prompt_logprobs)

    @property
    def are_alike(self) -> bool:
        """Say whether the two checkpoints cannot be told apart by these prompts."""
        return self.separation <= 3 * self.tolerance

    def compare(self, rows: LogprobRows) -> Comparison:
        """Say which checkpoint gave this answer; NaN and missing values are never right."""
        from_old = largest_difference(rows, self.old.prompt_logprobs)
        from_new = largest_difference(rows, self.new.prompt_logprobs)
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


def complete(endpoint: str, body: Mapping[str, Any], *, api_key: str | None, limit_s: float) -> dict[str, Any]:
    """Send one completions request without retries and return the decoded answer.

    Raises: OSError for transport faults, ValueError naming status and body for anything but a JSON 200.
    """
    parts = urlsplit(endpoint)
    connection_type = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = connection_type(parts.hostname or "", parts.port, timeout=limit_s)
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    try:
        connection.request("POST", f"{parts.path.rstrip('/')}/v1/completions", json.dumps(dict(body)), headers)
        response = connection.getresponse()
        text = response.read().decode("utf-8", "replace")
    except http.client.HTTPException as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
    finally:
        connection.close()
    if response.status != 200:
        raise ValueError(f"HTTP {response.status}: {text[:300]}")
    answer = json.loads(text)
    if not isinstance(answer, dict):
        raise ValueError(f"the answer is not a JSON object: {text[:300]}")
    return answer
