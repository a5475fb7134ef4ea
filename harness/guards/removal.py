"""Removes one file or directory that was looked at before, and nothing that was put in its place or that a link leads to."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.errors import HarnessError
from harness.guards.holders import FileKey, key_of

OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove(path: Path, key: FileKey) -> None:
    """Remove what lies at `path`, an absolute path without links, if it still is the file or directory `key`.

    Every step from the root is taken without following links, and everything below relative to open directories.
    Raises: HarnessError when something else lies there now, another file system is mounted inside, or the system refuses;
    part of a directory may be gone then. Nothing at all when it has gone by itself.
    """
    try:
        with _opened(path.parent) as parent:
            status = os.stat(path.name, dir_fd=parent, follow_symlinks=False)
            _require_same(path, key, status)
            if not stat.S_ISDIR(status.st_mode):
                os.unlink(path.name, dir_fd=parent)
                return
            top = os.open(path.name, OPEN_DIRECTORY, dir_fd=parent)
            try:
                _require_same(path, key, os.fstat(top))
                _empty(path, top)
            finally:
                os.close(top)
            os.rmdir(path.name, dir_fd=parent)
    except FileNotFoundError:
        return
    except OSError as error:
        raise HarnessError(f'"{path}" cannot be removed: {error.strerror or error}') from error


@contextmanager
def _opened(directory: Path) -> Iterator[int]:
    """Open an absolute path step by step, so that a link put into it meanwhile ends the walk."""
    descriptor = os.open("/", OPEN_DIRECTORY)
    try:
        for name in directory.parts[1:]:
            inner = os.open(name, OPEN_DIRECTORY, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)


def _empty(path: Path, top: int) -> None:
    device = os.fstat(top).st_dev
    for _, directories, files, folder in os.fwalk(".", topdown=False, follow_symlinks=False, dir_fd=top):
        if os.fstat(folder).st_dev != device:
            raise HarnessError(f'"{path}" is not removed: another file system is mounted inside')
        for name in files:
            os.unlink(name, dir_fd=folder)
        for name in directories:
            if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=folder)
            else:
                os.rmdir(name, dir_fd=folder)


def _require_same(path: Path, key: FileKey, status: os.stat_result) -> None:
    if key_of(status) != key:
        raise HarnessError(f'"{path}" is not removed: something else was put there since it was looked at')
