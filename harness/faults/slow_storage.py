"""Storage that is slow when weights are opened, without a file system of our own: whoever opens a weight file has to wait.

A write lease lets the kernel hold up every `open` of a file until the lease is given back. So an engine waits in `open`,
as it does on a network share or a cold object store; nothing in the engine, and no byte of the file, is changed.
Source: taxonomy row N01; fcntl(2), "Leases".
"""

from __future__ import annotations

import fcntl
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from harness.checkpoint.copy import refuse_shared
from harness.clock import Deadline, now_ns, poll_until, seconds_between
from harness.engine.engine import Engine, EngineIdentity
from harness.engine.ready import HEALTHY, probe_health
from harness.errors import EnvironmentMissing, FaultNotApplicable, ScenarioInvalid, UsageError, WaitExpired
from harness.faults.fault import Injected, Struck, Surroundings, parameters_of

BREAK_TIME = Path("/proc/sys/fs/lease-break-time")  # seconds after which the kernel takes a lease back by force
OPEN_LIMIT_S = 240.0  # until an engine that was just started opens its weights
LOOK_EVERY_S = 0.01
ASK_EVERY_S = 1.0
END_LIMIT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowStorage:
    """Weight files of which the first `open` takes so many seconds each."""

    name: ClassVar[str] = "slow_storage"
    fault_id: ClassVar[str] = "N01"
    open_delay_s: float

    def __post_init__(self) -> None:
        if not 0 < self.open_delay_s < float("inf"):
            raise ScenarioInvalid(
                f"slow_storage: open_delay_s must be a number of seconds above 0, got {self.open_delay_s}"
            )

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def undo(self) -> str:
        return "nothing is left to undo: files open at once again when the harness gives its leases back, or ends"

    def require(self, identity: EngineIdentity) -> None:
        """Return if the engine opens files as programs do; the reference engine refuses to wait for one."""
        if identity.kind == "reference":
            raise EnvironmentMissing("vllm", "the reference engine never waits in open, so no storage is slow to it")

    def strike(self, engine: Engine, surroundings: Surroundings, *, random: Random) -> Struck:
        """Lay leases on the weight files of an engine that starts, and wait until it is held up by one.

        Raises: FaultNotApplicable when there are no such files of the scenario's own, or the kernel gives no leases on them.
        """
        files = sorted(surroundings.live.glob("*.safetensors"))
        if not files:
            raise FaultNotApplicable(f'no safetensors file in "{surroundings.live}" that could be slow to open')
        slow = _Slow(self, files)
        try:
            _await_open(engine, slow)
        except BaseException:
            slow.finish(limit_s=0)
            raise
        slow.injected = slow.state()
        return slow


class _Lease:
    """A write lease on one file, given back `delay_s` after somebody was first held up by it.

    Raises: FaultNotApplicable when the kernel gives none.
    """

    def __init__(self, path: Path, *, delay_s: float) -> None:
        self.path = path
        self.asked_ns: int | None = None
        self.given_back_ns: int | None = None
        self._delay_s = delay_s
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            # The kernel tells the holder by a signal; this one is ignored unless somebody wants it. We look instead.
            fcntl.fcntl(self._descriptor, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(self._descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except OSError as error:
            os.close(self._descriptor)
            raise FaultNotApplicable(f'the kernel gives no lease on "{path}": {error.strerror}') from error

    def look(self) -> None:
        """Note that somebody is held up, and give the lease back when that has lasted long enough."""
        if self.given_back_ns is not None:
            return
        if self.asked_ns is None and fcntl.fcntl(self._descriptor, fcntl.F_GETLEASE) != fcntl.F_WRLCK:
            self.asked_ns = now_ns()
        if self.asked_ns is not None and seconds_between(self.asked_ns, now_ns()) >= self._delay_s:
            self.give_back()

    def give_back(self) -> None:
        """Let everybody open the file. Idempotent."""
        if self.given_back_ns is None:
            self.given_back_ns = now_ns()
            os.close(self._descriptor)  # with the last descriptor the lease goes

    @property
    def is_holding_up(self) -> bool:
        """Say whether somebody waits for this file right now."""
        return self.asked_ns is not None and self.given_back_ns is None

    def held_up_s(self) -> float:
        """Return for how long somebody has been held up."""
        if self.asked_ns is None:
            return 0.0
        return max(0.0, seconds_between(self.asked_ns, self.given_back_ns or now_ns()))


class _Slow:
    """The leases of one fault, looked after by a thread."""

    injected: Injected

    def __init__(self, fault: SlowStorage, files: Sequence[Path]) -> None:
        self._fault = fault
        self._end = threading.Event()
        self._lock = threading.Lock()
        self._leases: list[_Lease] = []
        try:
            _require_break_time(fault.open_delay_s)
            for path in files:
                refuse_shared(path)
                self._leases.append(_Lease(path, delay_s=fault.open_delay_s))
        except UsageError as error:
            self._give_back()
            raise FaultNotApplicable(f"the weight files cannot be made slow: {error}") from error
        self._thread = threading.Thread(target=self._look_after, name="slow-storage", daemon=True)
        self._thread.start()

    def state(self) -> Injected:
        """Say which opens are or were held up, as the kernel reports it."""
        with self._lock:
            waiting = [lease.path.name for lease in self._leases if lease.is_holding_up]
            files = {
                lease.path.name: {"held_up_s": round(lease.held_up_s(), 3), "is_over": lease.given_back_ns is not None}
                for lease in self._leases
            }
        return Injected.of(
            self._fault,
            proved=bool(waiting),
            because=f"of {len(files)} weight files {', '.join(waiting) or 'none'} is being opened and held up; each first open "
            f"takes {self._fault.open_delay_s:g} s",
            before={"open_delay_s": self._fault.open_delay_s},
            after={"files": files},
        )

    def finish(self, *, limit_s: float) -> None:
        """Give every lease back. Idempotent."""
        self._end.set()
        self._thread.join(END_LIMIT_S)
        self._give_back()

    def undone(self) -> Injected:
        """Open every file that is still there, refusing to wait."""
        held = [lease.path.name for lease in self._leases if not _opens_at_once(lease.path)]
        waited = {lease.path.name: round(lease.held_up_s(), 3) for lease in self._leases}
        return Injected.of(
            self._fault,
            proved=not held,
            because=f"{', '.join(held)} cannot be opened at once"
            if held
            else "every weight file opens at once; held up were "
            + ", ".join(f'"{name}" for {seconds:g} s' for name, seconds in waited.items()),
            after={"held_up_s": waited},
        )

    def is_awaited(self) -> bool:
        """Say whether somebody is or was held up."""
        with self._lock:
            return any(lease.asked_ns is not None for lease in self._leases)

    def _look_after(self) -> None:
        while not self._end.wait(LOOK_EVERY_S):
            with self._lock:
                for lease in self._leases:
                    lease.look()
                if all(lease.given_back_ns is not None for lease in self._leases):
                    return

    def _give_back(self) -> None:
        with self._lock:
            for lease in self._leases:
                lease.give_back()


def _await_open(engine: Engine, slow: _Slow) -> None:
    """Wait until the engine is held up, ended, or became ready without having been."""
    next_ask = Deadline.after(ASK_EVERY_S)

    def look() -> bool | None:
        nonlocal next_ask
        if slow.is_awaited() or engine.exit_code() is not None:
            return True
        if next_ask.is_expired():
            next_ask = Deadline.after(ASK_EVERY_S)
            return True if probe_health(engine.endpoint, limit_s=ASK_EVERY_S) == HEALTHY else None
        return None

    try:
        poll_until(look, what="the engine opens a weight file", limit_s=OPEN_LIMIT_S, every_s=LOOK_EVERY_S)
    except WaitExpired:
        return  # the proof says so


def _require_break_time(delay_s: float) -> None:
    """Return if the kernel leaves a lease alone for so long.

    Raises: FaultNotApplicable.
    """
    try:
        allowed_s = int(BREAK_TIME.read_text(encoding="ascii"))
    except (OSError, ValueError) as error:
        raise FaultNotApplicable(f'"{BREAK_TIME}" cannot be read: {error}') from error
    if delay_s >= allowed_s:
        raise FaultNotApplicable(f"open_delay_s is {delay_s:g}: the kernel breaks leases after {allowed_s} s")


def _opens_at_once(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except FileNotFoundError:
        return True  # gone with its version
    except BlockingIOError:
        return False
    return True


def slow_storage(open_delay_s: float = 10.0) -> SlowStorage:
    """Make the first `open` of each weight file take `open_delay_s`, while a new engine starts.

    The delay has to be shorter than the kernel's limit on leases (45 s as a rule). Source: taxonomy row N01.
    """
    return SlowStorage(open_delay_s=open_delay_s)
