"""How many loaders a load gets, and whether so many can keep it: decided before anything starts."""

from __future__ import annotations

import math

from harness.errors import ScenarioInvalid
from harness.load.arrivals import BUSY_S, busiest_per_s, even_times
from harness.load.capacity import Capacity
from harness.load.plan import CANARY_TOKENS, LoadPlan, planned_times
from harness.load.shape import LoadShape


def choose_loaders(plan: LoadPlan, *, cores: int, capacity: Capacity) -> int:
    """Return how many loaders a plan gets: what its shape says, or as many as it needs and there are cores for.

    Raises: ScenarioInvalid when so many cannot keep it.
    """
    return _loaders(plan.shape, *plan.busiest_per_s(), cores=cores, capacity=capacity)


def require_keepable(shape: LoadShape, *, seed: int, horizon_s: float, cores: int, capacity: Capacity) -> None:
    """Return if the load of a plan not made yet can be kept.

    Raises: ScenarioInvalid when nothing would arrive, or more than the loaders can do.
    """
    times = planned_times(shape, seed=seed, horizon_s=horizon_s)
    tokens = [row.output_tokens or shape.output_tokens for row in shape.trace] or [shape.output_tokens] * len(times)
    canaries = [(at_s, CANARY_TOKENS) for at_s in even_times(shape.canary_rate_rps, horizon_s)]
    busiest = busiest_per_s([*zip(times, tokens, strict=False), *canaries])
    _loaders(shape, *busiest, cores=cores, capacity=capacity)


def _loaders(shape: LoadShape, requests_per_s: float, events_per_s: float, *, cores: int, capacity: Capacity) -> int:
    needed = math.ceil(max(requests_per_s / capacity.requests_per_s, events_per_s / capacity.events_per_s))
    loaders = shape.loaders or min(max(needed, 1), max(cores, 1))
    if needed > loaders:
        raise ScenarioInvalid(
            f"the plan cannot be kept: rate_rps = {shape.rate_rps:g} means {requests_per_s:,.0f} requests and "
            f"{events_per_s:,.0f} events per second in its busiest {BUSY_S:g} s; {loaders} loader(s) on {cores} core(s) take "
            f"{loaders * capacity.requests_per_s:,.0f} and {loaders * capacity.events_per_s:,.0f} ({capacity.because})"
        )
    return loaders
