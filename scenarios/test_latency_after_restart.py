"""A new engine answers rightly and is slow at first: nothing that a canary could see is wrong.

Must hold: users who are moved to an engine that somebody asked first do not wait; in any case latency comes back.
Source: kernels compiled by the first requests, caches that are empty after a start, storage that is slow to open, each
from public reports (rows P02, P03, P04, P06 and N01 of the fault list).
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness import Scenario, after_detection, at, claims, faults, load, models, rollout, then
from harness.load.shape import RequestLimits
from scenarios.defences import qualifying

OLD, NEW = models.tiny_llama(seed=1, shards=2), models.tiny_llama(seed=2, shards=2)
PATIENT = RequestLimits(first_token_s=90.0, gap_s=90.0, total_s=120.0)
LOAD = load.steady(rate_rps=8.0, canary_ratio=0.5, tail_s=6.0, output_tokens=6, limits=PATIENT, in_flight_max=2_000)
# A compiler takes seconds where a first token takes tens of milliseconds: 1,300 times as long on one busy core. An engine that
# starts beside the one that serves was seen to take 37 times as long there.
COMPILED_SPIKE = 60.0
BACK = (claims.recovered(within_s=240.0), claims.latency_back_in_band(factor=2.0, windows=5))
UNNOTICED = (claims.exposed_at_most(0), claims.answered_ok(ratio_min=0.99), *BACK)

SCENARIOS = (
    # Without the gate the engine takes traffic as soon as `/health` says so, and its users wait for the compiler.
    Scenario(
        name="compile_in_traffic_on_rollout",
        old=OLD,
        new=NEW,
        faults=(faults.compile_in_traffic(),),
        load=LOAD,
        rollout=rollout.blue_green(),
        unguarded=(claims.spike_at_least(factor=COMPILED_SPIKE), *BACK),
        guarded=(claims.spike_at_most(factor=COMPILED_SPIKE), *UNNOTICED),
    ),
    # Every prompt begins with one of 24 beginnings that fill a block of the KV cache each: 128 tokens on a CPU.
    Scenario(
        name="cold_prefix_cache_on_restart",
        old=OLD,
        new=NEW,
        faults=(faults.cold_prefix_cache(),),
        load=replace(LOAD, prompt_tokens=160, shared_tokens=130, shared_prompts=24),
        timeline=(at(10.0).publish("new"), then().start_rollout(), after_detection(limit_s=120.0).remedy()),
        unguarded=(claims.prefix_cache_went_cold(ratio_before_min=0.3), *BACK),
        guarded=(claims.prefix_cache_went_cold(ratio_before_min=0.3), *UNNOTICED),
    ),
    # Engines compile here: the old one fills the cache, and the new one finds another.
    Scenario(
        name="cold_compile_cache_on_restart",
        old=OLD,
        new=NEW,
        faults=(faults.cold_compile_cache(),),
        load=LOAD,
        unguarded=BACK,
        guarded=UNNOTICED,
    ),
    # A restart in place makes users wait for the storage as well.
    Scenario(
        name="slow_storage_on_restart",
        old=OLD,
        new=NEW,
        faults=(faults.slow_storage(open_delay_s=8.0),),
        load=LOAD,
        unguarded=BACK,
        guarded=UNNOTICED,
    ),
)


@pytest.mark.nightly
@pytest.mark.parametrize("scenario", qualifying(SCENARIOS, "cold_prefix_cache_on_restart", "slow_storage_on_restart"))
def test_nobody_waits_for_an_engine_that_is_not_warm(run_scenario, scenario: Scenario) -> None:
    run_scenario(scenario).require_held()
