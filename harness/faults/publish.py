"""Wrong ways to publish a checkpoint: a sync that still runs, a move that nests, files or blocks written over in place.

Source: incident write-up (service started before the files were synced; `mv new live`); taxonomy rows D17, D18, D19.
Nothing here outlives the process: a slow copy is a daemon thread.
"""

from __future__ import annotations

import filecmp
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from harness.checkpoint.copy import private_copy, refuse_shared
from harness.errors import FaultNotApplicable, ScenarioInvalid, UsageError
from harness.faults.facts import file_facts, loaded_weights_id
from harness.faults.fault import Acting, Injected, parameters_of
from harness.faults.slow_copy import SlowCopy
from harness.faults.target import refuse_overlap

ORDERS = ("small_first", "weights_first")
MOVE_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Finished:
    """A publish fault that had run its course when `start` returned."""

    injected: Injected
    prove: Callable[[], Injected]

    def state(self) -> Injected:
        """Prove it again from the disk."""
        return self.prove()

    def finish(self, *, limit_s: float) -> None:
        """Do nothing: nothing runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowSync:
    """A rate-limited copy into the live directory that still runs when the engine starts."""

    name: ClassVar[str] = "slow_sync"
    fault_id: ClassVar[str] = "D19"
    rate_bytes_per_s: float | None
    duration_s: float | None
    order: str
    preallocate: bool

    def __post_init__(self) -> None:
        if (self.rate_bytes_per_s is None) == (self.duration_s is None):
            raise ScenarioInvalid("slow_sync: expected either rate_bytes_per_s or duration_s")
        if not (self.rate_bytes_per_s or self.duration_s or 0) > 0:
            raise ScenarioInvalid("slow_sync: rate_bytes_per_s or duration_s must be above 0")
        if self.order not in ORDERS:
            raise ScenarioInvalid(f'slow_sync: order "{self.order}" is unknown; known: {", ".join(ORDERS)}')

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def start(self, source: Path, live: Path, *, random: Random) -> Acting:
        files = publishable(source, live)
        weights = [name for name in files if name.endswith(".safetensors")]
        small = [name for name in files if name not in weights]
        if not weights:
            raise FaultNotApplicable(f'no safetensors file in "{source}" to copy slowly')
        total = sum((source / name).stat().st_size for name in weights)
        rate = self.rate_bytes_per_s or total / (self.duration_s or 1.0)
        if self.order == "small_first":
            for name in small:
                shutil.copyfile(source / name, live / name)
        copy = SlowCopy(
            fault=self,
            source=source,
            live=live,
            slow=weights,
            afterwards=small if self.order == "weights_first" else [],
            rate_bytes_per_s=rate,
            preallocate=self.preallocate,
        )
        copy.start()
        return copy


@dataclass(frozen=True, slots=True, kw_only=True)
class NestedMove:
    """`mv new live` where `live` exists: the new directory ends up inside the old one."""

    name: ClassVar[str] = "nested_move"
    fault_id: ClassVar[str] = "D17"

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def start(self, source: Path, live: Path, *, random: Random) -> Acting:
        publishable(source, live)
        wanted = loaded_weights_id(source)
        before = _top_level(live)
        staging = Path(tempfile.mkdtemp(prefix="staging-", dir=live.parent))
        try:
            staged = private_copy(source, staging / "new")
            done = subprocess.run(
                ["mv", "--", str(staged), str(live)], capture_output=True, text=True, timeout=MOVE_LIMIT_S, check=False
            )
        finally:
            shutil.rmtree(staging)

        def prove() -> Injected:
            nested = live / "new"
            found = loaded_weights_id(nested)
            is_same_above = _top_level(live) == before
            return Injected.of(
                self,
                proved=done.returncode == 0 and found is not None and found == wanted and is_same_above,
                because=f'"mv" ended with exit code {done.returncode} {done.stderr.strip()}; "live/{nested.name}" holds {found}, '
                f"the new checkpoint is {wanted}; the files beside it {'are as before' if is_same_above else 'changed'}",
                before={"live_files": before, "new_weights_id": wanted},
                after={"exit_code": done.returncode, "nested_weights_id": found, "live_files_unchanged": is_same_above},
            )

        return Finished(prove(), prove)


@dataclass(frozen=True, slots=True, kw_only=True)
class OverwriteInPlace:
    """New files written over the live ones, as `cp` does: same inodes, other bytes."""

    name: ClassVar[str] = "overwrite_in_place"
    fault_id: ClassVar[str] = "D18"

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def start(self, source: Path, live: Path, *, random: Random) -> Acting:
        files = publishable(source, live)
        inodes = {name: (live / name).stat().st_ino for name in files if (live / name).exists()}
        changed = [name for name in inodes if not filecmp.cmp(source / name, live / name, shallow=False)]
        before = {name: file_facts(live / name) for name in inodes}
        for name in files:
            shutil.copyfile(source / name, live / name)

        def prove() -> Injected:
            present = [name for name in files if (live / name).exists()]
            same = [name for name in present if filecmp.cmp(source / name, live / name, shallow=False)]
            moved = [name for name in changed if name not in present or (live / name).stat().st_ino != inodes[name]]
            return Injected.of(
                self,
                proved=same == files and bool(changed) and not moved,
                because=f"{len(same)} of {len(files)} live files hold the new bytes; {len(changed)} of them held others "
                f"before, {len(moved)} of those under another inode",
                before={"files": before},
                after={"files": {name: file_facts(live / name) for name in files}, "overwritten": changed},
            )

        return Finished(prove(), prove)


@dataclass(frozen=True, slots=True, kw_only=True)
class RsyncInPlace:
    """Changed blocks written into the live files while an engine may map them, as `rsync --inplace` does."""

    name: ClassVar[str] = "rsync_in_place"
    fault_id: ClassVar[str] = "D18"
    duration_s: float

    def __post_init__(self) -> None:
        if not self.duration_s > 0:
            raise ScenarioInvalid(f"rsync_in_place: duration_s must be above 0, got {self.duration_s}")

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def start(self, source: Path, live: Path, *, random: Random) -> Acting:
        files = publishable(source, live)
        weights = [name for name in files if name.endswith(".safetensors")]
        if not weights:
            raise FaultNotApplicable(f'no safetensors file in "{source}" to write block by block')
        for name in files:
            if name not in weights:
                shutil.copyfile(source / name, live / name)
        total = sum((source / name).stat().st_size for name in weights)
        rate = total / self.duration_s
        copy = SlowCopy(
            fault=self, source=source, live=live, slow=weights, afterwards=[], rate_bytes_per_s=rate, in_place=True
        )
        copy.start()
        return copy


def publishable(source: Path, live: Path) -> list[str]:
    """Return the names of the files to publish, when `live` is a real directory of files that nobody shares.

    Raises: FaultNotApplicable.
    """
    if live.is_symlink() or not live.is_dir():
        raise FaultNotApplicable(f'"{live}" is not a real directory: this way to publish needs one that is served')
    refuse_overlap(source, live)
    try:
        for path in live.rglob("*"):
            if path.is_symlink() or not path.is_dir():
                refuse_shared(path)
    except (OSError, UsageError) as error:
        raise FaultNotApplicable(f"a fault may not change a file that is not its own: {error}") from error
    files = sorted(path.name for path in source.iterdir() if path.is_file())
    if not files:
        raise FaultNotApplicable(f'no file in "{source}" to publish')
    return files


def _top_level(live: Path) -> dict[str, Any]:
    return {path.name: file_facts(path) for path in sorted(live.iterdir()) if path.is_file()}


def slow_sync(
    *,
    rate_bytes_per_s: float | None = None,
    duration_s: float | None = None,
    order: str = "small_first",
    preallocate: bool = False,
) -> SlowSync:
    """Copy the new weights into the live directory at a limited rate, or so that they take `duration_s` (60 s).

    Each file is cut to nothing first and then grows, as `cp` does it; with `preallocate` it has its full size, zero where
    nothing is written yet. `order` "small_first" puts config and tokenizer there at once, "weights_first" after the
    weights. The copy has begun on the first weight file when `start` returns. Source: taxonomy row D19.
    """
    if rate_bytes_per_s is None and duration_s is None:
        duration_s = 60.0
    return SlowSync(rate_bytes_per_s=rate_bytes_per_s, duration_s=duration_s, order=order, preallocate=preallocate)


def nested_move() -> NestedMove:
    """Publish with the documented `mv new live`, really run. Source: taxonomy row D17."""
    return NestedMove()


def overwrite_in_place() -> OverwriteInPlace:
    """Publish by writing the new files over the live ones. Source: taxonomy row D18."""
    return OverwriteInPlace()


def rsync_in_place(*, duration_s: float = 60.0) -> RsyncInPlace:
    """Publish by writing the blocks that differ into the live files, over `duration_s`, as `rsync --inplace` does.

    Headers are right from the first block on, so old and new tensors lie behind one header; whoever has a file mapped sees
    it change. Config and tokenizer are new at once. At least one block is written when `start` returns. Source: taxonomy
    row D18.
    """
    return RsyncInPlace(duration_s=duration_s)
