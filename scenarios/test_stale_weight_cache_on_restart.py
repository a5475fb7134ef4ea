"""A weight cache in shared memory, keyed by path, outlives the old checkpoint.

Must hold: with guards nobody is answered from the stale cache, and purging it is the remedy; without, the engine notices no
later than it was seen to before. A purge that races with the start (a `postStart` hook) does not help, one before it does.
Source: incident write-up, "failed to allocate memory for weight cache". Plain vLLM has no such cache: it comes here as a
load-format plug-in that works as the write-up describes. Same shapes: old weights in silence; other shapes: a crash.
"""

from __future__ import annotations

import pytest

from harness import Guard, Scenario, claims, faults, models
from harness.checkpoint.models import ModelSource
from harness.faults import Fault
from harness.judge.claim import Claim
from scenarios.defences import BITES, LOAD, contained, qualifying

GATED = (Guard.PREFLIGHT, Guard.CANARY_GATE)
PURGED_BEFORE_START = (*GATED, Guard.PURGE_CACHE)


def stale(
    name: str,
    *injected: Fault,
    guarded: tuple[Claim, ...],
    guards: tuple[Guard, ...] = GATED,
    new: ModelSource | None = None,
) -> Scenario:
    """Return the scenario of one stale cache."""
    return Scenario(
        name=name,
        old=models.tiny_llama(seed=1),
        new=models.tiny_llama(seed=2) if new is None else new,
        faults=injected,
        load=LOAD,
        unguarded=BITES,
        guarded=guarded,
        guards=guards,
    )


SAME_SHAPES = stale("stale_cache_of_same_shapes_on_restart", faults.stale_weight_cache(), guarded=contained("canary"))
OTHERS = (
    stale(
        "stale_cache_of_other_shapes_on_restart",
        faults.stale_weight_cache(),
        guarded=contained("canary"),
        new=models.tiny_llama(seed=2, intermediate=320),
    ),
    stale(
        "stale_cache_purged_too_late_on_restart",
        faults.stale_weight_cache(),
        faults.late_purge(),
        guarded=contained("canary"),
    ),
    stale(
        "stale_cache_purged_before_restart",
        faults.stale_weight_cache(),
        guarded=(*contained("harmless"), claims.only_weights_served("new", window="after")),
        guards=PURGED_BEFORE_START,
    ),
)


@pytest.mark.core
@pytest.mark.qualification
def test_nobody_is_served_from_a_stale_cache(run_scenario) -> None:
    run_scenario(SAME_SHAPES).require_held()


@pytest.mark.parametrize("scenario", qualifying(OTHERS, "stale_cache_purged_before_restart"))
def test_nobody_is_served_from_a_stale_cache_variant(run_scenario, scenario: Scenario) -> None:
    run_scenario(scenario).require_held()
