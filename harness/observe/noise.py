"""What an engine answers, and how far noise moves its answers while other requests are under way."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from random import Random

from harness.clock import Deadline
from harness.errors import GoldenUnusable, HarnessError
from harness.guards.canary import LogprobRows, TokenRows, largest_difference, of_pass, pass_count
from harness.guards.canary_pass import ask
from harness.guards.decoded import Decoded, Steps, decode, decoded_difference
from harness.guards.engine_api import EngineApi
from harness.observe.canary_prompts import FIRST_ORDINARY_TOKEN

NOISE_CHECKS = 40
NOISE_CHECKS_DECODED = 10
NOISE_STREAMS = 4
NOISE_FACTOR = 4.0  # the noise seen is a sample: allow more than its largest value
TOLERANCE_MIN = 1e-3  # JSON rounds, and 0 seen in N checks bounds nothing below 3/N
# A continuation is computed in batches of other sizes under load, and was asked ten times only.
TOLERANCE_MIN_DECODED = 0.02
ASK_LIMIT_S = 60.0
STREAMED_TOKENS = 8
DEEP_OUTPUT_TOKENS = 4


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
