"""Tensors of the new checkpoint do not have the shapes that its config says.

Must hold: with guards nobody is answered from them; without, the engine notices no later than it was seen to before.
Source: incident write-up, "expected [4096, 12288], got [4096, 12320]". Real vLLM refuses what is too small, mostly by a
bare assertion, and cuts silently what is too large in a sharded dimension.
"""

from __future__ import annotations

import pytest

from harness import Scenario, faults, models
from harness.faults import Fault
from scenarios.defences import BITES, LOAD, contained, qualifying

DOWN = "model.layers.1.mlp.down_proj.weight"
OUT = "model.layers.1.self_attn.o_proj.weight"


def reshaped(name: str, fault: Fault, *, noticed_by: str = "preflight") -> Scenario:
    """Return the scenario of one reshaping."""
    return Scenario(
        name=name,
        old=models.tiny_llama(seed=1),
        new=models.tiny_llama(seed=2),
        faults=(fault,),
        load=LOAD,
        unguarded=BITES,
        guarded=contained(noticed_by),
    )


WIDENED = reshaped("widened_tensor_on_restart", faults.widen_tensor(DOWN, dim=1, by=32))
OTHERS = (
    reshaped("narrowed_tensor_on_restart", faults.narrow_tensor(DOWN, dim=1, by=32)),
    # The header of a transposed square matrix is right: only answers show it.
    reshaped("transposed_tensor_on_restart", faults.transpose_tensor(OUT), noticed_by="canary"),
    reshaped("relaid_out_tensor_on_restart", faults.relayout_tensor(DOWN)),
    reshaped("missing_tensor_on_restart", faults.drop_tensor(DOWN)),
    reshaped("weights_of_wider_model_on_restart", faults.wider_weights()),
    reshaped("config_of_deeper_model_on_restart", faults.mismatched_config(changes={"num_hidden_layers": 3})),
    reshaped("config_of_narrower_model_on_restart", faults.mismatched_config(changes={"intermediate_size": 224})),
)


@pytest.mark.core
@pytest.mark.qualification
def test_nobody_is_served_from_a_widened_tensor(run_scenario) -> None:
    run_scenario(WIDENED).require_held()


@pytest.mark.parametrize("scenario", qualifying(OTHERS, "transposed_tensor_on_restart", "missing_tensor_on_restart"))
def test_nobody_is_served_from_reshaped_tensors(run_scenario, scenario: Scenario) -> None:
    run_scenario(scenario).require_held()
