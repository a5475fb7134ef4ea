"""A weight file that changes under an engine while it loads it: cut short, or written over.

The engine is watched until it holds the file, open or mapped, and frozen for the moment of the change: so it is known that
the change came in the middle, and the rest is up to the engine. Who reads a cut file through a mapping ends by SIGBUS.
Source: taxonomy rows D18, D19; section 8 there.
"""

from __future__ import annotations

import os
import shutil
import signal
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Literal

from harness.checkpoint.copy import refuse_shared
from harness.checkpoint.hashing import Part, hash_parts
from harness.clock import Deadline, poll_until
from harness.engine.engine import Engine, EngineIdentity, Inspectable
from harness.engine.proc import STOPPED, FileId, Proc, find
from harness.engine.ready import HEALTHY, probe_health
from harness.errors import FaultNotApplicable, ScenarioInvalid, UsageError, WaitExpired
from harness.faults.fault import Injected, Struck, Surroundings, parameters_of

HOWS = ("cut", "overwritten")
KEPT_BYTES = 4096  # of a file that is cut: its header may be whole, its tensors are not
HOLD_LIMIT_S = 240.0
LOOK_EVERY_S = 0.002  # a small file is held for some tens of milliseconds
LIST_EVERY_S = 0.25
ASK_EVERY_S = 1.0
FREEZE_LIMIT_S = 5.0

How = Literal["cut", "overwritten"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedWhileLoading:
    """A weight file that is cut or written over while an engine holds it."""

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
        before = {"size_bytes": path.stat().st_size, "blake3": _digest(path)}
        file = FileId.of(path)
        how_held = ""
        try:
            holder = _await_holder(engine, file)
            if holder is not None:
                with _frozen(holder):
                    how_held = "mapped" if holder.maps(file) else "open" if holder.has_open(file) else "no longer"
                    if self.how == "cut":
                        os.truncate(path, KEPT_BYTES)
                    else:
                        _write_over(other, path)
        except BaseException:
            os.replace(whole, path)
            raise

        def prove() -> Injected:
            after = {"size_bytes": path.stat().st_size, "blake3": _digest(path), "held": how_held}
            is_same_file = FileId.of(path) == file
            is_changed = after["blake3"] != before["blake3"] and is_same_file
            held = (
                f"process {holder.pid} had it {how_held}" if holder else "no process of the engine was seen to hold it"
            )
            return Injected(
                fault=self.name,
                fault_id=self.fault_id,
                proved=is_changed and how_held in ("mapped", "open"),
                because=f'"{path.name}" was {self.how if is_changed else "not changed"} in place '
                f"({before['size_bytes']:,} bytes before, {after['size_bytes']:,} after); {held} at that moment",
                before=before,
                after=after,
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
        return Injected(
            fault=self.fault.name,
            fault_id=self.fault.fault_id,
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
    except IndexError:
        raise FaultNotApplicable(f'"{live}" has {len(shards)} weight files, number {number} was asked for') from None
    except UsageError as error:
        raise FaultNotApplicable(f"a fault may not change a file that is not its own: {error}") from error
    if path.stat().st_size <= KEPT_BYTES:
        raise FaultNotApplicable(
            f'"{path.name}" has {path.stat().st_size:,} bytes, more than {KEPT_BYTES:,} are needed'
        )
    return path


def _await_holder(engine: Engine, file: FileId) -> Proc | None:
    """Wait until a process of the engine has the file open or mapped; None when it ended or became ready before.

    Raises: FaultNotApplicable when the engine's processes cannot be seen.
    """
    if not isinstance(engine, Inspectable):
        raise FaultNotApplicable(f'the processes of engine "{engine.incarnation}" cannot be looked at')
    processes: list[Proc] = []
    next_list, next_ask = Deadline.after(0), Deadline.after(ASK_EVERY_S)

    def look() -> Proc | str | None:
        nonlocal processes, next_list, next_ask
        if next_list.is_expired():
            next_list = Deadline.after(LIST_EVERY_S)
            processes = [proc for pid in engine.processes("all") if (proc := find(pid)) is not None]
            if engine.exit_code() is not None:
                return "ended"
        holder = next((proc for proc in processes if proc.has_open(file) or proc.maps(file)), None)
        if holder is None and next_ask.is_expired():
            next_ask = Deadline.after(ASK_EVERY_S)
            if probe_health(engine.endpoint, limit_s=ASK_EVERY_S) == HEALTHY:
                return "ready"
        return holder

    try:
        seen = poll_until(look, what="the engine holds the weight file", limit_s=HOLD_LIMIT_S, every_s=LOOK_EVERY_S)
    except WaitExpired:
        return None
    return seen if isinstance(seen, Proc) else None


@contextmanager
def _frozen(proc: Proc) -> Iterator[None]:
    """Stop a process inside the block. If this process dies meanwhile, a sweep ends the engine, frozen or not.

    Raises: FaultNotApplicable when it cannot be stopped.
    """
    try:
        os.kill(proc.pid, signal.SIGSTOP)
    except (PermissionError, ProcessLookupError) as error:
        raise FaultNotApplicable(f"process {proc.pid} cannot be stopped: {error.strerror}") from error
    try:
        with suppress(WaitExpired):
            poll_until(
                lambda: True if proc.state() == STOPPED else None,
                what=f"process {proc.pid} is frozen",
                limit_s=FREEZE_LIMIT_S,
                every_s=0.001,
            )
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(proc.pid, signal.SIGCONT)


def _write_over(source: Path, target: Path) -> None:
    with source.open("rb") as reader, target.open("r+b") as writer:
        shutil.copyfileobj(reader, writer, 4 * 1024 * 1024)


def _digest(path: Path) -> str:
    return hash_parts([Part(path, 0, path.stat().st_size)])[0].hex()


def changed_while_loading(how: How = "cut", *, shard: int = -1) -> ChangedWhileLoading:
    """Cut a weight file, or write the other checkpoint's over it, while an engine that starts has it open or mapped.

    Needs files large enough to be seen in the middle: some MB. Source: taxonomy rows D18, D19.
    """
    return ChangedWhileLoading(how=how, shard=shard)
