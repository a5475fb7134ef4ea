"""A signal reaches the process that is meant and no other, and the kernel's words about what it reads are understood."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.engine.proc import FileId, Proc, find, signal_if

LIMIT_S = 10.0
MIB = 1024 * 1024


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def proc_of(process: subprocess.Popen[bytes]) -> Proc:
    found = find(process.pid)
    assert found is not None
    return found


def test_a_signal_reaches_the_process_that_was_listed(sleeper: subprocess.Popen[bytes]) -> None:
    assert proc_of(sleeper).signal(signal.SIGTERM)
    assert sleeper.wait(LIMIT_S) == -signal.SIGTERM


def test_a_later_process_of_the_same_number_is_not_hit(sleeper: subprocess.Popen[bytes]) -> None:
    listed = proc_of(sleeper)
    earlier = Proc(listed.pid, listed.start_ticks - 1)
    assert not earlier.signal(signal.SIGKILL)
    assert listed.is_running()


def test_a_process_that_is_gone_gets_nothing(sleeper: subprocess.Popen[bytes]) -> None:
    listed = proc_of(sleeper)
    sleeper.kill()
    sleeper.wait(LIMIT_S)
    assert not listed.signal(signal.SIGKILL)


def test_who_takes_the_number_over_after_the_look_is_not_hit(sleeper: subprocess.Popen[bytes]) -> None:
    """The number is free once the process has ended and was reaped: what is held is the process, not its number."""

    def is_meant() -> bool:
        sleeper.kill()
        sleeper.wait(LIMIT_S)
        return True

    assert not signal_if(sleeper.pid, signal.SIGKILL, is_meant)


def test_a_signal_that_is_not_allowed_is_said(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(signal, "pidfd_send_signal", refuse)
    with pytest.raises(PermissionError):
        proc_of(sleeper).signal(signal.SIGTERM)


def test_what_was_read_of_a_file_is_known_by_its_pages_and_by_its_descriptors(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(16 * MIB))
    file, own = FileId.of(path), find(os.getpid())
    assert own is not None
    assert (own.mapped_in_bytes(file), own.read_to_byte(file)) == (0, 0)
    with path.open("rb", buffering=0) as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert own.read_to_byte(file) == 0
        opened.read(5 * MIB)
        assert own.read_to_byte(file) == 5 * MIB
        assert own.mapped_in_bytes(file) <= 4 * MIB
        sum(mapped[place] for place in range(0, 8 * MIB, mmap.PAGESIZE))
        assert 8 * MIB <= own.mapped_in_bytes(file) <= 10 * MIB
        sum(mapped[place] for place in range(0, 16 * MIB, mmap.PAGESIZE))
        assert own.mapped_in_bytes(file) == 16 * MIB
    assert (own.mapped_in_bytes(file), own.read_to_byte(file)) == (0, 0)
