"""The process that computes is killed, crashes, or is frozen while the engine serves.

Must hold: the platform notices no later than it was seen to before, canaries notice what it does not, and a restart on the
same checkpoint brings service back; nobody is answered from wrong weights. Source: vLLM answers `/health` with 200 while
its engine core is frozen, and its server ends with exit code 0 after the core has crashed, which a supervisor with
restart-on-failure takes for success. The reference engine is one process: its core is its server.
"""

from __future__ import annotations

import pytest

from harness import Scenario, claims, faults, load, models
from harness.faults import Fault
from harness.judge.claim import Claim
from harness.load.shape import RequestLimits
from harness.scenario import INCIDENT_TIMELINE

NOTICED_WITHIN_S = 15.0  # the canaries' period and how long they wait, generously
# How long a canary waits for an answer decides how fast it notices an engine that is frozen.
LOAD = load.steady(
    rate_rps=8.0,
    canary_ratio=0.5,
    tail_s=3.0,
    output_tokens=6,
    limits=RequestLimits(first_token_s=5.0, gap_s=5.0, total_s=10.0),
)
NOTICED_AND_BACK = (
    claims.detected_by("canary"),
    claims.detected_within(limit_s=NOTICED_WITHIN_S),
    claims.exposed_at_most(0),
    claims.recovered(within_s=240.0),
    claims.only_weights_served("old"),
)


def incident(name: str, fault: Fault, *, unguarded: tuple[Claim, ...] = ()) -> Scenario:
    """Return the scenario of one thing that happens to an engine that serves; nothing is rolled out."""
    return Scenario(
        name=name,
        old=models.tiny_llama(seed=1),
        new=models.tiny_llama(seed=2),
        faults=(fault,),
        load=LOAD,
        timeline=INCIDENT_TIMELINE,
        unguarded=(claims.layer_as_expected(), claims.recovered(within_s=180.0), *unguarded),
        guarded=NOTICED_AND_BACK,
    )


KILLED = incident("core_killed_while_serving", faults.killed_process("core"))
FROZEN = incident("core_frozen_while_serving", faults.frozen_process())
OTHERS = (
    incident("core_crashed_while_serving", faults.killed_process("core", signal="SIGSEGV")),
    incident("core_aborted_while_serving", faults.killed_process("core", signal="SIGABRT")),
    incident("worker_killed_while_serving", faults.killed_process("worker")),
    incident("server_killed_while_serving", faults.killed_process("server")),
    incident("all_killed_with_leftovers", faults.killed_with_leftovers()),
)
# What an operator may expect of an engine, and vLLM 0.32.0 on CPU does not do: broken there, and a finding.
EXPECTED_OF_AN_ENGINE = (
    incident(
        "health_tells_a_frozen_core",
        faults.frozen_process(),
        unguarded=(claims.health_told(within_s=5.0),),
    ),
    incident(
        "exit_code_tells_a_killed_core",
        faults.killed_process("core"),
        unguarded=(claims.exit_code_told(),),
    ),
    incident(
        "exit_code_tells_a_crashed_core",
        faults.killed_process("core", signal="SIGSEGV"),
        unguarded=(claims.exit_code_told(),),
    ),
)


@pytest.mark.qualification
def test_a_killed_core_is_noticed_and_replaced(run_scenario) -> None:
    run_scenario(KILLED).require_held()


@pytest.mark.qualification
def test_a_frozen_core_is_noticed_and_replaced(run_scenario) -> None:
    run_scenario(FROZEN).require_held()


@pytest.mark.nightly
@pytest.mark.parametrize("scenario", OTHERS, ids=lambda scenario: scenario.name)
def test_a_dead_engine_is_noticed_and_replaced(run_scenario, scenario: Scenario) -> None:
    run_scenario(scenario).require_held()


@pytest.mark.nightly
@pytest.mark.parametrize("scenario", EXPECTED_OF_AN_ENGINE, ids=lambda scenario: scenario.name)
def test_the_platform_is_told(run_scenario, scenario: Scenario) -> None:
    run_scenario(scenario).require_held()
