"""What happens to an engine's processes while it runs: killed, crashed, frozen, or gone all at once.

Every proof is read from `/proc` of this machine: process ids, when they started, and the kernel's letter for their state.
Nothing here outlives the run: a frozen process ends by SIGKILL like any other, and a sweep finds it by the run's label.
Source: taxonomy rows M02, M03, M04, M08.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from harness.clock import poll_until
from harness.engine.engine import Engine, EngineIdentity, Inspectable, Killable, Pausable
from harness.engine.proc import STOPPED, Proc, find
from harness.errors import FaultNotApplicable, HarnessError, ScenarioInvalid, WaitExpired
from harness.faults.fault import Injected, Struck, Surroundings, parameters_of
from harness.guards.segments import is_segment
from harness.label import SEGMENTS_RECORD, SHARED_MEMORY

ROLES = ("core", "server", "worker")
SIGNALS = ("SIGKILL", "SIGSEGV", "SIGABRT", "SIGBUS", "SIGTERM")
ACT_LIMIT_S = 10.0
FREEZE_ALL_LIMIT_S = 1.0
END_SEEN_LIMIT_S = 3.0  # an engine in a container asks Docker once a second whether it has ended


@dataclass(slots=True)
class Struckdown:
    """A fault that struck processes: what is left of it is what is left of them."""

    injected: Injected
    prove: Callable[[], Injected]
    end: Callable[[], None]
    prove_end: Callable[[], Injected]

    def state(self) -> Injected:
        """Prove it again."""
        return self.prove()

    def finish(self, *, limit_s: float) -> None:
        """Undo it."""
        self.end()

    def undone(self) -> Injected:
        """Prove that nothing acts any more."""
        return self.prove_end()


@dataclass(frozen=True, slots=True, kw_only=True)
class KilledProcess:
    """A signal that ends the engine core, one of its workers, or the server."""

    name: ClassVar[str] = "killed_process"
    role: str
    signal: str

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ScenarioInvalid(f'killed_process: role "{self.role}" is unknown; known: {", ".join(ROLES)}')
        if self.signal not in SIGNALS:
            raise ScenarioInvalid(f'killed_process: signal "{self.signal}" is unknown; known: {", ".join(SIGNALS)}')

    @property
    def fault_id(self) -> str:
        """Return the row: ended from outside, or by a crash of its own."""
        return "M03" if self.signal in ("SIGKILL", "SIGTERM") else "M08"

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def undo(self) -> str:
        return "nothing is left to undo: end the rest of the engine and start it anew"

    def require(self, identity: EngineIdentity) -> None:
        """Every engine has processes."""

    def strike(self, engine: Engine, surroundings: Surroundings, *, random: Random) -> Struck:
        if not isinstance(engine, Killable):
            raise FaultNotApplicable(f'engine "{engine.incarnation}" cannot be sent a signal')
        targets = _processes(engine, self.role)[:1]
        before = _states(targets)
        if self.role == "worker":
            _signal(targets[0], signal.Signals[self.signal])
        else:
            engine.kill(self.role, signal.Signals[self.signal])
        _await(lambda: not any(target.is_running() for target in targets), what=f"the {self.role} ends")

        def prove() -> Injected:
            after = _states(targets)
            ended = bool(targets) and not any(target.is_running() for target in targets)
            return _injected(
                self,
                ended,
                f"{self.role} process {_listed(targets)} was {_shown(before)}, then was sent {self.signal} and is "
                f"{_shown(after)}; the server's exit code is {engine.exit_code()}",
                {"states": before},
                {"states": after, "exit_code": engine.exit_code()},
            )

        def prove_end() -> Injected:
            return _gone(self, targets)

        return Struckdown(prove(), prove, _nothing, prove_end)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenProcess:
    """The process that computes is stopped: it is alive, holds its connections, and does nothing."""

    name: ClassVar[str] = "frozen_process"
    fault_id: ClassVar[str] = "M04"

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def undo(self) -> str:
        return "send SIGCONT to the process that computes, or end it: SIGKILL also ends what is frozen"

    def require(self, identity: EngineIdentity) -> None:
        """Every engine has processes."""

    def strike(self, engine: Engine, surroundings: Surroundings, *, random: Random) -> Struck:
        if not isinstance(engine, Pausable):
            raise FaultNotApplicable(f'engine "{engine.incarnation}" cannot be frozen')
        core, *workers = _processes(engine, "core")
        free = [proc for proc in (core, *workers) if proc.state() != STOPPED]
        states = _states((core, *workers))

        def resume() -> None:
            # Whatever state they are in: who was just told to stop has not stopped yet.
            if any(proc.is_running() for proc in free):
                with suppress(HarnessError):  # it has ended meanwhile, or cannot be reached: the proof says which
                    engine.resume()
                _await(lambda: STOPPED not in _states(free).values(), what="the core runs on")

        surroundings.undos.append(resume)
        try:
            engine.pause()
            _await(lambda: core.state() == STOPPED, what="the core is frozen")
            # Not every engine freezes its workers with the core.
            limit_s = FREEZE_ALL_LIMIT_S if workers else 0.0
            _await(
                lambda: all(proc.state() == STOPPED for proc in free), what="its workers are frozen", limit_s=limit_s
            )
        except BaseException:  # an interrupt too: what was frozen by then must run on
            resume()
            raise
        targets = [proc for proc in free if proc.state() == STOPPED] or [core]
        before = {str(target.pid): states[str(target.pid)] for target in targets}

        def prove() -> Injected:
            after = _states(targets)
            is_frozen = core in targets and set(after.values()) == {STOPPED} and STOPPED not in before.values()
            return _injected(
                self,
                is_frozen,
                f"process {_listed(targets)} was {_shown(before)} and is {_shown(after)} (T: stopped)",
                {"states": before},
                {"states": after},
            )

        def prove_end() -> Injected:
            left = [target for target in targets if target.state() == STOPPED]
            return _injected(
                self,
                not left,
                f"of {len(targets)} processes that were frozen {len(left)} still are",
                {},
                _states(targets),
            )

        injected = prove()
        if not injected.proved:
            resume()
        return Struckdown(injected, prove, resume, prove_end)


@dataclass(frozen=True, slots=True, kw_only=True)
class KilledWithLeftovers:
    """Every process of the engine is killed at once, as a host's memory killer or a pod's end does; files stay."""

    name: ClassVar[str] = "killed_with_leftovers"
    fault_id: ClassVar[str] = "M02"

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def undo(self) -> str:
        return f"remove what the dead engine left in {SHARED_MEMORY} and in its temporary directory"

    def require(self, identity: EngineIdentity) -> None:
        """Every engine has processes."""

    def strike(self, engine: Engine, surroundings: Surroundings, *, random: Random) -> Struck:
        targets = _processes(engine, "all")
        before = _states(targets)
        segments_before = _mapped_segments(targets)
        if segments_before:  # nobody can read it from the processes afterwards
            (surroundings.shared / SEGMENTS_RECORD).write_text("\n".join(sorted(segments_before)), encoding="utf-8")
        try:
            _signal_all(targets, signal.SIGSTOP)  # else who is killed last removes what the others left
            _await(
                lambda: not any(t.is_running() and t.state() != STOPPED for t in targets),
                what="every process is frozen",
            )
        except BaseException:
            _signal_all(targets, signal.SIGCONT)
            raise
        _signal_all(targets, signal.SIGKILL)
        _await(lambda: not any(target.is_running() for target in targets), what="every process has ended")

        def prove() -> Injected:
            alive = [target for target in targets if target.is_running()]
            left = sorted(name for name in segments_before if (SHARED_MEMORY / name).exists())
            return _injected(
                self,
                bool(targets) and not alive and bool(left or not segments_before),
                f"of {len(targets)} processes that ran {len(alive)} still do; left in {SHARED_MEMORY}: "
                f"{', '.join(left) or 'nothing'}",
                {"states": before, "segments": sorted(segments_before)},
                {"alive": [target.pid for target in alive], "segments": left, "exit_code": engine.exit_code()},
            )

        def prove_end() -> Injected:
            left = sorted(name for name in segments_before if (SHARED_MEMORY / name).exists())
            gone = _gone(self, targets)
            because = f"{gone.because}; left in {SHARED_MEMORY}: {', '.join(left) or 'nothing'}"
            return _injected(self, gone.proved and not left, because, {}, {"segments": left})

        return Struckdown(prove(), prove, _nothing, prove_end)


def _processes(engine: Engine, role: str) -> tuple[Proc, ...]:
    """Return the processes of a role.

    Raises: FaultNotApplicable when this machine cannot see them, or there is none.
    """
    if not isinstance(engine, Inspectable):
        raise FaultNotApplicable(f'the processes of engine "{engine.incarnation}" cannot be looked at')
    found = [proc for pid in engine.processes(role) if (proc := find(pid)) is not None and proc.is_running()]
    if not found:
        raise FaultNotApplicable(f'engine "{engine.incarnation}" has no {role} process that this machine can see')
    return tuple(found)


def _signal(target: Proc, number: int) -> None:
    """Send a signal to one process.

    Raises: FaultNotApplicable when it has ended, or this user may not.
    """
    try:
        was_there = target.signal(number)
    except PermissionError as error:
        raise FaultNotApplicable(f"process {target.pid} cannot be signalled: {error.strerror}") from error
    if not was_there:
        raise FaultNotApplicable(f"process {target.pid} cannot be signalled: it has ended")


def _signal_all(targets: Sequence[Proc], number: int) -> None:
    for target in targets:
        with suppress(PermissionError):
            target.signal(number)


def _await(ask: Callable[[], bool], *, what: str, limit_s: float | None = None) -> None:
    """Give what was done time to be seen; the proof says whether it was."""
    limit_s = ACT_LIMIT_S if limit_s is None else limit_s
    with suppress(WaitExpired):
        poll_until(lambda: True if ask() else None, what=what, limit_s=limit_s, every_s=0.01)


def has_ended(exit_code: Callable[[], int | None]) -> bool:
    """Say whether an engine is known to have ended; one that cannot be asked, as by a Docker that hangs, is not."""
    with suppress(WaitExpired, HarnessError):
        poll_until(exit_code, what="the engine has ended", limit_s=END_SEEN_LIMIT_S, every_s=0.2)
        return True
    return False


def _states(targets: Sequence[Proc]) -> dict[str, str]:
    return {str(target.pid): target.state() for target in targets}


def _shown(states: Mapping[str, str]) -> str:
    return ", ".join(f'in state "{state}"' if state else "gone" for state in states.values()) or "nowhere"


def _listed(targets: Sequence[Proc]) -> str:
    return ", ".join(str(target.pid) for target in targets)


def _mapped_segments(targets: Sequence[Proc]) -> set[str]:
    """Return the names in this machine's shared memory that these processes have mapped; a container has its own."""
    names = set()
    for target in targets:
        with suppress(OSError):
            for line in Path(f"/proc/{target.pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines():
                name = line.partition(f" {SHARED_MEMORY}/")[2]
                inode = line.split(maxsplit=5)[4]
                if is_segment(name) and (SHARED_MEMORY / name).stat().st_ino == int(inode):
                    names.add(name)
    return names


def _nothing() -> None:
    """Undo nothing: what was killed stays dead."""


def _gone(fault: KilledProcess | KilledWithLeftovers, targets: Sequence[Proc]) -> Injected:
    alive = [target for target in targets if target.is_running()]
    because = f"of {len(targets)} processes that were killed {len(alive)} run"
    return _injected(fault, not alive, because, {}, {"alive": [target.pid for target in alive]})


def _injected(
    fault: KilledProcess | FrozenProcess | KilledWithLeftovers,
    proved: bool,
    because: str,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
) -> Injected:
    return Injected(
        fault=fault.name, fault_id=fault.fault_id, proved=proved, because=because, before=before, after=after
    )


def killed_process(role: str = "core", *, signal: str = "SIGKILL") -> KilledProcess:
    """End the engine `core`, a `worker` or the `server` while it serves; in the reference engine all are one process.

    SIGKILL is what a memory killer or a person sends; SIGSEGV, SIGABRT and SIGBUS stand for a crash of its own.
    Source: taxonomy rows M03, M08.
    """
    return KilledProcess(role=role, signal=signal)


def frozen_process() -> FrozenProcess:
    """Stop the process that computes with SIGSTOP: vLLM's `/health` goes on saying 200. Source: taxonomy row M04."""
    return FrozenProcess()


def killed_with_leftovers() -> KilledWithLeftovers:
    """Kill every process of the engine at once; the next engine starts among what they left. Source: taxonomy row M02."""
    return KilledWithLeftovers()
