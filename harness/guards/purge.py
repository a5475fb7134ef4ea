"""List and empty the weight cache: the documented remedy for stale tensors in shared memory.

Layout: `<root>/<entry>/{meta.json,tensors.bin,complete}`. Everything is done relative to open directories without following
links, and a directory that holds anything else is refused, so that a wrong path costs nothing.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.errors import UsageError

ENTRY_FILES = ("complete", "meta.json", "tensors.bin")  # removed in this order: an engine never trusts half an entry
ENTRY_NAME = re.compile(r"^[0-9a-f]{8,64}(\.[0-9]+\.partial)?$")
ROUNDS = 5
META_LIMIT_BYTES = 16 * 1024 * 1024
OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEntry:
    """One checkpoint's tensors in the cache. `model` is what it was filled for, as far as the entry says."""

    name: str
    size_bytes: int
    is_complete: bool
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PurgeReport:
    """What a purge removed."""

    removed: tuple[CacheEntry, ...]

    @property
    def size_bytes(self) -> int:
        """Return how much shared memory the removed entries held."""
        return sum(entry.size_bytes for entry in self.removed)

    def __str__(self) -> str:
        return f"{len(self.removed)} entries, {self.size_bytes:,} bytes"


def list_cache(root: Path) -> tuple[CacheEntry, ...]:
    """Return the entries of a weight cache, by name; none when the directory is absent.

    Raises: UsageError when the directory holds anything else, so is no weight cache.
    """
    with _opened(root) as directory:
        if directory is None:
            return ()
        entries = [_entry(root, directory, name) for name in sorted(os.listdir(directory))]
    return tuple(entry for entry in entries if entry is not None)


def purge(root: Path, *, keep: frozenset[str] = frozenset()) -> PurgeReport:
    """Remove every entry of a weight cache but those named in `keep`; the directory itself stays. Idempotent.

    Engines that have an entry mapped keep what they mapped; the next start reads the checkpoint. An engine that fills an
    entry at this moment may finish it just after: purge before the start, never beside it.
    Raises: UsageError when the directory holds anything that is no cache entry (nothing is removed), or when entries
    come back as fast as they are removed.
    """
    removed: dict[str, CacheEntry] = {}
    for _ in range(ROUNDS):
        found = list_cache(root)  # refuses before anything is removed
        entries = [entry for entry in found if _finished_name(entry.name) not in map(_finished_name, keep)]
        if not entries:
            return PurgeReport(removed=tuple(removed.values()))
        removed |= {entry.name: entry for entry in entries}
        with _opened(root) as directory:
            if directory is not None:
                for entry in entries:
                    _remove(directory, entry.name)
    raise UsageError(f'"{root}" still has entries after {ROUNDS} rounds: stop the engines that fill it first')


def _finished_name(name: str) -> str:
    """Return what an entry is called once it is filled."""
    return name.partition(".")[0]


@contextmanager
def _opened(root: Path) -> Iterator[int | None]:
    try:
        directory = os.open(root, OPEN_DIRECTORY)
    except FileNotFoundError:
        yield None
        return
    except OSError as error:
        what = "a symbolic link" if root.is_symlink() else error.strerror or str(error)
        raise UsageError(f'"{root}" is not a weight cache: {what}, expected a directory') from None
    try:
        yield directory
    finally:
        os.close(directory)


def _entry(root: Path, directory: int, name: str) -> CacheEntry | None:
    """Describe one entry; None when it has gone meanwhile."""

    def refuse(what: str) -> UsageError:
        return UsageError(f'"{root}" is not a weight cache, nothing was removed: "{name}" {what}')

    if not ENTRY_NAME.match(name):
        raise refuse("is not the name of a cache entry")
    try:
        inner = os.open(name, OPEN_DIRECTORY, dir_fd=directory)
    except FileNotFoundError:
        return None
    except OSError:
        raise refuse("is not a directory that can be read") from None
    try:
        files = os.listdir(inner)
        size = 0
        for file in files:
            status = os.stat(file, dir_fd=inner, follow_symlinks=False)
            if file not in ENTRY_FILES or not stat.S_ISREG(status.st_mode):
                raise refuse(f'holds "{file}", expected only the files {", ".join(ENTRY_FILES)}')
            size += status.st_size
        model = _model(inner) if "meta.json" in files else ""
    except FileNotFoundError:
        return None
    finally:
        os.close(inner)
    return CacheEntry(name=name, size_bytes=size, is_complete="complete" in files, model=model)


def _model(inner: int) -> str:
    """Return what the entry says that it was filled for; what it says is only shown, never used as a path."""
    try:
        with os.fdopen(os.open("meta.json", os.O_RDONLY | os.O_NOFOLLOW, dir_fd=inner), "rb") as file:
            meta = json.loads(file.read(META_LIMIT_BYTES))
    except (OSError, ValueError, RecursionError):
        return ""
    return str(meta.get("model", ""))[:500] if isinstance(meta, dict) else ""


def _remove(directory: int, name: str) -> None:
    """Remove one entry's files, then the entry; what is renamed or written to meanwhile is left for the next round.

    Raises: UsageError when this user may not remove it.
    """
    try:
        inner = os.open(name, OPEN_DIRECTORY, dir_fd=directory)
        try:
            for file in ENTRY_FILES:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(file, dir_fd=inner)
        finally:
            os.close(inner)
        os.rmdir(name, dir_fd=directory)
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise UsageError(f'the cache entry "{name}" cannot be removed: {error.strerror}') from error
