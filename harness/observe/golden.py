"""Make the known-good answers: a cold start on the undamaged checkpoint, and how far noise moves them under load."""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from random import Random

from harness.clock import Deadline
from harness.engine.engine import EngineIdentity, EngineStarter
from harness.engine.launch import Launch
from harness.errors import GoldenUnusable, HarnessError
from harness.guards.canary import (
    PASS_TOKENS_MAX,
    PROMPTS_PER_PASS,
    Golden,
    GoldenPair,
    LogprobRows,
    TokenRows,
    largest_difference,
    of_pass,
    pass_count,
)
from harness.guards.canary_pass import ask
from harness.guards.decoded import Decoded, Steps, decode, decoded_difference
from harness.guards.engine_api import EngineApi

PROMPT_COUNT = 8
PROMPT_TOKENS = (24, 28, PASS_TOKENS_MAX // PROMPTS_PER_PASS)  # of each attempt to tell two checkpoints apart
FIRST_ORDINARY_TOKEN = 3
NOISE_CHECKS = 40
NOISE_CHECKS_DECODED = 10
NOISE_STREAMS = 4
NOISE_FACTOR = 4.0  # the noise seen is a sample: allow more than its largest value
TOLERANCE_MIN = 1e-3  # JSON rounds, and 0 seen in N checks bounds nothing below 3/N
# A continuation is computed in batches of other sizes under load, and was asked ten times only.
TOLERANCE_MIN_DECODED = 0.02
# Mean absolute difference of an engine in bfloat16 to our forward pass in float32: 0.01 on the tiny model, 0.08 on SmolLM2-135M
# (largest single value 0.39); the mildest silent damage tried on the latter, another rope_theta, is 0.19.
FORWARD_MEAN_MAX = 0.15
# Where an engine is beyond that, our own pass rounded to bfloat16 says how far rounding alone moves this checkpoint: each layer
# rounds what it hands on, and deep or badly conditioned ones amplify it. An engine rounds elsewhere and so otherwise, but as much.
ROUNDING_FACTOR = 2.0
ROUNDING_MEAN_MAX = 0.5  # beyond it a right answer can no longer be told from a wrong one
ASK_LIMIT_S = 60.0
STREAMED_TOKENS = 8
DEEP_OUTPUT_TOKENS = 4
FORMAT = 2  # of what is measured; stored goldens of another are not taken

Forward = Callable[..., LogprobRows]  # of a checkpoint and prompts, and `rounded=True` for results rounded to bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenRequest:
    """Which checkpoint a golden is wanted for."""

    source: Path
    weights_id: str
    launch: Launch
    prompts: TokenRows
    vocabulary_size: int
    deep: tuple[int, ...] | None = None  # a long prompt, to be asked too


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What an engine answered, and how far noise moved it."""

    prompt_logprobs: LogprobRows
    noise_max: float
    noise_mean: float  # over all checks
    noise_checks: int
    streamed: Decoded
    deep: Decoded | None

    @property
    def tolerance(self) -> float:
        """Return how far a right answer may be from these."""
        return max(TOLERANCE_MIN, NOISE_FACTOR * self.noise_max)


def canary_prompts(vocabulary_size: int, *, seed: int, attempt: int = 0, count: int = PROMPT_COUNT) -> TokenRows:
    """Return the canary prompts as token ids; each attempt gives other and longer ones, the last the longest.

    No token comes twice before every ordinary one has come once, so that prompts read as many rows of the embedding as
    they can: `count` prompts of attempt 0 read 24 times as many.
    """
    random = Random(f"{seed}:canary:{attempt}")
    length = PROMPT_TOKENS[min(attempt, len(PROMPT_TOKENS) - 1)]
    tokens = _distinct_tokens(random, vocabulary_size, count * length)
    return tuple(tuple(tokens[first : first + length]) for first in range(0, count * length, length))


def deep_prompt(vocabulary_size: int, *, seed: int, length: int) -> tuple[int, ...]:
    """Return one long prompt as token ids."""
    return tuple(_distinct_tokens(Random(f"{seed}:deep"), vocabulary_size, length))


def _distinct_tokens(random: Random, vocabulary_size: int, count: int) -> list[int]:
    ordinary = range(FIRST_ORDINARY_TOKEN, vocabulary_size)
    tokens: list[int] = []
    while len(tokens) < count:
        tokens += random.sample(ordinary, len(ordinary))
    return tokens[:count]


def golden_key(identity: EngineIdentity, request: GoldenRequest) -> str:
    """Return the name under which a golden is kept: everything that may change an answer."""
    parts = [
        FORMAT,
        identity.name,
        identity.version,
        identity.build,
        identity.hardware,
        request.weights_id,
        request.launch.flags(),
        request.prompts,
        *(() if request.deep is None else (request.deep,)),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def measure_golden(
    starter: EngineStarter,
    request: GoldenRequest,
    *,
    api_key: str,
    seed: int,
    ready_limit_s: float,
    forward: Forward | None,
) -> Golden:
    """Start an engine cold on an undamaged checkpoint, ask it idle and under load, and stop it.

    `forward` is our own forward pass; an engine that disagrees with it must not bless itself.
    Raises: EngineNotReady; GoldenUnusable naming the difference and the limit.
    """
    identity = starter.identity()
    engine = starter.start(request.launch, incarnation=f"golden-{request.weights_id}")
    try:
        engine.wait_ready(ready_limit_s)
        answers = measure_answers(
            EngineApi(url=engine.endpoint, api_key=api_key, limit_s=ASK_LIMIT_S),
            request.launch.asked_model,
            request.prompts,
            vocabulary_size=request.vocabulary_size,
            seed=seed,
            deep=request.deep,
            under_load=not request.launch.serves_adapter,  # one sequence at a time: no batch that load could change
        )
    finally:
        engine.stop()
    who = f'{identity.label} on "{request.source}" (log: {engine.log_path})'
    require_agreement(answers, request.source, request.prompts, forward, who)
    return Golden(
        weights_id=request.weights_id,
        engine=identity.label,
        build=identity.build,
        hardware=identity.hardware,
        flags=request.launch.flags(),
        prompts=request.prompts,
        prompt_logprobs=answers.prompt_logprobs,
        noise_max=answers.noise_max,
        noise_checks=answers.noise_checks,
        tolerance=answers.tolerance,
        vocabulary_size=request.vocabulary_size,
        streamed=answers.streamed,
        deep=answers.deep,
    )


def require_agreement(
    answers: Answers, source: Path | None, prompts: TokenRows, forward: Forward | None, who: str
) -> None:
    """Check that an engine's answers are those of our own forward pass on the same weights, and stay so under load.

    Raises: GoldenUnusable naming the mean difference and the limit.
    """
    found = {"from itself once other requests are under way": answers.noise_mean}
    limit, because = ROUNDING_MEAN_MAX, ""
    if forward is not None and source is not None:
        computed = forward(source, prompts)
        own = {"from our own forward pass on the same weights": mean_difference(answers.prompt_logprobs, computed)}
        found, limit = own | found, FORWARD_MEAN_MAX
        if max(found.values()) > limit:
            rounding = mean_difference(forward(source, prompts, rounded=True), computed)
            limit = max(limit, min(ROUNDING_FACTOR * rounding, ROUNDING_MEAN_MAX))
            because = f"; rounding to bfloat16 alone makes {rounding:.3g}"
    for what, difference in found.items():
        if difference > limit:
            raise GoldenUnusable(
                f"{who} differs by {difference:.3g} on average {what} (limit {limit:.3g}{because}), so it cannot say what "
                "is right"
            )


def measure_answers(
    api: EngineApi,
    model: str,
    prompts: TokenRows,
    *,
    vocabulary_size: int,
    seed: int,
    deep: tuple[int, ...] | None = None,
    under_load: bool = True,
) -> Answers:
    """Ask an undamaged engine all prompts, then again and again to see how far noise moves the answers.

    With `under_load`, other requests of random lengths are in flight meanwhile; without, it is asked as it is.
    Raises: HarnessError when it gives no usable answer; GoldenUnusable when the other requests broke off.
    """
    try:
        idle = ask(api, model, prompts, rotation=None).rows
        if not idle:
            raise ValueError("the engine says that its logprobs are not finite")
        firsts = [decode(api, model, prompts[0], max_tokens=STREAMED_TOKENS)]
        if deep is not None:
            firsts.append(decode(api, model, deep, max_tokens=DEEP_OUTPUT_TOKENS))
        with _other_traffic(api, model, vocabulary_size, seed) if under_load else nullcontext():
            noise = [_noise(api, model, prompts, idle, number) for number in range(NOISE_CHECKS)]
            decoded = [
                _with_noise(api, model, prompt, first)
                for prompt, first in zip((prompts[0], deep or ()), firsts, strict=False)
            ]
    except (OSError, ValueError) as error:
        raise HarnessError(f"the undamaged checkpoint gave no usable answer: {error}") from error
    return Answers(
        prompt_logprobs=idle,
        noise_max=max(largest for largest, _ in noise),
        noise_mean=sum(mean for _, mean in noise) / NOISE_CHECKS,
        noise_checks=NOISE_CHECKS,
        streamed=decoded[0],
        deep=decoded[1] if deep is not None else None,
    )


def _noise(api: EngineApi, model: str, prompts: TokenRows, idle: LogprobRows, number: int) -> tuple[float, float]:
    """Ask one pass again and return by how much it differs: the largest value, and the mean."""
    rotation = number % pass_count(prompts)
    before, again = of_pass(idle, rotation), ask(api, model, prompts, rotation=rotation).rows
    return largest_difference(before, again), mean_difference(before, again)


def _with_noise(api: EngineApi, model: str, prompt: tuple[int, ...], first: Steps) -> Decoded:
    """Ask for the same continuation again and again.

    Raises: GoldenUnusable when even its length changes.
    """
    count = first.count
    again = [decode(api, model, prompt, max_tokens=count) for _ in range(NOISE_CHECKS_DECODED)]
    # With nothing certain yet, only lengths and values that are not finite are beyond measure.
    noise = max(
        decoded_difference(first.tokens, first.logprobs, first.margins, steps, tolerance=math.inf) for steps in again
    )
    if not math.isfinite(noise):
        raise GoldenUnusable(f"the continuation of a prompt of {len(prompt)} tokens came with other numbers of tokens")
    return Decoded(
        prompt=prompt,
        tokens=first.tokens,
        logprobs=first.logprobs,
        margins=first.margins,
        noise_max=noise,
        noise_checks=len(again),
        tolerance=max(TOLERANCE_MIN_DECODED, NOISE_FACTOR * noise),
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


@contextmanager
def _other_traffic(api: EngineApi, model: str, vocabulary_size: int, seed: int) -> Iterator[None]:
    """Keep other requests of random lengths in flight.

    Raises: GoldenUnusable at the end when they broke off, since noise without load would be none.
    """
    ended = threading.Event()
    deadline = Deadline.after(ASK_LIMIT_S * 4)
    answered: list[int] = []  # streams, one entry per answered request

    def go_on(stream: int) -> None:
        random = Random(f"{seed}:noise:{stream}")
        while not ended.is_set() and not deadline.is_expired():
            prompt = [random.randrange(FIRST_ORDINARY_TOKEN, vocabulary_size) for _ in range(random.randint(4, 48))]
            body = {
                "model": model,
                "prompt": prompt,
                "max_tokens": random.randint(4, 32),
                "temperature": 0,
                "ignore_eos": True,
            }
            try:
                api.complete(body)
            except (OSError, ValueError):
                return  # counted below: noise without load would be none
            answered.append(stream)

    streams = [threading.Thread(target=go_on, args=(number,), daemon=True) for number in range(NOISE_STREAMS)]
    for stream in streams:
        stream.start()
    try:
        yield
        is_alone = not all(stream.is_alive() for stream in streams)
    finally:
        ended.set()
        for stream in streams:
            stream.join(timeout=ASK_LIMIT_S)
    if is_alone or not answered:
        raise GoldenUnusable(
            f"noise could not be measured under load: {len(answered)} requests beside the checks were answered, and "
            f"{'not ' if is_alone else ''}all {NOISE_STREAMS} streams of them went on to the end"
        )
