"""A tensor of the new checkpoint is 32 columns wider than its config says.

Must hold: with guards nobody is answered from it; without, the engine notices no later than it was seen to before.
Source: incident write-up, "expected [4096, 12288], got [4096, 12320]"; real vLLM cuts such a tensor silently.
"""

from __future__ import annotations

import pytest

from harness import Scenario, claims, faults, load, models

SCENARIO = Scenario(
    name="widened_tensor_on_restart",
    old=models.tiny_llama(seed=1),
    new=models.tiny_llama(seed=2),
    faults=(faults.widen_tensor("model.layers.1.mlp.down_proj.weight", dim=1, by=32),),
    load=load.steady(rate_rps=4.0, canary_ratio=0.5, tail_s=8.0),
    unguarded=(claims.layer_as_expected(), claims.recovered(within_s=120.0)),
    guarded=(
        claims.detected_by("preflight"),
        claims.exposed_at_most(0),
        claims.answered_ok(ratio_min=0.99),
        claims.recovered(within_s=180.0),
        claims.latency_back_in_band(factor=1.5, windows=5),
    ),
)


@pytest.mark.core
def test_nobody_is_served_from_it(run_scenario) -> None:
    run_scenario(SCENARIO).require_held()
