"""A disk that is full before a copy is complete.

The disk is a small file system in memory over the live directory of the run, never the host's. It goes when the fault is
undone, and a sweep of the run takes it away like everything else. Source: taxonomy row D19.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from harness.engine.engine import EngineIdentity
from harness.errors import EnvironmentMissing, HarnessError
from harness.faults.fault import Acting, Injected, parameters_of
from harness.faults.publish import publishable

MOUNT_LIMIT_S = 30.0
PAGE_BYTES = 4096
BLOCK_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class FullDisk:
    """A copy over the live files on a disk that is full before the copy is complete."""

    name: ClassVar[str] = "full_disk"
    fault_id: ClassVar[str] = "D19"

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def require(self, identity: EngineIdentity) -> None:
        """Return where a small file system can be mounted: for root alone.

        Raises: EnvironmentMissing.
        """
        if os.geteuid() != 0:
            raise EnvironmentMissing("root", "a disk of its own, small enough to be full, can only be mounted by root")

    def start(self, source: Path, live: Path, *, random: Random) -> Acting:
        files = publishable(source, live)
        weights = max(files, key=lambda name: (source / name).stat().st_size)
        room = sum(path.stat().st_size + PAGE_BYTES for path in live.iterdir())
        mount = SmallDisk.over(live, size_bytes=room + 2 * BLOCK_BYTES)
        free_before = mount.free_bytes()
        stopped = ""
        try:
            for name in sorted(files, key=lambda name: name == weights):
                _copy_until_full(source / name, live / name, fill=mount.fill if name == weights else None)
        except OSError as error:
            stopped = "" if error.errno != errno.ENOSPC else f'"{error.filename or weights}": {error.strerror}'
            if not stopped:
                mount.leave()
                raise

        def prove() -> Injected:
            written = (live / weights).stat().st_size if (live / weights).exists() else 0
            wanted = (source / weights).stat().st_size
            return Injected.of(
                self,
                proved=bool(stopped) and written < wanted,
                because=f"the copy ended with {stopped or 'no error'}; {written:,} of {wanted:,} bytes of "
                f'"{weights}" are there, {mount.free_bytes():,} bytes of the disk are free ({free_before:,} before)',
                before={"free_bytes": free_before},
                after={"free_bytes": mount.free_bytes(), "written_bytes": written, "wanted_bytes": wanted},
            )

        return _OnSmallDisk(prove(), prove, mount)


@dataclass(slots=True)
class _OnSmallDisk:
    injected: Injected
    prove: Callable[[], Injected]
    mount: SmallDisk

    def state(self) -> Injected:
        """Prove it again from the disk, or repeat the first proof once the disk is gone."""
        return self.prove() if os.path.ismount(self.mount.place) else self.injected

    def finish(self, *, limit_s: float) -> None:
        """Take the small disk away: what lies under it is the old checkpoint."""
        self.mount.leave()


@dataclass(frozen=True, slots=True)
class SmallDisk:
    """A file system in memory over a directory of the run's own; a sweep of the run takes it away."""

    place: Path

    @classmethod
    def over(cls, place: Path, *, size_bytes: int) -> SmallDisk:
        """Mount it with a copy of what lies in `place`.

        Raises: HarnessError when it cannot be mounted.
        """
        kept = {path.name: path.read_bytes() for path in place.iterdir() if path.is_file()}
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size_bytes},mode=755", "rollout-harness", str(place)],
            capture_output=True,
            text=True,
            timeout=MOUNT_LIMIT_S,
            check=False,
        )
        if done.returncode != 0:
            raise HarnessError(f'no small disk can be mounted over "{place}": {done.stderr.strip()}')
        disk = cls(place)
        try:
            for name, content in kept.items():
                (place / name).write_bytes(content)
        except BaseException:
            disk.leave()
            raise
        return disk

    def free_bytes(self) -> int:
        """Return what can still be written."""
        return shutil.disk_usage(self.place).free

    def fill(self) -> None:
        """Let somebody else write until nothing is free."""
        block = b"\0" * BLOCK_BYTES
        with suppress(OSError), (self.place / ".other-tenant").open("wb", buffering=0) as filler:
            while filler.write(block) == BLOCK_BYTES:
                pass

    def leave(self) -> None:
        """Unmount it, also while somebody reads from it. Idempotent."""
        if os.path.ismount(self.place):
            command = ["umount", "--lazy", str(self.place)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=MOUNT_LIMIT_S, check=False)
            if os.path.ismount(self.place):
                raise HarnessError(f'the small disk over "{self.place}" cannot be unmounted: {done.stderr.strip()}')


def _copy_until_full(source: Path, target: Path, *, fill: Callable[[], None] | None) -> None:
    """Copy as `cp` does, over what is there; in the middle, another tenant of the disk takes what is free.

    Raises: OSError when the disk is full.
    """
    content = source.read_bytes()
    with target.open("wb", buffering=0) as writer:
        half = len(content) // 2
        writer.write(content[:half])
        if fill is not None:
            fill()
        view = memoryview(content)[half:]
        while view:
            view = view[writer.write(view) :]


def full_disk() -> FullDisk:
    """Publish by copying over the live files onto a disk that somebody else fills meanwhile. Source: taxonomy row D19."""
    return FullDisk()
