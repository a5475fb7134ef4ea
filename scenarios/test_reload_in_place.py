"""The running engine is given the new weights through its development endpoints, without a restart.

Must hold: after a good reload it answers as a cold start on the new checkpoint does, also to a prompt whose beginning it had
computed with the old weights, and no answer has tokens of both. With guards nobody is answered from a damaged one; without,
the engine notices no later than it was seen to before. The remedy is a restart: a reloaded engine is never trusted again.
Source: the fault list, U02 and U03; real vLLM answers a reload that lacks a tensor with 200 and goes on with a mixture, and
after one that it refused it dies at the next request. Its development endpoints are not protected by the API key.
"""

from __future__ import annotations

import pytest

from harness import Guard, Scenario, claims, faults, models, rollout
from harness.engine.dev_api import DEV_MODE, DevApi
from harness.engine.rollout import Rollout
from harness.faults import Fault
from harness.guards.canary import largest_difference
from harness.judge.claim import Claim
from scenarios.defences import BITES, LOAD, contained

DOWN = "model.layers.1.mlp.down_proj.weight"
GATE = "model.layers.1.mlp.gate_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"
SAFELY = rollout.reload_in_place()
# A gate is behind the reload: it ends what it finds wrong, and until the restart users get no answers rather than wrong ones.
GATED = (Guard.CANARY_GATE,)
ENDED = (claims.detected_by("canary"), claims.recovered(within_s=240.0))


def reloaded(
    name: str,
    *injected: Fault,
    unguarded: tuple[Claim, ...] = BITES,
    guarded: tuple[Claim, ...],
    how: Rollout = SAFELY,
    guards: tuple[Guard, ...] = (Guard.PREFLIGHT, Guard.CANARY_GATE),
) -> Scenario:
    """Return the scenario of one reload; with guards it is always the safe procedure."""
    return Scenario(
        name=name,
        old=models.tiny_llama(seed=1),
        new=models.tiny_llama(seed=2),
        faults=injected,
        load=LOAD,
        rollout=how,
        guarded_rollout=SAFELY,
        unguarded=unguarded,
        guarded=guarded,
        guards=guards,
    )


NEW_AFTERWARDS = (*contained("harmless"), claims.only_weights_served("new", window="after"))
GOOD = reloaded(
    "reload_of_good_checkpoint",
    unguarded=(*BITES, claims.answers_unmixed()),
    guarded=(*NEW_AFTERWARDS, claims.answers_unmixed()),
)
STALE_PREFIXES = reloaded(
    "reload_without_prefix_cache_reset",
    how=rollout.reload_in_place(reset_prefix_cache=False),
    guarded=NEW_AFTERWARDS,
)
# Pre-flight would refuse it; here it is left to the gate: an engine that does not outlive its refusal is found and replaced.
HALF_A_FILE = reloaded(
    "reload_of_half_a_file",
    faults.truncate_shard(),
    guarded=(*ENDED, claims.exposed_at_most(0)),
    guards=GATED,
)
NIGHTLY = (
    reloaded(
        "reload_without_pause",
        how=rollout.reload_in_place(pause=False),
        guarded=(*NEW_AFTERWARDS, claims.answers_unmixed()),
    ),
    reloaded(
        "reload_under_frozen_requests",
        how=rollout.reload_in_place(pause="keep"),
        guarded=(*NEW_AFTERWARDS, claims.answers_unmixed()),
    ),
    reloaded("reload_with_missing_tensor", faults.drop_tensor(DOWN), guarded=contained("preflight")),
    reloaded("reload_with_half_of_fused_tensor_missing", faults.drop_tensor(GATE), guarded=contained("preflight")),
    reloaded("reload_with_missing_norm", faults.drop_tensor(NORM), guarded=contained("preflight")),
    reloaded("reload_with_surplus_bias", faults.add_bias(DOWN), guarded=contained("preflight")),
    reloaded("reload_with_renamed_tensor", faults.rename_tensor(DOWN), guarded=contained("preflight")),
    reloaded("reload_with_widened_tensor", faults.widen_tensor(DOWN, dim=1, by=32), guarded=contained("preflight")),
    reloaded("reload_with_narrowed_tensor", faults.narrow_tensor(DOWN, dim=1, by=32), guarded=contained("preflight")),
    reloaded("reload_of_absent_shard", faults.missing_shard(), guarded=contained("preflight")),
)
CHECKSUMS = reloaded(
    "reload_told_by_checksums",
    unguarded=(*BITES, claims.checksums_trusted()),
    guarded=(*contained("harmless"), claims.checksums_trusted()),
)


@pytest.mark.qualification
def test_good_checkpoint_is_served_as_after_a_cold_start(run_scenario) -> None:
    run_scenario(GOOD).require_held()


@pytest.mark.qualification
def test_nobody_is_answered_from_stale_prefixes(run_scenario) -> None:
    run_scenario(STALE_PREFIXES).require_held()


@pytest.mark.qualification
def test_nobody_is_answered_from_half_a_file(run_scenario) -> None:
    run_scenario(HALF_A_FILE).require_held()


@pytest.mark.nightly
@pytest.mark.parametrize("scenario", NIGHTLY, ids=lambda scenario: scenario.name)
def test_nobody_is_answered_from_a_damaged_reload(run_scenario, scenario: Scenario) -> None:
    run_scenario(scenario).require_held()


@pytest.mark.nightly
def test_checksum_endpoint_tells_that_weights_arrived(run_scenario) -> None:
    """What an operator may expect: broken on vLLM 0.32.0 on a CPU, whose linear layers have the digest of no bytes."""
    run_scenario(CHECKSUMS).require_held()


@pytest.mark.nightly
def test_development_endpoints_leave_the_service_as_it_was(rollout_checkpoints, rollout_engine) -> None:
    """Whatever an update over a transfer engine, and sleep, come to on this platform: nobody is answered wrongly."""
    engine = rollout_engine(rollout_checkpoints.old, environment=(DEV_MODE,))
    before = engine.prompt_logprobs()
    api = DevApi(url=engine.endpoint, api_key=engine.api_key, limit_s=60.0)

    replies = [api.weight_info(), api.start_weight_update(), api.finish_weight_update("2"), api.sleep(), api.wake_up()]
    replies += [api.pause(), api.resume(), api.reset_prefix_cache()]

    print("; ".join(f"{reply.call}: {reply.status} {reply.said[:120]}" for reply in replies))
    assert all(reply.status for reply in replies), "every call is answered"
    assert largest_difference(engine.prompt_logprobs(), before) < 1e-3
