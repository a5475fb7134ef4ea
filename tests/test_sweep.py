"""What a dead run left behind is found by its label and ended, and nothing else is touched."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from harness import sweep, watchdog
from harness.clock import now_ns, poll_until, seconds_between
from harness.engine import docker_daemon
from harness.errors import HarnessError
from harness.label import (
    DIRECTORY_PREFIX,
    LABEL_VARIABLE,
    SEGMENTS_RECORD,
    SHARED_MEMORY,
    RunLabel,
    new_label,
    parse_label,
    shared_memory_directory,
    work_directory,
)

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


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts anything")
def test_what_a_fault_mounted_goes_with_the_directory_of_its_run(label: RunLabel) -> None:
    inner = work_directory(label) / "live"
    inner.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(inner)], check=True, timeout=LIMIT_S)
    (inner / "file").write_bytes(b"x")

    assert sweep.end(label, docker=False).is_empty()

    assert not work_directory(label).exists()
    assert str(inner) not in Path("/proc/self/mounts").read_text()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts anything")
def test_what_is_mounted_goes_where_a_link_leads_to_and_whatever_its_name(
    label: RunLabel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "link"))
    inner = work_directory(label) / "a\tb\nc\\040 d\x0be"
    inner.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(inner)], check=True, timeout=LIMIT_S)
    try:
        assert str(tmp_path) in Path("/proc/self/mounts").read_text()

        assert sweep.end(label, limit_s=4.0, docker=False).is_empty()

        assert not work_directory(label).exists()
        assert str(tmp_path) not in Path("/proc/self/mounts").read_text()
    finally:
        subprocess.run(["umount", "--lazy", str(inner)], capture_output=True, check=False, timeout=LIMIT_S)


def test_label_survives_being_written_and_read() -> None:
    label = new_label()
    assert parse_label(str(label)) == label
    assert label.owner_is_alive()
    assert not label.is_foreign()


@pytest.mark.parametrize(
    "text", ["", "x", "../../etc", "012abc-0123abcd0123-1", "012abc-0123abcd0123-1-2-3", "012ABC-0123abcd0123-1-2"]
)
def test_anything_else_is_no_label(text: str) -> None:
    assert parse_label(text) is None


def test_owner_with_a_reused_process_id_is_dead() -> None:
    assert not replace(new_label(), owner_start_ticks=1).owner_is_alive()


def test_owner_of_an_earlier_boot_of_this_machine_is_dead_and_not_foreign() -> None:
    earlier = replace(new_label(), boot="0000", namespace="0000")
    assert not earlier.is_foreign()
    assert not earlier.owner_is_alive()


def test_owner_in_another_container_is_foreign() -> None:
    assert replace(new_label(), namespace="0000").is_foreign()


def test_without_an_id_of_the_machine_an_earlier_boot_is_foreign(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("harness.label.MACHINE_ID", tmp_path / "absent")
    label = new_label()
    monkeypatch.setattr("harness.label.BOOT_ID", tmp_path / "boot")
    (tmp_path / "boot").write_text("another")
    assert label.is_foreign()


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


SEGMENT_HOLDER = """
import mmap, sys, time
with open(sys.argv[1], "w+b") as file:
    file.truncate(4096)
    mapped = mmap.mmap(file.fileno(), 4096)
print("up", flush=True)
time.sleep(600)
"""


def holder_of(segment: Path, label: RunLabel | None) -> subprocess.Popen[bytes]:
    """Start a process that maps a segment of shared memory, with or without a label."""
    environment = os.environ if label is None else {**os.environ, LABEL_VARIABLE: str(label)}
    process = subprocess.Popen(
        [sys.executable, "-c", SEGMENT_HOLDER, str(segment)], env=environment, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    return process


def test_segments_of_killed_processes_go_whether_docker_answers_or_not(
    label: RunLabel, silent_docker: SilentDocker
) -> None:
    segment = SHARED_MEMORY / f"psm_{label}"
    process = holder_of(segment, label)
    try:
        left = sweep.end(label, limit_s=4.0)
        assert left.as_json() == {"unanswered": [left.unanswered]}
        assert not segment.exists()
    finally:
        process.kill()
        process.communicate(timeout=LIMIT_S)
        segment.unlink(missing_ok=True)


def test_segments_that_a_fault_wrote_down_go_unless_somebody_maps_them(label: RunLabel, tmp_path: Path) -> None:
    left, used = SHARED_MEMORY / f"psm_left_{label}", SHARED_MEMORY / f"psm_used_{label}"
    foreign = tmp_path / "foreign"
    for path in (left, foreign):
        path.write_bytes(b"x")
    process = holder_of(used, None)
    record = shared_memory_directory(label) / "scenario" / SEGMENTS_RECORD
    record.parent.mkdir(parents=True)
    record.write_text("\n".join((left.name, used.name, f"../..{foreign}", "..", "")))
    try:
        assert sweep.end(label, docker=False).is_empty()
        assert not left.exists()
        assert used.exists()
        assert foreign.exists()
    finally:
        process.kill()
        process.communicate(timeout=LIMIT_S)
        for path in (left, used):
            path.unlink(missing_ok=True)


def test_living_runs_and_foreign_ones_are_not_swept(label: RunLabel) -> None:
    living = new_label()
    foreign = replace(label, host="0000")
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
    other = labelled_process(replace(label, token="ffffff"))
    try:
        sweep.end(label, docker=False)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait(LIMIT_S)


def test_a_link_to_a_foreign_directory_is_neither_listed_nor_followed(label: RunLabel, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    (foreign / "inner").mkdir(parents=True)
    (foreign / "inner" / "precious").write_text("x")
    (foreign / "inner").chmod(0o500)
    link = SHARED_MEMORY / f"{DIRECTORY_PREFIX}{label}"
    link.symlink_to(foreign)
    work_directory(label).mkdir()
    (work_directory(label) / "link").symlink_to(foreign)
    (work_directory(label) / "deeper").symlink_to(foreign / "inner")
    try:
        assert sweep.find_of(label, docker=False).directories == (work_directory(label),)
        sweep.remove_directory(link)
        assert sweep.end(label, docker=False).is_empty()

        assert not work_directory(label).exists()
        assert link.is_symlink()
        assert (foreign / "inner" / "precious").read_text() == "x"
        assert (foreign / "inner").stat().st_mode & 0o777 == 0o500
    finally:
        link.unlink()


def test_a_directory_of_somebody_else_stays(label: RunLabel, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = work_directory(label)
    directory.mkdir(mode=0o500)
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: os.getuid() + 1)
        sweep.remove_directory(directory)
        assert sweep.find_of(label, docker=False).is_empty()
    assert directory.stat().st_mode & 0o777 == 0o500
    assert sweep.end(label, docker=False).is_empty()
    assert not directory.exists()


class SilentDocker:
    """Accepts connections on a socket and never answers."""

    def __init__(self, directory: Path) -> None:
        self.place = f"unix://{directory}/docker.sock"
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(f"{directory}/docker.sock")
        self.listener.listen(64)


@pytest.fixture
def silent_docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SilentDocker]:
    """Give a Docker engine that hangs, and little patience with it."""
    docker = SilentDocker(tmp_path)
    monkeypatch.setenv("DOCKER_HOST", docker.place)
    monkeypatch.setattr(sweep, "DOCKER_LIMIT_S", 1)
    yield docker
    docker.listener.close()


def test_docker_that_does_not_answer_is_not_an_empty_look(label: RunLabel, silent_docker: SilentDocker) -> None:
    work_directory(label).mkdir()

    left = sweep.find_of(label)
    assert left.directories == (work_directory(label),)
    assert "Docker did not answer: " in left.unanswered
    assert sweep.docker_unanswered() == left.unanswered
    assert next(found for found in sweep.find_of_dead_runs() if found.label == label).unanswered

    left = sweep.end(label, limit_s=0.5)
    assert not work_directory(label).exists(), "what can be ended is ended"
    assert not left.is_empty()
    assert left.as_json() == {"unanswered": [left.unanswered]}


@pytest.mark.parametrize("kind", ["absent", "refused", "tcp"])
def test_no_docker_here_is_an_empty_look(
    label: RunLabel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    with socket.socket(socket.AF_UNIX) as nobody_listens, socket.socket() as bound:
        nobody_listens.bind(f"{tmp_path}/refused")
        bound.bind(("127.0.0.1", 0))
        place = f"tcp://127.0.0.1:{bound.getsockname()[1]}" if kind == "tcp" else f"unix://{tmp_path}/{kind}"
        monkeypatch.setenv("DOCKER_HOST", place)
        assert sweep.find_of(label).is_empty()
        assert sweep.docker_unanswered() == ""


def test_an_error_of_docker_is_not_its_absence() -> None:
    error = HarnessError("no answer")
    error.__cause__ = TimeoutError("timed out")
    assert not docker_daemon.is_absent(error)
    error.__cause__.__context__ = ConnectionRefusedError()
    assert docker_daemon.is_absent(error)


def test_what_appears_late_is_ended_too(label: RunLabel, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    removed: list[str] = []

    def in_docker() -> tuple[list[tuple[str, str, str]], str]:
        looks.append(now_ns())
        is_there = len(looks) >= 3 and not removed
        return ([("containers", "late", str(label))] if is_there else []), ""

    monkeypatch.setattr(sweep, "_labelled_in_docker", in_docker)
    monkeypatch.setattr(sweep, "_remove_from_docker", lambda containers, networks: removed.extend(containers))

    assert sweep.end(label).is_empty()
    assert removed == [], "one empty look is enough where nothing can be under way"

    assert sweep.end(label, settle_s=0.8).is_empty()
    assert removed == ["late"]
    assert len(looks) >= 6, "after the last thing it looked again and again"
    assert seconds_between(looks[3], looks[-1]) >= 0.8


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


def test_a_watchdog_that_cannot_start_says_why(
    label: RunLabel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(HarnessError, match=r"the watchdog cannot be started: .*python"), watchdog.watch(label):
        pass
    broken.write_text("#!/bin/sh\necho No module named harness >&2\nexit 1\n")
    broken.chmod(0o755)
    with (
        pytest.raises(HarnessError, match=r"ended before it watched.*: No module named harness"),
        watchdog.watch(label),
    ):
        pass
    broken.write_text("#!/bin/sh\nread released\n")
    monkeypatch.setattr(watchdog, "UP_LIMIT_S", 0.3)
    with pytest.raises(HarnessError, match=r"the watchdog is up: not seen within 0\.3 s"), watchdog.watch(label):
        pass


def test_the_watchdog_is_ours_wherever_the_user_stands(
    label: RunLabel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "harness").mkdir()
    (tmp_path / "harness" / "__init__.py").write_text("raise SystemExit('another harness')")
    monkeypatch.chdir(tmp_path)
    with watchdog.watch(label) as pid:
        assert Path(f"/proc/{pid}").exists()


def test_whoever_has_the_number_of_a_listed_process_by_now_is_not_ended(
    label: RunLabel, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = labelled_process(replace(label, token="ffffff"))
    monkeypatch.setattr(sweep, "_labelled_processes", lambda: [(other.pid, str(label))])
    try:
        assert sweep.end(label, limit_s=0.3, docker=False).processes == (other.pid,)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait(LIMIT_S)
