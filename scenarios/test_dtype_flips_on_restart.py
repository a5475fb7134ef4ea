"""The dtypes of the new checkpoint, of its config and of the launch arguments do not belong together.

Must hold: with guards nobody is answered wrongly; without, the engine notices no later than it was seen to before.
Source: incident write-up, bf16 checkpoint on an engine launched for fp16. Real vLLM casts: values beyond fp16's range become
infinite in silence, relabelled bytes give confident garbage, and `--dtype fp16` is no valid spelling.
"""

from __future__ import annotations

import pytest

from harness import Scenario, faults, models
from harness.faults import Fault
from harness.judge.claim import Claim
from scenarios.defences import BITES, LOAD, contained, qualifying

DOWN = "model.layers.1.mlp.down_proj.weight"
UP = "model.layers.1.mlp.up_proj.weight"


def flipped(name: str, *injected: Fault, guarded: tuple[Claim, ...] | None = None) -> Scenario:
    """Return the scenario of one dtype flip."""
    return Scenario(
        name=name,
        old=models.tiny_llama(seed=1),
        new=models.tiny_llama(seed=2),
        faults=injected,
        load=LOAD,
        unguarded=BITES,
        guarded=contained("preflight") if guarded is None else guarded,
    )


RELABELLED = flipped("dtype_relabelled_in_header_on_restart", faults.flip_dtype_in_header(dtype="F16"))
OTHERS = (
    flipped("one_tensor_cast_to_fp16_on_restart", faults.cast_tensor(DOWN, dtype="F16")),
    flipped("one_tensor_cast_to_fp32_on_restart", faults.cast_tensor(DOWN, dtype="F32")),
    flipped("one_tensor_cast_to_int8_on_restart", faults.cast_tensor(DOWN, dtype="I8")),
    flipped("all_tensors_cast_to_fp32_on_restart", faults.cast_all(dtype="F32")),
    flipped("all_tensors_cast_to_fp16_on_restart", faults.cast_all(dtype="F16")),
    flipped("all_tensors_cast_to_int8_on_restart", faults.cast_all(dtype="I8")),
    flipped(
        "values_beyond_fp16_on_restart",
        faults.beyond_fp16_range(UP, inverse=DOWN),
        faults.launch_dtype("float16"),
    ),
    flipped("launch_dtype_misspelt_on_restart", faults.launch_dtype("fp16")),
    flipped("launch_flag_unknown_on_restart", faults.launch_argument("--disable-weight-cache")),
)


@pytest.mark.core
@pytest.mark.qualification
def test_nobody_is_served_from_relabelled_bytes(run_scenario) -> None:
    run_scenario(RELABELLED).require_held()


@pytest.mark.parametrize("scenario", qualifying(OTHERS, "launch_dtype_misspelt_on_restart"))
def test_nobody_is_served_across_a_dtype_flip(run_scenario, scenario: Scenario) -> None:
    run_scenario(scenario).require_held()
