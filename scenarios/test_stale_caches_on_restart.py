"""The compile cache that the old engine filled is damaged, moved or closed to the new one.

Must hold: no answer is wrong, and service comes back; deleting the cache is the remedy. An engine that compiles again is
slow to start and right; one that refuses to start is an outage that blue/green hides.
Source: taxonomy rows K01 to K04. Engines compile here, as they do in production; elsewhere on a CPU they are eager.
"""

from __future__ import annotations

import pytest

from harness import Scenario, claims, faults, models
from harness.faults import Fault
from scenarios.defences import LOAD, qualifying

RIGHT = (claims.exposed_at_most(0), claims.recovered(within_s=300.0))


def cached(name: str, fault: Fault) -> Scenario:
    """Return the scenario of one spoilt compile cache."""
    return Scenario(
        name=name,
        old=models.tiny_llama(seed=1),
        new=models.tiny_llama(seed=2),
        faults=(fault,),
        load=LOAD,
        unguarded=RIGHT,
        guarded=(*RIGHT, claims.answered_ok(ratio_min=0.99)),
        limit_s=1200.0,
    )


SCENARIOS = (
    cached("cut_compile_cache_on_restart", faults.damaged_compile_cache()),
    cached("flipped_bits_in_compile_cache_on_restart", faults.damaged_compile_cache(how="flip")),
    cached("moved_compile_cache_on_restart", faults.moved_compile_cache()),
    cached("unwritable_compile_cache_on_restart", faults.unwritable_compile_cache()),
    cached("kernels_of_another_runtime_on_restart", faults.foreign_kernels()),
)


@pytest.mark.nightly
@pytest.mark.parametrize("scenario", qualifying(SCENARIOS, "cut_compile_cache_on_restart"))
def test_no_answer_is_wrong(run_scenario, scenario: Scenario) -> None:
    run_scenario(scenario).require_held()
