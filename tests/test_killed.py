"""However a run is ended, nothing of it is left: Ctrl-C, Ctrl-C twice, SIGTERM, and SIGKILL through the watchdog."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.clock import now_ns, pause, poll_until, seconds_between
from harness.engine.proc import find
from tests.suites import left_of, start, write_frozen_suite, write_suite

END_LIMIT_S = 30.0
KILLED_LIMIT_S = 10.0


@pytest.fixture
def run(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Give a run on the reference engine whose engine and load are at work."""
    write_suite(tmp_path)
    started = start(["run", "rollouts", "--engine", "reference"], scratch=tmp_path / "scratch", cwd=tmp_path)
    try:
        poll_until(
            lambda: True if "load_started" in "".join(p.read_text() for p in histories(tmp_path)) else None,
            what="load has begun",
            limit_s=60.0,
        )
        yield started
    finally:
        started.kill()
        started.communicate()
        poll_until(
            lambda: None if left_of(started.pid, tmp_path / "scratch") else True, what="all ended", limit_s=END_LIMIT_S
        )


def histories(directory: Path) -> list[Path]:
    """Return the histories of the run in this directory."""
    return list(directory.glob("results/2*/scenarios/*/history.jsonl"))


@pytest.mark.parametrize(
    "signals",
    [(signal.SIGINT,), (signal.SIGTERM,), (signal.SIGINT, signal.SIGINT)],
    ids=["ctrl-c", "terminated", "ctrl-c twice"],
)
def test_interrupted_run_ends_everything_and_says_so(
    run: subprocess.Popen[str], tmp_path: Path, signals: tuple[signal.Signals, ...]
) -> None:
    scratch = tmp_path / "scratch"
    assert len(left_of(run.pid, scratch)) >= 4, "an engine, a load process and two directories are at work"

    for number in signals:
        run.send_signal(number)
        pause(0.1)
    said, _ = run.communicate(timeout=END_LIMIT_S)

    assert run.returncode == 2
    assert said.rstrip().endswith("harness: interrupted; what was running has been ended")
    assert "Traceback" not in said
    assert left_of(run.pid, scratch) == []
    assert list(scratch.iterdir()) == []
    [record] = tmp_path.glob("results/2*/run.json")
    assert json.loads(record.read_text())["is_complete"] is False


def test_killed_run_leaves_nothing_within_ten_seconds(run: subprocess.Popen[str], tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    assert len(left_of(run.pid, scratch)) >= 4
    # What was recorded before is on disk: nothing is lost but a line that was being written.
    before = sum(len(path.read_bytes().splitlines()) for path in histories(tmp_path))

    run.kill()
    killed_ns = now_ns()
    run.communicate(timeout=END_LIMIT_S)
    poll_until(lambda: None if left_of(run.pid, scratch) else True, what="nothing is left", limit_s=KILLED_LIMIT_S)

    assert seconds_between(killed_ns, now_ns()) <= KILLED_LIMIT_S
    assert list(scratch.iterdir()) == []
    assert sum(len(path.read_bytes().splitlines()) for path in histories(tmp_path)) >= before

    judged = start(["judge", "results/latest"], scratch=scratch, cwd=tmp_path)
    said, _ = judged.communicate(timeout=END_LIMIT_S)
    assert judged.returncode == 2, said
    assert "unknown" in said
    assert "Traceback" not in said


def test_killed_run_leaves_no_engine_that_it_had_frozen(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    write_frozen_suite(tmp_path)
    run = start(["run", "rollouts", "--all", "--engine", "reference"], scratch=scratch, cwd=tmp_path)
    try:
        pid = poll_until(lambda: frozen_in(tmp_path), what="the engine is frozen", limit_s=60.0)
        assert " T " in Path(f"/proc/{pid}/stat").read_text()
    finally:
        run.kill()
        run.communicate(timeout=END_LIMIT_S)
    poll_until(lambda: None if left_of(run.pid, scratch) else True, what="nothing is left", limit_s=KILLED_LIMIT_S)
    engine = find(pid)
    assert engine is None or not engine.is_running(), "a process 1 that reaps nobody leaves it as a zombie"


def frozen_in(directory: Path) -> int | None:
    """Return the process that the history of a run says is frozen; how to undo that is in it before."""
    lines = [json.loads(line) for path in histories(directory) for line in path.read_text().splitlines() if line]
    injected = next((line["data"] for line in lines if line.get("kind") == "fault_injected"), None)
    if injected is None:
        return None
    struck = [line["data"] for line in lines if line.get("kind") == "incident_started"]
    assert "SIGCONT" in struck[0]["undo"]["frozen_process"]
    return int(next(iter(injected["after"]["states"])))


INTERRUPTED = """
import os, subprocess, sys
from harness.label import LABEL_VARIABLE

def test_it(rollout_run):
    environment = {**os.environ, LABEL_VARIABLE: str(rollout_run.label)}
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env=environment)
    raise KeyboardInterrupt
"""


def test_what_an_interrupt_left_is_ended_and_told_without_a_traceback(tmp_path: Path) -> None:
    (write_suite(tmp_path) / "test_widened.py").write_text(INTERRUPTED)
    run = start(["run", "rollouts", "--all", "--engine", "reference"], scratch=tmp_path / "scratch", cwd=tmp_path)
    said, _ = run.communicate(timeout=END_LIMIT_S)
    assert run.returncode == 2, said
    assert "harness: left over after the run: processes: " in said
    assert said.rstrip().endswith("harness: interrupted; what was running has been ended")
    assert "Traceback" not in said
    assert left_of(run.pid, tmp_path / "scratch") == []
