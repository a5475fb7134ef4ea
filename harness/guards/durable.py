"""Changes to directories that happen in one step, and that are on the disk when a function returns."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

from harness.errors import HarnessError, UsageError

AT_FDCWD = -100
RENAME_EXCHANGE = 2
NOT_THERE = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})  # what file systems answer that cannot exchange


def exchange(source: Path, live: Path) -> Path:
    """Swap two directories of one file system in one step; return where the old one is now (the path of `source`).

    For a live path that must stay a real directory. `source` is made durable first.
    Raises: UsageError when either is not a real directory, or they lie on different file systems; HarnessError when the
    system cannot exchange.
    """
    for path in (source, live):
        if path.is_symlink() or not path.is_dir():
            raise UsageError(f'"{path}" is not a real directory')
    require_one_file_system(source, live)
    sync_tree(source)
    swap(source, live)
    return source


def swap(source: Path, live: Path) -> None:
    """Swap what two names stand for, and make it durable.

    Raises: HarnessError when the file system or the C library cannot, or something else is in the way.
    """
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "renameat2"):
        raise HarnessError(
            "this system's C library has no renameat2, so two directories cannot be exchanged in one step"
        )
    if library.renameat2(AT_FDCWD, os.fsencode(source), AT_FDCWD, os.fsencode(live), RENAME_EXCHANGE) != 0:
        code = ctypes.get_errno()
        raise HarnessError(f'"{source}" and "{live}" cannot be exchanged: {_why(code)}')
    for parent in {source.parent, live.parent}:
        sync(parent)


def _why(code: int) -> str:
    name = errno.errorcode.get(code, str(code))
    if code in NOT_THERE:
        return f"{name}: the file system cannot do that, or one lies inside the other; a live link needs no exchange"
    if code == errno.EBUSY:
        return f"{name}: a mount point cannot be renamed; mount the directory above it"
    return f"{name}: {os.strerror(code)}"


def require_one_file_system(one: Path, other: Path) -> None:
    """Make sure that a rename can lead from one directory to the other.

    Raises: UsageError.
    """
    if one.stat().st_dev != other.stat().st_dev:
        raise UsageError(
            f'"{one}" and "{other}" are on different file systems, so no rename can swap them: it would not be one step'
        )


def sync_tree(directory: Path) -> None:
    """Make every file and directory below `directory` durable."""
    for parent, _, files in os.walk(directory, topdown=False):
        for file in files:
            sync(Path(parent) / file)
        sync(Path(parent))


def sync(path: Path) -> None:
    """Make one file, or the names in one directory, durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
