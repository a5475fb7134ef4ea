"""Whoever uses a file is named, and what cannot be seen is said."""

from __future__ import annotations

import builtins
import fcntl
import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from harness.guards import holders
from harness.guards.holders import FileKey, look

CHILD = """
import fcntl, mmap, sys
how, path = sys.argv[1:]
file = open(path, "r+b")
if how == "maps":
    mapped = mmap.mmap(file.fileno(), 0)
    file.close()
elif how == "locks":
    fcntl.flock(file, fcntl.LOCK_EX)
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def child(how: str, path: Path) -> Iterator[int]:
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, how, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield process.pid
        finally:
            process.kill()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(bytes(5000))
    return path


def key(path: Path) -> FileKey:
    return holders.key_of(path.lstat())


@pytest.mark.parametrize(
    ("how", "expected"), [("maps", {"maps", "opened"}), ("opens", {"opened"}), ("locks", {"opened", "locks"})]
)
def test_another_process_is_named(file: Path, how: str, expected: set[str]) -> None:
    with child(how, file) as pid:
        sight = look({key(file)})
        assert {holder.pid for holder in sight.of([key(file)])} == {pid}
        assert {holder.how for holder in sight.of([key(file)])} == expected
        assert f"process {pid} (" in str(sight.of([key(file)])[0])
    assert look({key(file)}).of([key(file)]) == ()


def test_only_what_was_asked_for_is_told(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"x")
    with other.open() as opened, file.open("rb") as mapped, mmap.mmap(mapped.fileno(), 0, access=mmap.ACCESS_READ):
        fcntl.flock(opened, fcntl.LOCK_SH)
        sight = look({key(file)})
    assert sight.of([key(other)]) == ()
    assert {holder.how for holder in sight.of([key(file), key(other)])} == {"maps", "opened"}
    assert sight.looked_at > 0


def test_a_socket_somebody_listens_on(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        (holder,) = look({key(path)}, sockets=[path]).of([key(path)])
        assert str(holder) == "a process listens on it"
    assert look({key(path)}, sockets=[path]).of([key(path)]) == ()


def test_what_may_not_be_looked_into_is_counted(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.open

    def refuse(path: Any, *arguments: Any, **options: Any) -> Any:
        if str(path) == f"/proc/{os.getpid()}/maps":
            raise PermissionError(13, "Permission denied")
        return real(path, *arguments, **options)

    monkeypatch.setattr(builtins, "open", refuse)
    monkeypatch.setattr(holders, "_namespace", lambda: 4026532000)
    with file.open("rb"):
        sight = look({key(file)})
    assert sight.closed >= 1
    assert sight.of([key(file)]) == ()
    assert f"{sight.closed} could not be looked into" in str(sight)
    assert "processes of other PID namespaces are invisible here" in str(sight)
