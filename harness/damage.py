"""`harness damage`: write a damaged copy of a checkpoint or of an adapter, and prove what is wrong with it.

The copy shares what was not damaged with the original: by reflink where the file system can, else by hard link, which is
only safe while nobody writes to the copy. It is made beside its place and renamed to it, whole, when the proof holds.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from harness.checkpoint.adapter import ADAPTER_WEIGHTS
from harness.checkpoint.copy import copy_file
from harness.errors import FaultNotProved, HarnessError, UsageError
from harness.faults import Damage, Injected
from harness.faults.fault import AdapterFault
from harness.faults.target import refuse_overlap

LINKED_BYTES_MIN = 1024 * 1024  # smaller files are copied: they are the ones that people edit
READ_ONLY = 0o555
SHARES = ("auto", "reflink", "none")


@dataclass(slots=True)
class Shared:
    """Which files of a copy (device and inode) have their bytes in common with the original, and how."""

    reflinked: set[tuple[int, int]] = field(default_factory=set)
    linked: set[tuple[int, int]] = field(default_factory=set)


@dataclass(frozen=True, slots=True, kw_only=True)
class Damaged:
    """A damaged copy: the proof, and which of its files are shared with the original by hard link."""

    out: Path
    injected: Injected
    files: int
    linked: tuple[str, ...]
    reflinked: tuple[str, ...]
    written_bytes: int  # of files that the copy does not share

    def as_json(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        return {
            "out": str(self.out),
            "fault": self.injected.fault,
            "fault_id": self.injected.fault_id,
            "proved": self.injected.proved,
            "because": self.injected.because,
            "before": dict(self.injected.before),
            "after": dict(self.injected.after),
            "files": self.files,
            "linked": list(self.linked),
            "reflinked": list(self.reflinked),
            "written_bytes": self.written_bytes,
        }


def damage_copy(
    source: Path,
    out: Path,
    fault: Damage | AdapterFault,
    *,
    old: Path | None = None,
    base: Path | None = None,
    seed: int = 0,
    share: str = "auto",
) -> Damaged:
    """Write a copy of `source` with one fault to `out`, which must be absent or empty; no file of `source` changes.

    `old` is the checkpoint before this one. Where the fault is of an adapter, that is `source`, and `base` its checkpoint.
    `share`: "auto" takes reflinks, else hard links, else copies; "reflink" no hard links; "none" copies everything.
    Raises: UsageError when directories cannot be used so; FaultNotApplicable; FaultNotProved, and then nothing is left.
    """
    source, out = source.absolute(), out.absolute()
    other = base if isinstance(fault, AdapterFault) else old
    other = source if other is None else other.absolute()
    for directory in (source, other):
        if not directory.is_dir():
            raise UsageError(f'"{directory}" is not a directory')
        refuse_overlap(out, directory)
    if isinstance(fault, AdapterFault) and not (source / ADAPTER_WEIGHTS).is_file():
        raise UsageError(f'"{source}" has no "{ADAPTER_WEIGHTS}", expected the directory of a LoRA adapter')
    _require_free(out)
    with _unfinished(out) as partial:
        shared = _copy(source, partial, share)
        try:
            if isinstance(fault, AdapterFault):
                injected = fault.distort(partial, base=other)
            else:
                injected = fault.damage(partial, old=other, random=Random(seed))
        except HarnessError as error:  # the directory that it names will be gone
            error.args = tuple(str(each).replace(str(partial), str(source)) for each in error.args)
            raise
        if not injected.proved:
            raise FaultNotProved(f'"{fault.name}" did not happen, so nothing was written: {injected.because}')
        damaged = _described(partial, out, injected, shared)
        if damaged.linked:  # whoever writes to them writes to the original: at least nobody does so by accident
            for directory in _directories(partial):
                directory.chmod(READ_ONLY)
        partial.rename(out)
    return damaged


def _require_free(out: Path) -> None:
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise UsageError(f'"{out}" exists and is no directory, expected a new or empty one')
    if out.is_dir() and any(out.iterdir()):
        raise UsageError(f'"{out}" is not empty, expected a new or empty directory')


@contextmanager
def _unfinished(out: Path) -> Iterator[Path]:
    """Make a directory beside `out`, held by a lock; remove it at the end unless it has become `out`.

    One that was left by a killed call holds no lock, and is removed first.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    for left in out.parent.glob(f".{out.name}.*.damaging"):
        with _locked(left) as is_mine:
            if is_mine:
                _remove(left)
    partial = out.parent / f".{out.name}.{os.urandom(4).hex()}.damaging"
    partial.mkdir(mode=0o755)
    with _locked(partial):
        try:
            yield partial
        finally:
            if partial.exists():
                _remove(partial)


@contextmanager
def _locked(directory: Path) -> Iterator[bool]:
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def _remove(directory: Path) -> None:
    """Remove a directory of ours, read-only or not; files are unlinked, which leaves their other names alone."""
    for each in _directories(directory):
        each.chmod(0o755)
    shutil.rmtree(directory)


def _directories(directory: Path) -> tuple[Path, ...]:
    return (directory, *(each for each in directory.rglob("*") if each.is_dir() and not each.is_symlink()))


def _copy(source: Path, target: Path, share: str) -> Shared:
    """Copy every file, the smallest first: whether those are reflinks says whether the file system can."""
    shared = Shared()
    can_reflink = False
    for name in sorted(_files_below(source), key=lambda name: ((source / name).stat().st_size, name)):
        original, copy = Path(os.path.realpath(source / name)), target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if share == "auto" and not can_reflink and original.stat().st_size >= LINKED_BYTES_MIN:
            try:
                os.link(original, copy)
            except OSError:
                pass  # another file system, or a file of another user: it is copied
            else:
                shared.linked.add(_identity(copy))
                continue
        if copy_file(original, copy, share=share != "none"):
            can_reflink = True
            shared.reflinked.add(_identity(copy))
    return shared


def _files_below(directory: Path, prefix: str = "") -> Iterator[str]:
    for entry in os.scandir(directory):
        if entry.is_dir(follow_symlinks=False):
            yield from _files_below(Path(entry.path), f"{prefix}{entry.name}/")
        elif entry.is_file():
            yield prefix + entry.name
        else:
            raise UsageError(f'"{entry.path}" is a dangling link, a linked directory or no file, so it is not copied')


def _identity(path: Path) -> tuple[int, int]:
    status = path.lstat()
    return status.st_dev, status.st_ino


def _described(partial: Path, out: Path, injected: Injected, shared: Shared) -> Damaged:
    files = {
        str(path.relative_to(partial)): path for path in partial.rglob("*") if not path.is_dir() or path.is_symlink()
    }
    linked = tuple(sorted(name for name, path in files.items() if _identity(path) in shared.linked))
    reflinked = tuple(sorted(name for name, path in files.items() if _identity(path) in shared.reflinked))
    written = sum(path.lstat().st_blocks * 512 for name, path in files.items() if name not in {*linked, *reflinked})
    return Damaged(
        out=out, injected=injected, files=len(files), linked=linked, reflinked=reflinked, written_bytes=written
    )
