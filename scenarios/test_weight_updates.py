"""The running engine is sent the new weights over a transfer engine, and what is sent is not always all of them.

Must hold: after a good update it answers as a cold start on the new checkpoint does, and the version that it tells is that of the
weights that it answers from. With guards a canary gate behind the update ends what answers wrongly, and the remedy is a restart;
without, the engine notices no later than it was seen to before.
Source: the fault list, U02 and U03; real vLLM answers an update of nothing with 200 and tells the new version. What is sent is read
from files by a transfer engine of our own, since those of vLLM need CUDA.
"""

from __future__ import annotations

import pytest

from harness import Guard, Scenario, claims, models, rollout
from harness.engine.rollout import Flaw
from harness.judge.claim import Claim
from scenarios.defences import BITES, LOAD, contained

# The gate is behind the update: until it has asked, users are answered from what is there.
ENDED = (claims.detected_by("canary"), claims.recovered(within_s=240.0))
TRULY = claims.version_told_truly()


def updated(
    name: str,
    flaw: Flaw = Flaw.NONE,
    *,
    unguarded: tuple[Claim, ...] = BITES,
    guarded: tuple[Claim, ...] = ENDED,
    guarded_flaw: Flaw | None = None,
) -> Scenario:
    """Return the scenario of one update; what a trainer leaves out it leaves out with guards too."""
    return Scenario(
        name=name,
        old=models.tiny_llama(seed=1),
        new=models.tiny_llama(seed=2),
        faults=(),
        load=LOAD,
        rollout=rollout.update_weights(flaw=flaw),
        guarded_rollout=rollout.update_weights(flaw=flaw if guarded_flaw is None else guarded_flaw),
        unguarded=unguarded,
        guarded=guarded,
        guards=(Guard.CANARY_GATE,),
    )


NEW_AFTERWARDS = (*contained("harmless"), claims.only_weights_served("new", window="after"), TRULY)
GOOD = updated("update_of_everything", unguarded=(*BITES, TRULY), guarded=NEW_AFTERWARDS)
FLAWED = (
    updated("update_of_nothing", Flaw.NOTHING_SENT),
    updated("update_without_one_layer", Flaw.LAYER_NOT_SENT),
    updated("update_without_part_of_fused_tensor", Flaw.PART_NOT_SENT),
    # The operator is told; what is left to find is that the engine does not outlive it.
    updated("update_with_refused_chunk", Flaw.CHUNK_REFUSED, guarded=(*ENDED, claims.exposed_at_most(0))),
    updated("update_met_by_a_request", Flaw.REQUEST_BETWEEN, guarded=NEW_AFTERWARDS, guarded_flaw=Flaw.NONE),
)
TOLD = updated(
    "update_told_by_version",
    Flaw.NOTHING_SENT,
    unguarded=(*BITES, TRULY),
    guarded=(claims.detected_by("canary"), TRULY),
)


@pytest.mark.nightly
def test_good_update_is_served_as_after_a_cold_start(run_scenario) -> None:
    run_scenario(GOOD).require_held()


@pytest.mark.nightly
@pytest.mark.parametrize("scenario", FLAWED, ids=lambda scenario: scenario.name)
def test_nobody_is_answered_from_a_flawed_update(run_scenario, scenario: Scenario) -> None:
    run_scenario(scenario).require_held()


@pytest.mark.nightly
def test_version_tells_which_weights_are_served(run_scenario) -> None:
    """What an operator may expect: broken on vLLM 0.32.0, which tells the new version after an update of nothing."""
    run_scenario(TOLD).require_held()
