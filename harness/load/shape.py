"""What kind of load a scenario wants: when requests arrive, how long they are, what each may take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TypedDict, Unpack

from harness.errors import ScenarioInvalid
from harness.load.recorded import TraceRow, read_trace

NONCE_TOKENS = 4  # every load prompt begins with a number of its own, so no prefix cache helps unless it is asked for
PROCESSES = ("poisson", "gamma", "constant", "trace")
RATE_RPS_MAX = 100_000.0
BURSTINESS_MIN, BURSTINESS_MAX = 0.01, 1000.0

Profile = tuple[tuple[float, float], ...]  # (seconds from the start, share of the rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """How long each part of a request may take before it counts as failed."""

    connect_s: float = 2.0
    first_token_s: float = 20.0  # from the send
    gap_s: float = 10.0  # between tokens
    total_s: float = 30.0  # from the start of the connection

    def __post_init__(self) -> None:
        for name in ("connect_s", "first_token_s", "gap_s", "total_s"):
            require_positive(f"limits.{name}", getattr(self, name), unit="s")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadShape:
    """What kind of load a scenario wants.

    Raises: ScenarioInvalid naming the value that cannot be used.
    """

    rate_rps: float  # of a ramp its highest, of a spike the one around it, of a trace its mean
    process: str = "poisson"
    burstiness: float = 1.0  # of gamma arrivals: 1 is Poisson, less is burstier, more is more even
    profile: Profile = ()  # the rate as a share of `rate_rps`, linear between the points
    trace: tuple[TraceRow, ...] = ()
    canary_ratio: float = 0.25  # canaries come on top: `rate_rps * canary_ratio` of them per second
    tail_s: float = 5.0  # how long the load goes on after the last step
    output_tokens: int = 16
    prompt_tokens: int = 24
    limits: RequestLimits = field(default_factory=RequestLimits)
    in_flight_max: int | None = None  # None: 1.2 times what can be under way when every request takes its whole limit
    late_s: float = 2.0  # an arrival that the loader takes up later than this is recorded as late and not sent
    keep_alive_ratio: float = 0.0  # share of the requests sent on connections that are kept alive
    shared_tokens: int = 0  # how many tokens at its beginning a prompt shares with others: what a prefix cache keeps
    shared_prompts: int = 1  # how many such beginnings there are; requests take them in turn
    loaders: int | None = None  # None: as many as the planned events need and the cores allow

    def __post_init__(self) -> None:
        require_positive("rate_rps", self.rate_rps, unit="requests/s")
        if self.rate_rps > RATE_RPS_MAX:
            raise ScenarioInvalid(f"rate_rps is {self.rate_rps!r}: it must be at most {RATE_RPS_MAX:,.0f} requests/s")
        if self.process not in PROCESSES:
            raise ScenarioInvalid(f'process is "{self.process}": it must be one of {", ".join(PROCESSES)}')
        if not BURSTINESS_MIN <= self.burstiness <= BURSTINESS_MAX:
            raise ScenarioInvalid(
                f"burstiness is {self.burstiness!r}: it must be from {BURSTINESS_MIN:g} to {BURSTINESS_MAX:g}"
            )
        if (self.process == "trace") != bool(self.trace):
            raise ScenarioInvalid(f'process is "{self.process}" with {len(self.trace)} rows of a trace')
        if self.trace and self.profile:
            raise ScenarioInvalid("a trace has its own times and takes no profile")
        _require_profile(self.profile)
        require_at_least("canary_ratio", self.canary_ratio, 0)
        require_at_least("tail_s", self.tail_s, 0)
        require_at_least("output_tokens", self.output_tokens, 1)
        require_at_least("shared_tokens", self.shared_tokens, 0)
        require_at_least("shared_prompts", self.shared_prompts, 1)
        require_at_least("prompt_tokens", self.prompt_tokens, self.shared_tokens + NONCE_TOKENS)
        require_positive("late_s", self.late_s, unit="s")
        require_at_least("keep_alive_ratio", self.keep_alive_ratio, 0)
        if self.keep_alive_ratio > 1:
            raise ScenarioInvalid(f"keep_alive_ratio is {self.keep_alive_ratio!r}: it must be at most 1")
        for name in ("in_flight_max", "loaders"):
            if getattr(self, name) is not None:
                require_at_least(name, getattr(self, name), 1)

    @property
    def canary_rate_rps(self) -> float:
        """Return the canaries per second."""
        return self.rate_rps * self.canary_ratio

    @property
    def peak_rps(self) -> float:
        """Return the highest rate of the profile; a trace is taken at its mean."""
        return self.rate_rps * max((share for _, share in self.profile), default=1.0)

    @property
    def in_flight_limit(self) -> int:
        """Return how many requests may be under way; an arrival beyond it is recorded as dropped, never delayed."""
        if self.in_flight_max is not None:
            return self.in_flight_max
        return max(8, math.ceil(1.2 * (self.peak_rps + self.canary_rate_rps) * self.limits.total_s))

    def at_rate(self, rate_rps: float) -> LoadShape:
        """Return the same load at another rate, with its times changed so that as many requests fit."""
        stretch = self.rate_rps / rate_rps
        return replace(
            self,
            rate_rps=rate_rps,
            tail_s=self.tail_s * stretch,
            profile=tuple((at_s * stretch, share) for at_s, share in self.profile),
            trace=tuple(replace(row, at_s=row.at_s * stretch) for row in self.trace),
        )


class ShapeOptions(TypedDict, total=False):
    """What every kind of load can be told besides its arrivals; see `LoadShape`."""

    canary_ratio: float
    tail_s: float
    output_tokens: int
    prompt_tokens: int
    limits: RequestLimits
    in_flight_max: int | None
    late_s: float
    keep_alive_ratio: float
    shared_tokens: int
    shared_prompts: int
    loaders: int | None


def steady(*, rate_rps: float, **options: Unpack[ShapeOptions]) -> LoadShape:
    """Return a load with Poisson arrivals at a constant rate and an evenly spaced stream of canaries."""
    return LoadShape(rate_rps=rate_rps, **options)


def poisson(*, rate_rps: float, **options: Unpack[ShapeOptions]) -> LoadShape:
    """Return the same as `steady`, by the name of its process."""
    return LoadShape(rate_rps=rate_rps, **options)


def constant(*, rate_rps: float, **options: Unpack[ShapeOptions]) -> LoadShape:
    """Return a load whose requests arrive at equal distances."""
    return LoadShape(rate_rps=rate_rps, process="constant", **options)


def gamma(*, rate_rps: float, burstiness: float, **options: Unpack[ShapeOptions]) -> LoadShape:
    """Return a load whose gaps are gamma distributed with shape `burstiness`: 1 is Poisson, less comes in bursts."""
    return LoadShape(rate_rps=rate_rps, process="gamma", burstiness=burstiness, **options)


def ramp(points: Sequence[tuple[float, float]], **options: Unpack[ShapeOptions]) -> LoadShape:
    """Return Poisson arrivals at a rate that is linear between `points` of (seconds from the start, requests/s).

    Before the first point and after the last the rate is theirs. Two points at the same time make a step.
    Raises: ScenarioInvalid when their times decrease, or no rate is above zero.
    """
    rates = [rate_rps for _, rate_rps in points]
    for number, rate_rps in enumerate(rates):
        require_at_least(f"points[{number}] rate", rate_rps, 0)
    highest_rps = max(rates, default=0.0)
    if highest_rps <= 0:
        raise ScenarioInvalid(f"zero arrivals: no point of the ramp {tuple(points)} has a rate above zero")
    profile = tuple((at_s, rate_rps / highest_rps) for at_s, rate_rps in points)
    return LoadShape(rate_rps=highest_rps, profile=profile, **options)


def spike(*, rate_rps: float, peak_rps: float, at_s: float, for_s: float, **options: Unpack[ShapeOptions]) -> LoadShape:
    """Return Poisson arrivals at `rate_rps`, but at `peak_rps` from `at_s` for `for_s` seconds."""
    require_positive("rate_rps", rate_rps, unit="requests/s")
    require_positive("peak_rps", peak_rps, unit="requests/s")
    require_at_least("at_s", at_s, 0)
    require_positive("for_s", for_s, unit="s")
    share, end_s = peak_rps / rate_rps, at_s + for_s
    profile = ((at_s, 1.0), (at_s, share), (end_s, share), (end_s, 1.0))
    return LoadShape(rate_rps=rate_rps, profile=profile, **options)


def trace(path: Path | str, **options: Unpack[ShapeOptions]) -> LoadShape:
    """Return a load that arrives when a recorded one did, with its prompt and output lengths where it has them.

    Source of the rows: see `read_trace`. After the last row no request comes, only canaries.
    Raises: ScenarioInvalid naming the line that cannot be used.
    """
    rows = read_trace(Path(path))
    span_s = rows[-1].at_s - rows[0].at_s
    rate_rps = (len(rows) - 1) / span_s if span_s > 0 else float(len(rows))
    return LoadShape(rate_rps=rate_rps, process="trace", trace=rows, **options)


def require_positive(name: str, value: float, *, unit: str) -> None:
    """Return if a value is a number above zero.

    Raises: ScenarioInvalid naming it.
    """
    if not (math.isfinite(value) and value > 0):
        raise ScenarioInvalid(f"{name} is {value!r}: it must be a number of {unit} above zero")


def require_at_least(name: str, value: float, smallest: int) -> None:
    """Return if a value is a number of at least `smallest`.

    Raises: ScenarioInvalid naming it.
    """
    if not (math.isfinite(value) and value >= smallest):
        raise ScenarioInvalid(f"{name} is {value!r}: it must be at least {smallest}")


def _require_profile(profile: Profile) -> None:
    for at_s, share in profile:
        require_at_least("profile time", at_s, 0)
        require_at_least("profile share", share, 0)
    for (before_s, _), (after_s, _) in pairwise(profile):
        if after_s < before_s:
            raise ScenarioInvalid(f"profile times decrease: {after_s:g} s comes after {before_s:g} s")
    if profile and not any(share > 0 for _, share in profile):
        raise ScenarioInvalid("zero arrivals: the profile is zero throughout")
