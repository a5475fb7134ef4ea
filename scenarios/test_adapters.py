"""A running engine is given another LoRA adapter under the name of the one that it serves, at runtime.

Must hold: after a good update users of the adapter are answered as after a cold start with it, also to a prompt whose
beginning was computed with the old one, and the base answers as before. With guards nobody is answered from an adapter
that does not fit, or from the old one; without, the engine notices no later than it was seen to before. The remedy is a
restart with the right adapter. Users and canaries ask the adapter; what the base answers is looked at beside it. The engine
computes one sequence at a time: with adapters, vLLM 0.32.0 on CPU dies of prompt logprobs in a batch.
Source: the fault list, U05, U06 and U07; the engine says itself that a changed adapter belongs under a new path.
"""

from __future__ import annotations

import pytest

from harness import Guard, Scenario, claims, faults, load, models, rollout
from harness.engine.rollout import Rollout
from harness.faults import Fault
from scenarios.defences import BITES

SAFELY = rollout.update_adapter()  # loaded in place from a path of its own; with guards under a trial name first
SLOWLY = load.steady(rate_rps=2.0, canary_ratio=0.5, tail_s=3.0, output_tokens=4)  # a step takes 30 ms, one at a time


def updated(name: str, *injected: Fault, noticed_at: str = "harmless", how: Rollout = SAFELY) -> Scenario:
    """Return the scenario of one update of an adapter; with guards it is always the safe procedure."""
    return Scenario(
        name=name,
        old=models.adapted_llama(seed=1, adapter=1),
        new=models.adapted_llama(seed=1, adapter=2),
        faults=injected,
        load=SLOWLY,
        rollout=how,
        guarded_rollout=SAFELY,
        unguarded=BITES,
        guarded=(
            claims.detected_by(noticed_at),
            claims.exposed_at_most(0),
            claims.answered_ok(ratio_min=0.99),
            claims.recovered(within_s=240.0),
            claims.only_weights_served("new", window="after"),
        ),
        guards=(Guard.CANARY_GATE,),
    )


SCENARIOS = (
    updated("adapter_that_fits"),
    updated("adapter_of_higher_rank", faults.adapter_rank(), noticed_at="startup"),
    updated("adapter_of_wider_base", faults.adapter_width(), noticed_at="startup"),
    updated(
        "adapter_of_wider_base_after_unload",
        faults.adapter_width(),
        noticed_at="startup",
        how=rollout.update_adapter("unloaded"),
    ),
    updated("adapter_of_unknown_names", faults.adapter_prefix(), noticed_at="canary"),
    updated("adapter_replaced_and_not_refreshed", how=rollout.update_adapter("untold")),
    updated("adapter_replaced_and_loaded_again", how=rollout.update_adapter("again", from_new_path=False)),
    updated("adapter_replaced_in_place", how=rollout.update_adapter(from_new_path=False)),
    updated("adapter_replaced_after_unload", how=rollout.update_adapter("unloaded", from_new_path=False)),
)


@pytest.mark.nightly
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_nobody_is_answered_from_a_wrong_adapter(run_scenario, scenario: Scenario) -> None:
    run_scenario(scenario).require_held()
