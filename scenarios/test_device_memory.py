"""What outlives its checkpoint in the memory of a GPU.

Must hold: with guards nobody is answered from the weights that a daemon kept, and ending the daemon is the remedy; without,
canaries notice. Source: the fault list, K05: vLLM's weight cache daemon (`vllm preload`, `--load-format ipc_cache`) knows a
checkpoint by the headers of its files, which are the same before and after a training step.
"""

from __future__ import annotations

import pytest

from harness import Scenario, after_detection, at, claims, faults, models, then
from harness.faults import weight_daemon
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


def test_nobody_is_served_from_the_weights_that_a_daemon_kept(run_scenario) -> None:
    run_scenario(STALE_DAEMON).require_held()
