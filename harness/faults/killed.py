"""An engine that loses one of its processes, or all of them at once.

Every proof is read from `/proc`: process ids, when they started, and the kernel's letter for their state.
Source: taxonomy rows M02, M03, M08.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from harness.engine.engine import Engine, EngineIdentity, Killable
from harness.engine.proc import STOPPED, Proc
from harness.errors import FaultNotApplicable, ScenarioInvalid
from harness.faults.fault import Injected, Struck, Surroundings, parameters_of
from harness.faults.processes import give_time, listed, processes_of, send_signal, shown, signal_all, states_of
from harness.faults.struckdown import Struckdown
from harness.guards.segments import is_segment
from harness.label import SEGMENTS_RECORD, SHARED_MEMORY

ROLES = ("core", "server", "worker")
SIGNALS = ("SIGKILL", "SIGSEGV", "SIGABRT", "SIGBUS", "SIGTERM")


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
        targets = processes_of(engine, self.role)[:1]
        before = states_of(targets)
        if self.role == "worker":
            send_signal(targets[0], signal.Signals[self.signal])
        else:
            engine.kill(self.role, signal.Signals[self.signal])
        give_time(lambda: not any(target.is_running() for target in targets), what=f"the {self.role} ends")

        def prove() -> Injected:
            after = states_of(targets)
            ended = bool(targets) and not any(target.is_running() for target in targets)
            return Injected.of(
                self,
                proved=ended,
                because=f"{self.role} process {listed(targets)} was {shown(before)}, then was sent {self.signal} and is "
                f"{shown(after)}; the server's exit code is {engine.exit_code()}",
                before={"states": before},
                after={"states": after, "exit_code": engine.exit_code()},
            )

        def prove_end() -> Injected:
            return _gone(self, targets)

        return Struckdown(prove(), prove, _nothing, prove_end)


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
        targets = processes_of(engine, "all")
        before = states_of(targets)
        segments_before = _mapped_segments(targets)
        if segments_before:  # nobody can read it from the processes afterwards
            (surroundings.shared / SEGMENTS_RECORD).write_text("\n".join(sorted(segments_before)), encoding="utf-8")
        try:
            signal_all(targets, signal.SIGSTOP)  # else who is killed last removes what the others left
            give_time(
                lambda: not any(t.is_running() and t.state() != STOPPED for t in targets),
                what="every process is frozen",
            )
        except BaseException:
            signal_all(targets, signal.SIGCONT)
            raise
        signal_all(targets, signal.SIGKILL)
        give_time(lambda: not any(target.is_running() for target in targets), what="every process has ended")

        def prove() -> Injected:
            alive = [target for target in targets if target.is_running()]
            left = sorted(name for name in segments_before if (SHARED_MEMORY / name).exists())
            return Injected.of(
                self,
                proved=bool(targets) and not alive and bool(left or not segments_before),
                because=f"of {len(targets)} processes that ran {len(alive)} still do; left in {SHARED_MEMORY}: "
                f"{', '.join(left) or 'nothing'}",
                before={"states": before, "segments": sorted(segments_before)},
                after={"alive": [target.pid for target in alive], "segments": left, "exit_code": engine.exit_code()},
            )

        def prove_end() -> Injected:
            left = sorted(name for name in segments_before if (SHARED_MEMORY / name).exists())
            gone = _gone(self, targets)
            because = f"{gone.because}; left in {SHARED_MEMORY}: {', '.join(left) or 'nothing'}"
            return Injected.of(self, proved=gone.proved and not left, because=because, after={"segments": left})

        return Struckdown(prove(), prove, _nothing, prove_end)


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
    return Injected.of(fault, proved=not alive, because=because, after={"alive": [target.pid for target in alive]})


def killed_process(role: str = "core", *, signal: str = "SIGKILL") -> KilledProcess:
    """End the engine `core`, a `worker` or the `server` while it serves; in the reference engine all are one process.

    SIGKILL is what a memory killer or a person sends; SIGSEGV, SIGABRT and SIGBUS stand for a crash of its own.
    Source: taxonomy rows M03, M08.
    """
    return KilledProcess(role=role, signal=signal)


def killed_with_leftovers() -> KilledWithLeftovers:
    """Kill every process of the engine at once; the next engine starts among what they left. Source: taxonomy row M02."""
    return KilledWithLeftovers()
