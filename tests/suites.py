"""Suites of a user outside this repository, as text, and ways to run them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from harness.label import DIRECTORY_PREFIX, LABEL_VARIABLE, SHARED_MEMORY

RUN_LIMIT_S = 90.0
NO_DOCKER = "unix:///nowhere/docker.sock"

# A short story: the fault at 1 s, and no tail.
SUITE = '''"""A tensor is wider than the config says. Must hold: pre-flight refuses it."""

import pytest

from harness import Scenario, after_detection, at, claims, faults, load, models, then

WIDENED = Scenario(
    name="widened",
    old=models.tiny_llama(seed=1),
    new=models.tiny_llama(seed=2),
    faults=(faults.widen_tensor("model.layers.1.mlp.down_proj.weight", dim=1, by=32),),
    load=load.steady(rate_rps=8.0, canary_ratio=0.5, tail_s=0.2),
    unguarded=(CLAIMS,),
    guarded=(claims.detected_by("preflight"), claims.exposed_at_most(0)),
    timeline=(at(1.0).publish("new"), then().start_rollout(), after_detection(limit_s=20.0).remedy()),
)


@pytest.mark.core
def test_nobody_is_served_from_a_widened_tensor(run_scenario):
    run_scenario(WIDENED).require_held()
'''
# An engine that is frozen at 1 s, and nobody who would notice for a long time.
FROZEN_SUITE = '''"""The engine is frozen. Must hold: canaries notice."""

from harness import Scenario, after_detection, at, claims, faults, load, models

FROZEN = Scenario(
    name="frozen",
    old=models.tiny_llama(seed=1),
    new=models.tiny_llama(seed=2),
    faults=(faults.frozen_process(),),
    load=load.steady(rate_rps=8.0, canary_ratio=0.5, tail_s=0.2),
    unguarded=(claims.detected_by("canary"),),
    guarded=(claims.detected_by("canary"),),
    timeline=(at(1.0).inject(), after_detection(limit_s=60.0).remedy()),
)


def test_canaries_notice(run_scenario):
    run_scenario(FROZEN).require_held()
'''
UNKNOWN_UNGUARDED = "claims.layer_as_expected()"  # nothing is recorded for a suite that has no expectations
BROKEN_UNGUARDED = 'claims.detected_by("preflight")'  # nobody looks at the files before the engine does


def write_suite(directory: Path, *, unguarded: str = UNKNOWN_UNGUARDED) -> Path:
    """Write a suite of one scenario and return its directory."""
    suite = directory / "rollouts"
    suite.mkdir(parents=True, exist_ok=True)
    (suite / "test_widened.py").write_text(SUITE.replace("CLAIMS", unguarded))
    return suite


def write_frozen_suite(directory: Path) -> Path:
    """Write a suite of one incident and return its directory."""
    suite = directory / "rollouts"
    suite.mkdir(parents=True, exist_ok=True)
    (suite / "test_frozen.py").write_text(FROZEN_SUITE)
    return suite


def start(arguments: list[str], *, scratch: Path, cwd: Path) -> subprocess.Popen[str]:
    """Start `harness` in a process of its own, with a private TMPDIR and no Docker engine."""
    scratch.mkdir(exist_ok=True)
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTEST_", "ROLLOUT_", LABEL_VARIABLE))
    }
    if "ROLLOUT_CACHE" in os.environ:
        environment["ROLLOUT_CACHE"] = os.environ["ROLLOUT_CACHE"]
    return subprocess.Popen(
        [sys.executable, "-m", "harness.cli", *arguments],
        cwd=cwd,
        env={**environment, "TMPDIR": str(scratch), "DOCKER_HOST": NO_DOCKER},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def left_of(pid: int, scratch: Path) -> list[str]:
    """Return every process and directory that wears the label of a run owned by this process id."""
    owner = f"-{pid}-"
    found = [
        str(path)
        for root in (scratch, SHARED_MEMORY)
        for path in root.glob(f"{DIRECTORY_PREFIX}*")
        if owner in path.name.removeprefix(DIRECTORY_PREFIX)
    ]
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                variables = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if any(v.startswith(LABEL_VARIABLE.encode()) and owner.encode() in v for v in variables):
                found.append(f"process {entry.name}")
    return found
