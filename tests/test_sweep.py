"""What a dead run left behind is found by its label and ended, and nothing else is touched."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from harness import sweep, watchdog
from harness.clock import poll_until
from harness.label import LABEL_VARIABLE, RunLabel, new_label, parse_label, shared_memory_directory, work_directory

LIMIT_S = 20.0
SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def label() -> Iterator[RunLabel]:
    """Give the label of a run whose owner has ended, and end whatever a failed test leaves of it."""
    owner = subprocess.Popen([sys.executable, "-c", ""])
    owner.wait()
    dead = replace(new_label(), owner_pid=owner.pid, owner_start_ticks=1)
    yield dead
    sweep.end(dead, docker=False)


def labelled_process(label: RunLabel) -> subprocess.Popen[bytes]:
    """Start a process that wears a label."""
    return subprocess.Popen(SLEEPER, env={**os.environ, LABEL_VARIABLE: str(label)}, start_new_session=True)


def test_label_survives_being_written_and_read() -> None:
    label = new_label()
    assert parse_label(str(label)) == label
    assert label.owner_is_alive()
    assert not label.is_foreign()


@pytest.mark.parametrize(
    "text", ["", "x", "../../etc", "0123abcd-0123abcd-1", "0123abcd-0123abcd-1-2-3", "0123ABCD-0123abcd-1-2"]
)
def test_anything_else_is_no_label(text: str) -> None:
    assert parse_label(text) is None


def test_owner_with_a_reused_process_id_is_dead() -> None:
    assert not replace(new_label(), owner_start_ticks=1).owner_is_alive()


def test_process_and_directories_of_a_dead_run_are_found_and_ended(label: RunLabel) -> None:
    process = labelled_process(label)
    for directory in (work_directory(label), shared_memory_directory(label)):
        (directory / "inner").mkdir(parents=True)
        (directory / "inner" / "file").write_text("x")
        (directory / "inner").chmod(0o500)

    found = next(left for left in sweep.find_of_dead_runs(docker=False) if left.label == label)
    assert found.processes == (process.pid,)
    assert set(found.directories) == {work_directory(label), shared_memory_directory(label)}

    left = sweep.end(label, docker=False)
    process.wait(LIMIT_S)
    assert left.is_empty()
    assert not work_directory(label).exists()


def test_living_runs_and_foreign_ones_are_not_swept(label: RunLabel) -> None:
    living = new_label()
    foreign = replace(label, host="00000000")
    processes = [labelled_process(living), labelled_process(foreign)]
    try:
        swept = {left.label for left in sweep.find_of_dead_runs(docker=False)}
        assert living not in swept
        assert foreign not in swept
        assert all(process.poll() is None for process in processes)
    finally:
        for process in processes:
            process.kill()
            process.wait(LIMIT_S)


def test_ending_one_run_leaves_another_alone(label: RunLabel) -> None:
    other = labelled_process(replace(label, token="ffffffff"))
    try:
        sweep.end(label, docker=False)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait(LIMIT_S)


HARNESS_THAT_IS_KILLED = """
import os, signal, subprocess, sys
from harness import watchdog
from harness.label import LABEL_VARIABLE, new_label, work_directory
label = new_label()
with watchdog.watch(label) as watchdog_pid:
    work_directory(label).mkdir()
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                             env={**os.environ, LABEL_VARIABLE: str(label)}, start_new_session=True)
    print(label, child.pid, watchdog_pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_watchdog_ends_everything_when_the_harness_is_killed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HARNESS_THAT_IS_KILLED], capture_output=True, text=True, timeout=60, check=False
    )
    text, child, pid = done.stdout.split()
    label = parse_label(text)
    assert label is not None
    poll_until(lambda: None if Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes() else True,
               what="watchdog ended", limit_s=LIMIT_S)  # fmt: skip
    assert sweep.find_of(label).is_empty()
    assert not work_directory(label).exists()
    assert not Path(f"/proc/{child}/fd").exists() or not os.access(f"/proc/{child}/exe", os.R_OK)


def test_watchdog_leaves_everything_alone_after_an_orderly_end(label: RunLabel) -> None:
    process = labelled_process(label)
    try:
        with watchdog.watch(label) as pid:
            assert Path(f"/proc/{pid}").exists()
        assert not Path(f"/proc/{pid}").exists()
        assert process.poll() is None
    finally:
        process.kill()
        process.wait(LIMIT_S)


def test_watchdog_without_a_label_says_how_it_is_used() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "harness.watchdog", "nonsense"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 3
    assert "usage" in done.stderr
