"""A harness that is killed while real engines run leaves no container, network, process or directory behind."""

from __future__ import annotations

import subprocess
import sys

import pytest

from harness import sweep
from harness.clock import poll_until
from harness.label import parse_label, shared_memory_directory, work_directory

GONE_WITHIN_S = 10.0

HARNESS_THAT_IS_KILLED = """
import os, signal
from pathlib import Path
from harness import watchdog
from harness.checkpoint.models import default_cache, tiny_llama
from harness.engine.container import ContainerStarter
from harness.engine.engine import EngineSite
from harness.engine.image import ensure_image
from harness.engine.launch import Launch, WeightCache
from harness.label import new_label, shared_memory_directory, work_directory
label = new_label()
image = ensure_image()
with watchdog.watch(label):
    work, shared = work_directory(label), shared_memory_directory(label)
    work.mkdir()
    cache = shared / "weight_cache"
    cache.mkdir(parents=True)
    starter = ContainerStarter(image)
    starter.open(EngineSite(run_label=str(label), log_directory=work / "logs", work_directory=work / "engines", api_key="k"))
    checkpoint = tiny_llama(seed=1).build(default_cache())
    launch = Launch(checkpoint_root=checkpoint.parent, checkpoint_name=checkpoint.name, weight_cache=WeightCache(directory=cache))
    for incarnation in ("old-1", "new-1"):
        starter.start(launch, incarnation=incarnation)
    print(label, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.docker
def test_nothing_is_left_of_a_killed_harness() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HARNESS_THAT_IS_KILLED], capture_output=True, text=True, timeout=1200, check=False
    )
    label = parse_label(done.stdout.strip().splitlines()[-1])
    assert label is not None, done.stderr
    poll_until(
        lambda: True if sweep.find_of(label).is_empty() else None,
        what=f"everything of run {label} ended",
        limit_s=GONE_WITHIN_S,
        every_s=0.2,
    )
    assert not work_directory(label).exists()
    assert not shared_memory_directory(label).exists()
