"""Put a checkpoint where an engine reads it so that a reader sees the whole old or the whole new one, never a mixture.

Layout: `<root>/versions/<number>/` and `<root>/<name>` -> `versions/<number>`, a relative link replaced by rename: it also
holds inside a container that mounts the parent. Where the live path must stay a real directory, `exchange` swaps two.
A running engine never notices either; it has to be started anew.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.checkpoint.copy import private_copy
from harness.clock import poll_until
from harness.errors import HarnessError, UsageError

VERSIONS = "versions"
READY = ".ready"  # written last into a version: without it, the version is unfinished
UNFINISHED = ".unfinished-"
KEPT_VERSIONS = 3
LOCK_LIMIT_S = 60.0
AT_FDCWD = -100
RENAME_EXCHANGE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Where the new version lies, and the version that was live before."""

    version_path: Path
    previous: Path | None


def publish(source: Path, root: Path, *, name: str = "live", keep: int = KEPT_VERSIONS) -> Published:
    """Copy a checkpoint into a new version and make it live; `keep` versions stay for a rollback.

    Raises: UsageError when `source` is no directory, or the live path is a real directory or a link elsewhere;
    WaitExpired when another publish holds the root; OSError when the disk is full (the old version stays live).
    """
    if not source.is_dir():
        raise UsageError(f'the checkpoint "{source}" is not a directory')
    if keep < 1:
        raise UsageError(f"keep is {keep}, expected at least 1")
    versions = root / VERSIONS
    versions.mkdir(parents=True, exist_ok=True)
    with _locked(root):
        previous = _live(root, name)
        _require_one_file_system(root, versions)
        for leftover in versions.glob(f"{UNFINISHED}*"):  # of a publish that was killed
            shutil.rmtree(leftover)
        number = max((int(path.name) for path in versions.iterdir() if _is_number(path.name)), default=0) + 1
        unfinished = versions / f"{UNFINISHED}{number}"
        try:
            private_copy(source, unfinished)
            _sync_tree(unfinished)
            (unfinished / READY).touch()
            _sync(unfinished)
            version = versions / str(number)
            unfinished.rename(version)
            _sync(versions)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        _switch(root, name, version)
        _drop_old(versions, keep, used={version, previous})
    return Published(version_path=version, previous=previous)


def rollback(root: Path, *, name: str = "live") -> Published:
    """Make the newest finished version before the live one live again, by one rename.

    Raises: UsageError when nothing is live or no earlier version is kept.
    """
    versions = root / VERSIONS
    if not versions.is_dir():
        raise UsageError(f'nothing was ever published in "{root}"')
    with _locked(root):
        current = _live(root, name)
        if current is None:
            raise UsageError(f'nothing is live under "{root / name}", so there is nothing to roll back')
        earlier = [number for number in _numbers(versions) if number < int(current.name)]
        if not earlier:
            raise UsageError(f'no version before {current.name} is kept in "{versions}"')
        version = versions / str(max(earlier))
        _switch(root, name, version)
    return Published(version_path=version, previous=current)


def exchange(source: Path, live: Path) -> Path:
    """Swap two directories of one file system in one step; return where the old one is now (the path of `source`).

    For a live path that must stay a real directory. `source` is made durable first.
    Raises: UsageError when either is not a real directory, or they lie on different file systems; HarnessError when the
    system cannot exchange.
    """
    for path in (source, live):
        if path.is_symlink() or not path.is_dir():
            raise UsageError(f'"{path}" is not a real directory')
    if source.stat().st_dev != live.stat().st_dev:
        raise UsageError(f'"{source}" and "{live}" are on different file systems, so no rename can swap them')
    _sync_tree(source)
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "renameat2"):
        raise HarnessError(
            "this system's C library has no renameat2, so two directories cannot be exchanged in one step"
        )
    if library.renameat2(AT_FDCWD, os.fsencode(source), AT_FDCWD, os.fsencode(live), RENAME_EXCHANGE) != 0:
        code = ctypes.get_errno()
        raise HarnessError(f'"{source}" and "{live}" cannot be exchanged: {errno.errorcode.get(code, code)}')
    for parent in {source.parent, live.parent}:
        _sync(parent)
    return source


def versions_of(root: Path) -> tuple[Path, ...]:
    """Return the finished versions, oldest first."""
    return tuple(root / VERSIONS / str(number) for number in sorted(_numbers(root / VERSIONS)))


def _numbers(versions: Path) -> list[int]:
    if not versions.is_dir():
        return []
    return [int(path.name) for path in versions.iterdir() if _is_number(path.name) and (path / READY).is_file()]


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdecimal()


def _live(root: Path, name: str) -> Path | None:
    """Return the version that is live; None when there is none yet."""
    if name in ("", ".", "..", VERSIONS) or "/" in name:
        raise UsageError(f'"{name}" cannot be the name of the live checkpoint')
    link = root / name
    if not os.path.lexists(link):
        return None
    if not link.is_symlink():
        raise UsageError(f'"{link}" is not a link: publish elsewhere, or exchange it with a directory')
    target = os.readlink(link)
    parent, _, number = target.partition("/")
    if parent != VERSIONS or not _is_number(number):
        raise UsageError(f'"{link}" points to "{target}", expected a version in "{VERSIONS}/": it is left as it is')
    return root / VERSIONS / number


def _switch(root: Path, name: str, version: Path) -> None:
    """Point the live link to a version: a new link, renamed over the old one."""
    new = root / f".{name}.{os.getpid()}.new"
    new.unlink(missing_ok=True)
    new.symlink_to(f"{VERSIONS}/{version.name}")
    try:
        new.replace(root / name)
    finally:
        new.unlink(missing_ok=True)
    _sync(root)


def _drop_old(versions: Path, keep: int, *, used: set[Path | None]) -> None:
    for number in sorted(_numbers(versions))[:-keep]:
        version = versions / str(number)
        if version not in used:
            doomed = versions / f"{UNFINISHED}{number}"  # so that a half-removed version is never taken for a whole one
            version.rename(doomed)
            shutil.rmtree(doomed)


def _require_one_file_system(root: Path, versions: Path) -> None:
    if root.stat().st_dev != versions.stat().st_dev:
        raise UsageError(f'"{versions}" is on another file system than "{root}", so publishing would not be atomic')


def _sync_tree(directory: Path) -> None:
    for parent, _, files in os.walk(directory, topdown=False):
        for file in files:
            _sync(Path(parent) / file)
        _sync(Path(parent))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Hold the root's lock: one publish at a time; the system frees it if the publisher is killed."""

    def take() -> bool:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True

    descriptor = os.open(root / ".publish.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        poll_until(take, what=f'lock of "{root}", held by another publish', limit_s=LOCK_LIMIT_S)
        yield
    finally:
        os.close(descriptor)
