"""Weights in the memory of a GPU that are not those of the checkpoint, or find no room there.

Must hold: with guards nobody is answered from the weights that a daemon kept, and ending the daemon is the remedy; an engine
that woke without its weights, or was updated asleep, is noticed by canaries or goes on answering rightly, and a restart is the
remedy; one that finds the memory held by another process refuses to start. Source: the fault list, K05, M06, U01 and U04:
vLLM's weight cache daemon (`vllm preload`, `--load-format ipc_cache`) knows a checkpoint by the headers of its files, which
are the same before and after a training step; sleep at level 2 drops weights.
"""

from __future__ import annotations

import pytest

from harness import Scenario, after_detection, at, claims, faults, models, then
from harness.faults import Fault, weight_daemon
from harness.judge.claim import Claim
from harness.scenario import INCIDENT_TIMELINE
from scenarios.defences import LOAD, contained

pytestmark = [pytest.mark.nightly, pytest.mark.gpu]

# Two engines and a daemon share one GPU.
SHARED_GPU = ("--gpu-memory-utilization", "0.3")
STALE_DAEMON = Scenario(
    name="stale_weight_daemon_on_restart",
    old=models.tiny_llama(seed=1),
    new=models.tiny_llama(seed=2),
    faults=(faults.stale_weight_daemon(),),
    load=LOAD,
    timeline=(
        at(2.5).inject(),
        then().publish("new"),
        then().start_rollout(),
        after_detection(limit_s=120.0).remedy(),
    ),
    unguarded=(claims.detected_by("canary"), claims.recovered(within_s=180.0)),
    guarded=contained("canary"),
    engine_arguments=(*SHARED_GPU, *weight_daemon.ENGINE_ARGUMENTS),
    limit_s=1200.0,
)

RESTARTED = (claims.recovered(within_s=240.0), claims.only_weights_served("old", window="after"))


def asleep(name: str, fault: Fault, *noticed: Claim) -> Scenario:
    """Return the scenario of an engine that is put to sleep while it serves."""
    return Scenario(
        name=name,
        old=models.tiny_llama(seed=1),
        new=models.tiny_llama(seed=2),
        faults=(fault,),
        load=LOAD,
        timeline=INCIDENT_TIMELINE,
        unguarded=(*noticed, *RESTARTED),
        guarded=(*noticed, *RESTARTED),
        engine_arguments=SHARED_GPU,
    )


ASLEEP = (
    asleep("woken_without_reload_while_serving", faults.woken_without_reload(), claims.detected_by("canary")),
    # What an engine does when it is updated asleep is open: whatever it is, a restart brings the right weights back.
    asleep("updated_while_asleep_while_serving", faults.updated_while_asleep()),
    asleep("updated_in_deep_sleep_while_serving", faults.updated_while_asleep(level=2)),
)

HELD = Scenario(
    name="held_device_memory_on_restart",
    old=models.tiny_llama(seed=1),
    new=models.tiny_llama(seed=2),
    faults=(faults.held_device_memory(),),
    load=LOAD,
    unguarded=(claims.detected_by("startup"), claims.recovered(within_s=240.0)),
    guarded=contained("startup"),
    engine_arguments=SHARED_GPU,
)


def test_nobody_is_served_from_the_weights_that_a_daemon_kept(run_scenario) -> None:
    run_scenario(STALE_DAEMON).require_held()


@pytest.mark.parametrize("scenario", ASLEEP, ids=lambda scenario: scenario.name)
def test_an_engine_that_slept_is_replaced(run_scenario, scenario: Scenario) -> None:
    run_scenario(scenario).require_held()


def test_an_engine_without_memory_refuses_to_start(run_scenario) -> None:
    run_scenario(HELD).require_held()
