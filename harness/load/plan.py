"""The arrivals of a run, decided before it starts: the same seed gives the same plan, byte for byte.

Arrivals are open-loop: their times never depend on how fast the engine answers.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from harness.clock import NS_PER_S
from harness.errors import HarnessError, ScenarioInvalid

FIRST_ORDINARY_TOKEN = 3  # ids below are padding, begin and end in the Llama family
NONCE_TOKENS = 4  # every load prompt begins with a number of its own, so a prefix cache never helps
CANARY_TOKENS = 1  # a canary is judged by the logprobs of its prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """How long each part of a request may take before it counts as failed."""

    connect_s: float = 2.0
    first_token_s: float = 20.0  # from the send
    gap_s: float = 10.0  # between tokens
    total_s: float = 30.0  # from the start of the connection

    def __post_init__(self) -> None:
        for name in ("connect_s", "first_token_s", "gap_s", "total_s"):
            _require_positive(f"limits.{name}", getattr(self, name), unit="s")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadShape:
    """What kind of load a scenario wants.

    Raises: ScenarioInvalid naming the value that cannot be used.
    """

    rate_rps: float
    canary_ratio: float = 0.25  # canaries come on top: `rate_rps * canary_ratio` of them per second
    tail_s: float = 5.0  # how long the load goes on after the last step
    output_tokens: int = 16
    prompt_tokens: int = 24
    limits: RequestLimits = field(default_factory=RequestLimits)
    in_flight_max: int | None = None  # None: 1.2 times what can be under way when every request takes its whole limit

    def __post_init__(self) -> None:
        _require_positive("rate_rps", self.rate_rps, unit="requests/s")
        _require_at_least("canary_ratio", self.canary_ratio, 0)
        _require_at_least("tail_s", self.tail_s, 0)
        _require_at_least("output_tokens", self.output_tokens, 1)
        _require_at_least("prompt_tokens", self.prompt_tokens, NONCE_TOKENS)
        if self.in_flight_max is not None:
            _require_at_least("in_flight_max", self.in_flight_max, 1)

    @property
    def canary_rate_rps(self) -> float:
        """Return the canaries per second."""
        return self.rate_rps * self.canary_ratio

    @property
    def in_flight_limit(self) -> int:
        """Return how many requests may be under way; an arrival beyond it is recorded as dropped, never delayed."""
        if self.in_flight_max is not None:
            return self.in_flight_max
        return max(8, math.ceil(1.2 * (self.rate_rps + self.canary_rate_rps) * self.limits.total_s))


def steady(
    *,
    rate_rps: float,
    canary_ratio: float = 0.25,
    tail_s: float = 5.0,
    output_tokens: int = 16,
    prompt_tokens: int = 24,
    limits: RequestLimits | None = None,
    in_flight_max: int | None = None,
) -> LoadShape:
    """Return a load with Poisson arrivals at a constant rate and an evenly spaced stream of canaries."""
    return LoadShape(
        rate_rps=rate_rps,
        canary_ratio=canary_ratio,
        tail_s=tail_s,
        output_tokens=output_tokens,
        prompt_tokens=prompt_tokens,
        limits=limits or RequestLimits(),
        in_flight_max=in_flight_max,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One planned request; `at_s` counts from the common start. A canary asks all canary prompts and has none here."""

    id: str
    kind: str  # "load" or "canary"
    at_s: float
    prompt: tuple[int, ...]
    max_tokens: int

    def planned_ns(self, start_ns: int) -> int:
        """Return when this request is due on the monotonic clock."""
        return start_ns + round(self.at_s * NS_PER_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """Every arrival of a run in order of time; `sha256` names the plan's whole content."""

    seed: int
    shape: LoadShape
    arrivals: tuple[Arrival, ...]
    canary_prompts: tuple[tuple[int, ...], ...]
    sha256: str

    def due(self, start_ns: int, until_ns: int) -> int:
        """Return how many arrivals are planned up to and including `until_ns`."""
        return sum(arrival.planned_ns(start_ns) <= until_ns for arrival in self.arrivals)

    def save(self, path: Path) -> None:
        """Write the plan as JSON, whole or not at all."""
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self), separators=(",", ":")) + "\n", encoding="utf-8")
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> LoadPlan:
        """Read a saved plan.

        Raises: HarnessError when the file is not a plan, or was changed after it was made.
        """
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            shape = dict(fields["shape"])
            shape["limits"] = RequestLimits(**shape["limits"])
            plan = cls(
                seed=fields["seed"],
                shape=LoadShape(**shape),
                arrivals=tuple(
                    Arrival(**{**arrival, "prompt": tuple(arrival["prompt"])}) for arrival in fields["arrivals"]
                ),
                canary_prompts=tuple(tuple(prompt) for prompt in fields["canary_prompts"]),
                sha256=fields["sha256"],
            )
        except (OSError, ValueError, KeyError, TypeError, ScenarioInvalid) as error:
            raise HarnessError(f'"{path}" is not a load plan: {type(error).__name__}: {error}') from error
        seen = _digest(asdict(plan))
        if seen != plan.sha256:
            raise HarnessError(f'load plan "{path}" was changed: its content has digest {seen}, it says {plan.sha256}')
        return plan


def make_plan(
    shape: LoadShape,
    *,
    seed: int,
    horizon_s: float,
    vocabulary_size: int,
    canary_prompts: Sequence[Sequence[int]],
) -> LoadPlan:
    """Plan the arrivals of the next `horizon_s` seconds.

    Raises: ScenarioInvalid when nothing would arrive, or the prompts cannot be made.
    """
    _require_positive("horizon_s", horizon_s, unit="s")
    prompts = tuple(tuple(prompt) for prompt in canary_prompts)
    if shape.canary_ratio > 0 and not prompts:
        raise ScenarioInvalid(f"canary_ratio is {shape.canary_ratio:g}, but there are no canary prompts to send")
    random = Random(f"{seed}:load")
    times = tuple(_poisson_times(random, shape.rate_rps, horizon_s))
    load = [
        Arrival(id=f"load-{number}", kind="load", at_s=at_s, prompt=prompt, max_tokens=shape.output_tokens)
        for number, (at_s, prompt) in enumerate(
            zip(times, _prompts(random, len(times), shape.prompt_tokens, vocabulary_size), strict=True)
        )
    ]
    canaries = [
        Arrival(id=f"canary-{number}", kind="canary", at_s=at_s, prompt=(), max_tokens=CANARY_TOKENS)
        for number, at_s in enumerate(_even_times(shape.canary_rate_rps, horizon_s))
    ]
    arrivals = tuple(sorted(load + canaries, key=lambda arrival: (arrival.at_s, arrival.id)))
    if not load:
        raise ScenarioInvalid(
            f"no request arrives within horizon_s = {horizon_s:g} s at rate_rps = {shape.rate_rps:g} (seed {seed})"
        )
    plan = LoadPlan(seed=seed, shape=shape, arrivals=arrivals, canary_prompts=prompts, sha256="")
    return LoadPlan(seed=seed, shape=shape, arrivals=arrivals, canary_prompts=prompts, sha256=_digest(asdict(plan)))


def _poisson_times(random: Random, rate_rps: float, horizon_s: float) -> Iterator[float]:
    at_s = random.expovariate(rate_rps)
    while at_s < horizon_s:
        # Whole microseconds, so that the last bit of another platform's logarithm does not change the plan.
        yield round(at_s, 6)
        at_s += random.expovariate(rate_rps)


def _even_times(rate_rps: float, horizon_s: float) -> Iterator[float]:
    if rate_rps > 0:
        for number in range(math.ceil(horizon_s * rate_rps)):
            yield round(number / rate_rps, 6)


def _prompts(random: Random, count: int, length: int, vocabulary_size: int) -> Iterator[tuple[int, ...]]:
    """Yield prompts of which no two begin with the same `NONCE_TOKENS` tokens."""
    base = vocabulary_size - FIRST_ORDINARY_TOKEN
    if base < 2 or base**NONCE_TOKENS < count:
        raise ScenarioInvalid(
            f"vocabulary_size is {vocabulary_size}: too small to give each of {count} prompts a beginning of its own"
        )
    nonce = random.randrange(base**NONCE_TOKENS)
    for _ in range(count):
        nonce = (nonce + 1) % base**NONCE_TOKENS
        digits = [nonce // base**place % base for place in range(NONCE_TOKENS)]
        body = [random.randrange(base) for _ in range(length - NONCE_TOKENS)]
        yield tuple(FIRST_ORDINARY_TOKEN + token for token in digits + body)


def _digest(fields: Mapping[str, Any]) -> str:
    content = {key: value for key, value in fields.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _require_positive(name: str, value: float, *, unit: str) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ScenarioInvalid(f"{name} is {value!r}: it must be a number of {unit} above zero")


def _require_at_least(name: str, value: float, smallest: int) -> None:
    if not (math.isfinite(value) and value >= smallest):
        raise ScenarioInvalid(f"{name} is {value!r}: it must be at least {smallest}")
