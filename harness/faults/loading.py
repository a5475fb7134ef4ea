"""A weight file that changes under an engine while it loads it: cut short, or written over.

An engine opens a weight file more than once: it lists it, reads its header, and then its tensors. So whichever of its
processes holds the file is frozen, and the kernel is asked how much of it that process has read: by the pages of its mapping,
or by how far a descriptor got. When that is more than a header brings in and less than all, the file is changed; else the
process runs on for a moment. Who reads a cut file through a mapping ends by SIGBUS.
Source: taxonomy rows D18, D19; section 8 there.
"""

from __future__ import annotations

import os
import shutil
import signal
import stat
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Literal

from harness.checkpoint.copy import refuse_shared
from harness.checkpoint.hashing import Part, hash_parts
from harness.clock import Deadline, pause, poll_until
from harness.engine.engine import Engine, EngineIdentity, Inspectable
from harness.engine.proc import STOPPED, FileId, Proc, find
from harness.engine.ready import HEALTHY, probe_health
from harness.errors import CheckpointDefect, FaultNotApplicable, ScenarioInvalid, UsageError, WaitExpired
from harness.faults.fault import Injected, Struck, Surroundings, parameters_of
from harness.faults.load_progress import FOLIO_BYTES, Load, Progress

HOWS = ("cut", "overwritten")
KEPT_BYTES = 4096  # of a file that is cut: its header may be whole, its tensors are not
HOLD_LIMIT_S = 240.0
LOOK_EVERY_S = 0.002  # a small file is held for some tens of milliseconds
STEP_S = 0.0005  # how long a process that holds the file runs on before it is frozen again
LIST_EVERY_S = 0.25
LISTING_FACTOR = 10
ASK_EVERY_S = 1.0
FREEZE_LIMIT_S = 5.0

How = Literal["cut", "overwritten"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedWhileLoading:
    """A weight file that is cut or written over while an engine reads its tensors."""

    name: ClassVar[str] = "changed_while_loading"
    fault_id: ClassVar[str] = "D18"
    how: How
    shard: int

    def __post_init__(self) -> None:
        if self.how not in HOWS:
            raise ScenarioInvalid(f'changed_while_loading: how "{self.how}" is unknown; known: {", ".join(HOWS)}')

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def undo(self) -> str:
        return "publish the whole checkpoint anew and start the engine on it"

    def require(self, identity: EngineIdentity) -> None:
        """Every engine reads files."""

    def strike(self, engine: Engine, surroundings: Surroundings, *, random: Random) -> Struck:
        path = _shard(surroundings.live, self.shard)
        other = surroundings.other / path.name
        if self.how == "overwritten" and (not other.is_file() or other.stat().st_size != path.stat().st_size):
            raise FaultNotApplicable(f'"{other}" is no file of the size of "{path.name}" to write over it')
        whole = surroundings.work / f"before-{path.name}"
        shutil.copy2(path, whole)  # before anything is changed: what is put back
        path.chmod(path.stat().st_mode | stat.S_IWUSR)
        file, load = FileId.of(path), Load.of(path)
        before = {"size_bytes": load.size_bytes, "blake3": _digest(path)}
        try:
            with ExitStack() as held:
                moment, closest = _stop_in_the_middle(engine, load, held)
                if moment is not None and self.how == "cut":
                    os.truncate(path, KEPT_BYTES)
                elif moment is not None:
                    _write_over(other, path)
        except BaseException:
            os.replace(whole, path)
            raise

        def prove() -> Injected:
            after = {"size_bytes": path.stat().st_size, "blake3": _digest(path)}
            is_changed = after["blake3"] != before["blake3"] and FileId.of(path) == file
            seen = moment or closest
            read = {"held": seen.how, "read_bytes": seen.read_bytes, "pid": seen.pid} if seen else {"held": ""}
            return Injected.of(
                self,
                proved=is_changed and moment is not None and load.is_in_the_middle(moment),
                because=f'"{path.name}" was {self.how if is_changed else "not changed"} in place '
                f"({before['size_bytes']:,} bytes before, {after['size_bytes']:,} after); {load.told(moment, closest)}",
                before=before,
                after={**after, **read},
            )

        return _Changed(self, prove(), prove, path, whole)


@dataclass(slots=True)
class _Changed:
    fault: ChangedWhileLoading
    injected: Injected
    prove: Callable[[], Injected]
    path: Path
    whole: Path

    def state(self) -> Injected:
        """Prove it again from the disk."""
        return self.prove()

    def finish(self, *, limit_s: float) -> None:
        """Put the whole file back by a rename, for who starts on the same directory; another version may be live by now."""
        if self.whole.exists() and self.path.parent.is_dir():
            os.replace(self.whole, self.path)

    def undone(self) -> Injected:
        """Compare what lies there with what lay there."""
        wanted = self.injected.before["blake3"]
        found = _digest(self.path) if self.path.is_file() else "gone with its version"
        return Injected.of(
            self.fault,
            proved=found in (wanted, "gone with its version"),
            because=f'"{self.path.name}" has digest {found[:16]}, it had {wanted[:16]}',
            after={"blake3": found},
        )


def _shard(live: Path, number: int) -> Path:
    """Return a weight file that only this directory has.

    Raises: FaultNotApplicable.
    """
    shards = sorted(live.glob("*.safetensors"))
    try:
        path = shards[number]
        refuse_shared(path)
        load = Load.of(path)
    except IndexError:
        raise FaultNotApplicable(f'"{live}" has {len(shards)} weight files, number {number} was asked for') from None
    except UsageError as error:
        raise FaultNotApplicable(f"a fault may not change a file that is not its own: {error}") from error
    except CheckpointDefect as error:
        raise FaultNotApplicable(f'"{live}" cannot be loaded: {error}') from error
    least = load.header_reach_bytes + FOLIO_BYTES
    if load.size_bytes <= least:
        raise FaultNotApplicable(
            f'"{path.name}" has {load.size_bytes:,} bytes, more than {least:,} are needed for a middle that can be seen'
        )
    return path


def _stop_in_the_middle(engine: Engine, load: Load, held: ExitStack) -> tuple[Progress | None, Progress | None]:
    """Wait until a process of the engine is in the middle of the file; it stands still until `held` is closed.

    Returns how far it is; None when the engine ended or became ready before. The second value is the farthest that was seen.
    Raises: FaultNotApplicable when the engine's processes cannot be seen or stopped.
    """
    if not isinstance(engine, Inspectable):
        raise FaultNotApplicable(f'the processes of engine "{engine.incarnation}" cannot be looked at')
    processes: list[Proc] = []
    farthest: Progress | None = None
    next_list, next_ask = Deadline.after(0), Deadline.after(ASK_EVERY_S)

    def look() -> Progress | str | None:
        nonlocal processes, farthest, next_list, next_ask
        if next_list.is_expired():
            listing = Deadline.after(LIST_EVERY_S)
            processes = [proc for pid in engine.processes("all") if (proc := find(pid)) is not None]
            # On a busy machine it takes long, and a file is loaded in a moment: most of the time is for looking.
            next_list = Deadline.after(max(LIST_EVERY_S, LISTING_FACTOR * listing.waited_s()))
            if engine.exit_code() is not None:
                return "ended"
        for proc in processes:
            while proc.has_open(load.file) or proc.maps(load.file):
                held.callback(_thaw, proc)  # before it is frozen: an interrupt in between must not leave it so
                _freeze(proc)
                seen = load.progress(proc)
                if load.is_in_the_middle(seen):
                    return seen
                held.close()
                if farthest is None or seen.read_bytes >= farthest.read_bytes:
                    farthest = seen
                if load.is_over(seen) or next_ask.is_expired():
                    break
                pause(STEP_S)
        if next_ask.is_expired():
            next_ask = Deadline.after(ASK_EVERY_S)
            if probe_health(engine.endpoint, limit_s=ASK_EVERY_S) == HEALTHY:
                return "ready"
        return None

    try:
        seen = poll_until(look, what="the engine loads the weight file", limit_s=HOLD_LIMIT_S, every_s=LOOK_EVERY_S)
    except WaitExpired:
        return None, farthest
    return (seen if isinstance(seen, Progress) else None), farthest


def _freeze(proc: Proc) -> None:
    """Stop a process, or leave it alone when it has ended. If this process dies meanwhile, a sweep ends the engine anyway.

    Raises: FaultNotApplicable when it cannot be stopped.
    """
    try:
        proc.signal(signal.SIGSTOP)
    except PermissionError as error:
        raise FaultNotApplicable(f"process {proc.pid} cannot be stopped: {error.strerror}") from error
    with suppress(WaitExpired):
        poll_until(
            lambda: True if proc.state() == STOPPED or not proc.is_running() else None,
            what=f"process {proc.pid} is frozen",
            limit_s=FREEZE_LIMIT_S,
            every_s=STEP_S,
        )


def _thaw(proc: Proc) -> None:
    with suppress(PermissionError):
        proc.signal(signal.SIGCONT)


def _write_over(source: Path, target: Path) -> None:
    with source.open("rb") as reader, target.open("r+b") as writer:
        shutil.copyfileobj(reader, writer, 4 * 1024 * 1024)


def _digest(path: Path) -> str:
    return hash_parts([Part(path, 0, path.stat().st_size)])[0].hex()


def changed_while_loading(how: How = "cut", *, shard: int = -1) -> ChangedWhileLoading:
    """Cut a weight file, or write the other checkpoint's over it, while an engine that starts reads its tensors.

    Needs files large enough to be seen in the middle: some MB. Source: taxonomy rows D18, D19.
    """
    return ChangedWhileLoading(how=how, shard=shard)
