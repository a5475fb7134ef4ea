"""One publish at a time, or one of anything else: a lock that the system frees when its holder dies, and that says who holds it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.clock import poll_until, wall_time
from harness.errors import HarnessError, WaitExpired
from harness.guards.finding import printable, shortened

LOCK = ".publish.lock"
HOLDER_LIMIT_BYTES = 4096


@contextmanager
def locked(root: Path, *, limit_s: float) -> Iterator[None]:
    """Hold the lock of `root`, waiting for another holder up to `limit_s`; 0 asks once.

    Raises: HarnessError naming the holder when it goes on for longer.
    """
    with held_lock(root / LOCK, limit_s=limit_s, taken=f'"{root}" is being published to'):
        yield


@contextmanager
def held_lock(path: Path, *, limit_s: float, taken: str) -> Iterator[None]:
    """Hold a lock file, waiting for another holder up to `limit_s`; `taken` begins the sentence that names that one.

    Raises: HarnessError naming the holder when it goes on for longer.
    """

    def take() -> bool:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True

    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        try:
            poll_until(take, what=f'lock "{path}"', limit_s=limit_s)
        except WaitExpired:
            waited = f"after {limit_s:g} s of waiting" if limit_s else "and was not waited for"
            raise HarnessError(f"{taken} by {_holder(descriptor)}, {waited}") from None
        _note(descriptor, {"pid": os.getpid(), "host": os.uname().nodename, "since": wall_time()})
        try:
            yield
        finally:
            _note(descriptor, None)
    finally:
        os.close(descriptor)


def _note(descriptor: int, holder: dict[str, object] | None) -> None:
    with contextlib.suppress(OSError):  # a full disk: then nobody is named, and the lock holds all the same
        os.ftruncate(descriptor, 0)
        if holder is not None:
            os.pwrite(descriptor, json.dumps(holder).encode(), 0)


def _holder(descriptor: int) -> str:
    try:
        said = json.loads(os.pread(descriptor, HOLDER_LIMIT_BYTES, 0))
        return printable(shortened(f'process {int(said["pid"])} on "{said["host"]}" since {said["since"]}'))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "another process, which did not say who it is"
