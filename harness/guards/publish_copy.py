"""Copies a checkpoint as cheaply as the file system allows, and durably: reflink, else in the kernel, else hard links on request.

A reflink shares blocks until one side is written to, so it is as safe as a copy. A hard link is the same file under a
second name: whoever writes to one writes to both.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from harness.checkpoint.copy import FICLONE
from harness.errors import HarnessError, UsageError
from harness.guards.durable import sync

STEP_BYTES = 64 * 1024 * 1024  # of one system call, so that Ctrl-C is answered
CANNOT = frozenset({errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.ENOTTY})


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """How many files and bytes came about, and in which way."""

    files: int = 0
    reflinked_bytes: int = 0
    copied_bytes: int = 0
    linked_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        """Return the size of the whole checkpoint."""
        return self.reflinked_bytes + self.copied_bytes + self.linked_bytes

    def __str__(self) -> str:
        ways = {"reflink": self.reflinked_bytes, "copy": self.copied_bytes, "hard link": self.linked_bytes}
        used = [f"{size:,} bytes by {way}" for way, size in ways.items() if size]
        return f"{self.files} {'file' if self.files == 1 else 'files'}" + "".join(f", {each}" for each in used)


def copy_checkpoint(source: Path, target: Path, *, link: bool = False, leave_out: Collection[str] = ()) -> Copied:
    """Copy `source` to the new directory `target`, every byte on the disk; links in `source` are followed to files.

    `link` makes hard links instead. Names in `leave_out` are skipped at the top. Holes stay holes.
    Raises: UsageError when `source` holds something that is neither file nor directory, or a hard link cannot be made;
    HarnessError when something changes while it is copied; OSError when copying fails. `target` may be half there then.
    """
    target.mkdir(mode=0o755)
    before = source.stat()
    done = Copied()
    for entry in sorted(os.scandir(source), key=lambda entry: entry.name):
        path, inner = Path(entry.path), target / entry.name
        if entry.name in leave_out:
            continue
        if entry.is_dir(follow_symlinks=False):
            below = copy_checkpoint(path, inner, link=link)
            done = Copied(
                files=done.files + below.files,
                reflinked_bytes=done.reflinked_bytes + below.reflinked_bytes,
                copied_bytes=done.copied_bytes + below.copied_bytes,
                linked_bytes=done.linked_bytes + below.linked_bytes,
            )
        elif not entry.is_file():
            raise UsageError(f'"{path}" is a dangling link, a linked directory or no file, so it is not copied')
        elif link:
            size = _link(path, inner)
            done = replace(done, files=done.files + 1, linked_bytes=done.linked_bytes + size)
        else:
            size, is_shared = copy_durably(path, inner)
            way = "reflinked_bytes" if is_shared else "copied_bytes"
            done = replace(done, files=done.files + 1, **{way: getattr(done, way) + size})
    sync(target)
    if source.stat().st_mtime_ns != before.st_mtime_ns:
        raise HarnessError(f'files came or went in "{source}" while it was copied; publish it again once it rests')
    return done


def copy_durably(source: Path, target: Path) -> tuple[int, bool]:
    """Copy one file to a new path, writable by its owner; return its size and whether the two share blocks.

    Raises: HarnessError when the file changes meanwhile; OSError.
    """
    with source.open("rb", buffering=0) as reader, target.open("xb", buffering=0) as writer:
        before = os.fstat(reader.fileno())
        is_shared = _reflink(reader.fileno(), writer.fileno())
        if not is_shared:
            os.ftruncate(writer.fileno(), before.st_size)
            for begin, end in _filled(reader.fileno(), before.st_size):
                _copy_range(reader.fileno(), writer.fileno(), begin, end, source)
        _require_unchanged(source, before, os.fstat(reader.fileno()))
        os.fchmod(writer.fileno(), stat.S_IMODE(before.st_mode) | stat.S_IWUSR)
        os.utime(writer.fileno(), ns=(before.st_atime_ns, before.st_mtime_ns))
        os.fsync(writer.fileno())
    return before.st_size, is_shared


def _link(source: Path, target: Path) -> int:
    real = os.path.realpath(source)
    try:
        os.link(real, target)
    except OSError as error:
        if error.errno in (errno.EXDEV, errno.EPERM, errno.EMLINK):
            raise UsageError(
                f'no hard link to "{real}" can be made ({error.strerror}): publish without --link'
            ) from error
        raise
    sync(target)
    return target.stat().st_size


def _reflink(reader: int, writer: int) -> bool:
    try:
        fcntl.ioctl(writer, FICLONE, reader)
    except OSError as error:
        if error.errno in CANNOT:
            return False
        raise
    return True


def _filled(reader: int, size_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield where a file holds data, as (begin, end); the rest are holes."""
    end = 0
    while end < size_bytes:
        try:
            begin = os.lseek(reader, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # a hole up to the end
                return
            raise
        end = min(os.lseek(reader, begin, os.SEEK_HOLE), size_bytes)
        yield begin, end


def _copy_range(reader: int, writer: int, begin: int, end: int, source: Path) -> None:
    by_sendfile = False
    while begin < end:
        step = min(STEP_BYTES, end - begin)
        done = 0
        if not by_sendfile:
            try:
                done = os.copy_file_range(reader, writer, step, begin, begin)
            except OSError as error:
                if error.errno not in CANNOT:
                    raise
            by_sendfile = done == 0
        if by_sendfile:
            os.lseek(writer, begin, os.SEEK_SET)
            done = os.sendfile(writer, reader, begin, step)
        if done == 0:
            raise HarnessError(f'"{source}" ended at byte {begin:,}, expected {end:,}: it became shorter meanwhile')
        begin += done


def _require_unchanged(source: Path, before: os.stat_result, after: os.stat_result) -> None:
    seen = [(state.st_size, state.st_mtime_ns) for state in (before, after)]
    if seen[0] != seen[1]:
        raise HarnessError(
            f'"{source}" changed while it was copied: {before.st_size:,} bytes before, {after.st_size:,} after; '
            "publish it again once nothing writes to it"
        )
