"""Make the known-good answers: a cold start on the undamaged checkpoint, and how far noise moves them under load."""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from harness.clock import Deadline
from harness.engine.engine import EngineIdentity, EngineStarter
from harness.engine.launch import SERVED_MODEL_NAME, Launch
from harness.errors import GoldenUnusable, HarnessError
from harness.guards.canary import (
    Golden,
    GoldenPair,
    LogprobRows,
    TokenRows,
    complete,
    largest_difference,
    prompt_logprobs_of,
    request_body,
)

PROMPT_COUNT = 2
PROMPT_TOKENS = 24
FIRST_ORDINARY_TOKEN = 3
NOISE_CHECKS = 40
NOISE_STREAMS = 4
NOISE_FACTOR = 4.0  # the noise seen is a sample: allow more than its largest value
TOLERANCE_MIN = 1e-3  # JSON rounds, and 0 seen in N checks bounds nothing below 3/N
# Mean absolute difference of bfloat16 arithmetic to ours in float32: 0.01 on the tiny model, 0.08 on SmolLM2-135M (largest
# single value 0.39); the mildest silent damage tried on the latter, another rope_theta, is 0.19.
FORWARD_MEAN_MAX = 0.15
ASK_LIMIT_S = 60.0
GREEDY_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenRequest:
    """Which checkpoint a golden is wanted for."""

    source: Path
    weights_id: str
    launch: Launch
    prompts: TokenRows
    vocabulary_size: int


def canary_prompts(vocabulary_size: int, *, seed: int, attempt: int = 0) -> TokenRows:
    """Return the canary prompts as token ids; each attempt gives other and longer ones."""
    random = Random(f"{seed}:canary:{attempt}")
    length = PROMPT_TOKENS * (attempt + 1)
    return tuple(
        tuple(random.randrange(FIRST_ORDINARY_TOKEN, vocabulary_size) for _ in range(length))
        for _ in range(PROMPT_COUNT)
    )


def golden_key(identity: EngineIdentity, request: GoldenRequest) -> str:
    """Return the name under which a golden is kept: everything that may change an answer."""
    parts = [
        identity.name,
        identity.version,
        identity.build,
        identity.hardware,
        request.weights_id,
        request.launch.flags(),
        request.prompts,
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def measure_golden(
    starter: EngineStarter,
    request: GoldenRequest,
    *,
    api_key: str,
    seed: int,
    ready_limit_s: float,
    forward: Callable[[Path, TokenRows], LogprobRows] | None,
) -> Golden:
    """Start an engine cold on an undamaged checkpoint, ask it idle and under load, and stop it.

    `forward` is our own forward pass; an engine that disagrees with it must not bless itself.
    Raises: EngineNotReady; GoldenUnusable naming the difference and the limit.
    """
    identity = starter.identity()
    engine = starter.start(request.launch, incarnation=f"golden-{request.weights_id}")
    try:
        engine.wait_ready(ready_limit_s)
        idle = _ask(engine.endpoint, request.prompts, api_key)
        greedy = _greedy(engine.endpoint, request.prompts, api_key)
        noise = _noise_under_load(engine.endpoint, request, idle, api_key, seed)
    finally:
        engine.stop()
    if forward is not None:
        difference = mean_difference(idle, forward(request.source, request.prompts))
        if difference > FORWARD_MEAN_MAX:
            raise GoldenUnusable(
                f'{identity.label} on "{request.source}" differs by {difference:.3g} on average from our own forward pass on the same '
                f"weights (limit {FORWARD_MEAN_MAX:g}), so it cannot say what is right; log: {engine.log_path}"
            )
    return Golden(
        weights_id=request.weights_id,
        engine=identity.label,
        build=identity.build,
        hardware=identity.hardware,
        flags=request.launch.flags(),
        prompts=request.prompts,
        prompt_logprobs=idle,
        greedy_tokens=greedy,
        noise_max=noise,
        noise_checks=NOISE_CHECKS,
        tolerance=max(TOLERANCE_MIN, NOISE_FACTOR * noise),
    )


def choose_pair(measure: Callable[[int], GoldenPair], *, attempts: int = 3) -> tuple[GoldenPair, tuple[str, ...]]:
    """Return the first pair of goldens whose prompts tell the checkpoints apart, and a warning per pair that did not.

    `measure` gives the pair for an attempt's prompts.
    Raises: GoldenUnusable when no prompts do.
    """
    warnings: list[str] = []
    for attempt in range(attempts):
        pair = measure(attempt)
        if pair.old.weights_id == pair.new.weights_id:
            raise GoldenUnusable(
                f"the old and the new checkpoint are the same ({pair.old.weights_id}): nothing can be told apart"
            )
        if not pair.are_alike:
            return pair, tuple(warnings)
        warnings.append(
            f"the answers of the old and the new checkpoint differ by {pair.separation:.3g} only (tolerance "
            f"{pair.tolerance:.3g}) on prompts of {len(pair.old.prompts[0])} tokens; other prompts are tried"
        )
    raise GoldenUnusable("; ".join(warnings))


def mean_difference(left: LogprobRows, right: LogprobRows) -> float:
    """Return the mean absolute difference; infinite when the layouts differ or a value is not finite."""
    if not math.isfinite(largest_difference(left, right)):
        return math.inf
    values = [abs(a - b) for row_a, row_b in zip(left, right, strict=True) for a, b in zip(row_a, row_b, strict=True)]
    return sum(values) / len(values)


def _ask(endpoint: str, prompts: TokenRows, api_key: str) -> LogprobRows:
    body = request_body(SERVED_MODEL_NAME, prompts)
    try:
        return prompt_logprobs_of(complete(endpoint, body, api_key=api_key, limit_s=ASK_LIMIT_S), prompts)
    except (OSError, ValueError) as error:
        raise HarnessError(f"the undamaged checkpoint gave no usable answer: {error}") from error


def _greedy(endpoint: str, prompts: TokenRows, api_key: str) -> TokenRows:
    body = {
        "model": SERVED_MODEL_NAME,
        "prompt": [list(prompt) for prompt in prompts],
        "max_tokens": GREEDY_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    try:
        choices = complete(endpoint, body, api_key=api_key, limit_s=ASK_LIMIT_S)["choices"]
        ordered = sorted(choices, key=lambda choice: choice["index"])
        return tuple(tuple(int(token) for token in choice["token_ids"]) for choice in ordered)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HarnessError(f"the undamaged checkpoint gave no usable greedy answer: {error}") from error


def _noise_under_load(endpoint: str, request: GoldenRequest, idle: LogprobRows, api_key: str, seed: int) -> float:
    """Return the largest difference to the idle answer while other requests of random lengths are in flight."""
    ended = threading.Event()
    deadline = Deadline.after(ASK_LIMIT_S * 2)
    answered: list[int] = []  # streams, one entry per answered request

    def other_traffic(stream: int) -> None:
        random = Random(f"{seed}:noise:{stream}")
        while not ended.is_set() and not deadline.is_expired():
            prompt = [
                random.randrange(FIRST_ORDINARY_TOKEN, request.vocabulary_size) for _ in range(random.randint(4, 48))
            ]
            body = {
                "model": SERVED_MODEL_NAME,
                "prompt": prompt,
                "max_tokens": random.randint(4, 32),
                "temperature": 0,
                "ignore_eos": True,
            }
            try:
                complete(endpoint, body, api_key=api_key, limit_s=ASK_LIMIT_S)
            except (OSError, ValueError):
                return  # counted below: noise without load would be none
            answered.append(stream)

    streams = [threading.Thread(target=other_traffic, args=(number,), daemon=True) for number in range(NOISE_STREAMS)]
    for stream in streams:
        stream.start()
    try:
        noise = max(largest_difference(idle, _ask(endpoint, request.prompts, api_key)) for _ in range(NOISE_CHECKS))
        is_alone = not all(stream.is_alive() for stream in streams)
    finally:
        ended.set()
        for stream in streams:
            stream.join(timeout=ASK_LIMIT_S)
    if is_alone or not answered:
        raise GoldenUnusable(
            f"noise could not be measured under load: {len(answered)} requests beside the {NOISE_CHECKS} checks were "
            f"answered, and {'not ' if is_alone else ''}all {NOISE_STREAMS} streams of them went on to the end"
        )
    return noise
