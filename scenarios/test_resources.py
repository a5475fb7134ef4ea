"""An engine, or a copy for it, runs out of something, or a weight file changes while an engine loads it.

Must hold: with guards nobody is answered from a half or mixed checkpoint, and service comes back; without, the engine
notices no later than it was seen to before. Source: a mapped file that is cut ends its reader by SIGBUS; one that is
written over gives a mixture of two versions; a memory limit is enforced by a kill; a copy ends where the disk does.
The reference engine reads and does not map: it refuses a file that shrank.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from harness import Scenario, after_detection, at, claims, faults, load, models, rollout, then
from harness.errors import HarnessError
from harness.faults import Fault
from harness.guards.canary import largest_difference
from harness.guards.publish import publish
from harness.judge.claim import Claim
from harness.load.shape import RequestLimits
from harness.scenario import INCIDENT_TIMELINE
from scenarios.defences import BITES, LOAD, contained, qualifying

# Large enough that an engine is seen in the middle of its file: about 16 MB in bf16, most of it in the vocabulary.
LARGE = {"hidden": 256, "layers": 4, "intermediate": 768, "vocabulary": 10240}
LARGE_OLD = models.tiny_llama(seed=1, **LARGE)
LARGE_NEW = models.tiny_llama(seed=2, **LARGE)
IMPATIENT = load.steady(
    rate_rps=8.0,
    canary_ratio=0.5,
    tail_s=3.0,
    output_tokens=6,
    limits=RequestLimits(first_token_s=5.0, gap_s=5.0, total_s=10.0),
)
# A busy core answers few requests to that model at a time.
SLOW_MODEL = load.steady(rate_rps=2.0, canary_ratio=0.5, tail_s=3.0, output_tokens=4)


def while_loading(name: str, fault: Fault, *, noticed_by: str) -> Scenario:
    """Return the scenario of a file that changes while the new engine of a rollout loads it."""
    return Scenario(
        name=name,
        old=LARGE_OLD,
        new=LARGE_NEW,
        faults=(fault,),
        load=SLOW_MODEL,
        timeline=(at(5.0).publish("new"), then().start_rollout(), after_detection(limit_s=120.0).remedy()),
        unguarded=BITES,
        guarded=(
            claims.detected_by(noticed_by),
            claims.exposed_at_most(0),
            claims.recovered(within_s=240.0),
        ),
    )


def rolled_out(name: str, fault: Fault, guarded: tuple[Claim, ...]) -> Scenario:
    """Return the scenario of a rollout."""
    return Scenario(
        name=name,
        old=models.tiny_llama(seed=1),
        new=models.tiny_llama(seed=2),
        faults=(fault,),
        load=LOAD,
        unguarded=BITES,
        guarded=guarded,
    )


def squeezed(name: str, fault: Fault) -> Scenario:
    """Return the scenario of an engine that runs out of something while it serves."""
    return Scenario(
        name=name,
        old=models.tiny_llama(seed=1),
        new=models.tiny_llama(seed=2),
        faults=(fault,),
        load=IMPATIENT,
        timeline=INCIDENT_TIMELINE,
        unguarded=(claims.layer_as_expected(), claims.recovered(within_s=180.0)),
        guarded=(claims.exposed_at_most(0), claims.recovered(within_s=240.0), claims.only_weights_served("old")),
    )


PORT_HELD = Scenario(
    name="port_held_by_the_old_server",
    old=models.tiny_llama(seed=1),
    new=models.tiny_llama(seed=2),
    faults=(faults.port_of_old_server(),),
    load=LOAD,
    rollout=rollout.blue_green(),
    unguarded=(claims.detected_by("client"), claims.recovered(within_s=180.0)),
    guarded=(
        claims.detected_by("canary"),
        claims.exposed_at_most(0),
        claims.answered_ok(ratio_min=0.99),
        claims.recovered(within_s=240.0),
    ),
)
CUT = while_loading("shard_cut_while_loading", faults.changed_while_loading("cut"), noticed_by="startup")
FULL_DISK = rolled_out("full_disk_on_restart", faults.full_disk(), contained("preflight"))
OTHERS = (
    while_loading("shard_overwritten_while_loading", faults.changed_while_loading("overwritten"), noticed_by="canary"),
    # Healthy until somebody asks: whoever asks before users do is the one to notice.
    rolled_out("missing_compiler_on_restart", faults.missing_compiler(), contained("canary")),
    squeezed("memory_limit_while_serving", faults.memory_limit()),
    squeezed("shared_memory_full_while_serving", faults.full_shared_memory()),
    rolled_out(
        "small_shared_memory_on_restart",
        faults.small_shared_memory(),
        (claims.exposed_at_most(0), claims.answered_ok(ratio_min=0.99), claims.recovered(within_s=240.0)),
    ),
)


@pytest.mark.qualification
def test_nobody_is_served_from_a_shard_that_was_cut(run_scenario) -> None:
    run_scenario(CUT).require_held()


def test_nobody_is_served_from_what_a_full_disk_left(run_scenario) -> None:
    run_scenario(FULL_DISK).require_held()


def test_probes_that_the_old_server_answers_admit_nobody(run_scenario) -> None:
    run_scenario(PORT_HELD).require_held()


@pytest.mark.nightly
@pytest.mark.parametrize("scenario", qualifying(OTHERS, "memory_limit_while_serving"))
def test_whoever_runs_out_is_replaced(run_scenario, scenario: Scenario) -> None:
    run_scenario(scenario).require_held()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a disk small enough to be full")
def test_publish_refuses_on_a_full_disk_and_what_is_live_is_whole(
    rollout_checkpoints, rollout_engine, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    size_bytes = sum(file.stat().st_size for file in rollout_checkpoints.old.iterdir())
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes * 3 // 2}", "tmpfs", str(disk)]
    subprocess.run(command, check=True, timeout=30)
    try:
        publish(rollout_checkpoints.old, disk)
        before = rollout_engine(disk / "live").prompt_logprobs()

        with pytest.raises(HarnessError, match="No space left on device"):
            publish(rollout_checkpoints.new, disk)

        after = rollout_engine(disk / "live").prompt_logprobs()
        assert largest_difference(after, before) < 1e-3
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True, timeout=30)
