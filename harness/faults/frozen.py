"""An engine whose process that computes is frozen.

Its proof is read from `/proc`: process ids, when they started, and the kernel's letter for their state. It does not outlive
the run: a frozen process ends by SIGKILL like any other, and a sweep finds it by the run's label. Source: taxonomy row M04.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

from harness.engine.engine import Engine, EngineIdentity, Pausable
from harness.engine.proc import STOPPED
from harness.errors import FaultNotApplicable, HarnessError
from harness.faults.fault import Injected, Struck, Surroundings, parameters_of
from harness.faults.processes import give_time, listed, processes_of, shown, states_of
from harness.faults.struckdown import Struckdown

FREEZE_ALL_LIMIT_S = 1.0


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
        core, *workers = processes_of(engine, "core")
        free = [proc for proc in (core, *workers) if proc.state() != STOPPED]
        states = states_of((core, *workers))

        def resume() -> None:
            # Whatever state they are in: who was just told to stop has not stopped yet.
            if any(proc.is_running() for proc in free):
                with suppress(HarnessError):  # it has ended meanwhile, or cannot be reached: the proof says which
                    engine.resume()
                give_time(lambda: STOPPED not in states_of(free).values(), what="the core runs on")

        surroundings.undos.append(resume)
        try:
            engine.pause()
            give_time(lambda: core.state() == STOPPED, what="the core is frozen")
            # Not every engine freezes its workers with the core.
            limit_s = FREEZE_ALL_LIMIT_S if workers else 0.0
            give_time(
                lambda: all(proc.state() == STOPPED for proc in free), what="its workers are frozen", limit_s=limit_s
            )
        except BaseException:  # an interrupt too: what was frozen by then must run on
            resume()
            raise
        targets = [proc for proc in free if proc.state() == STOPPED] or [core]
        before = {str(target.pid): states[str(target.pid)] for target in targets}

        def prove() -> Injected:
            after = states_of(targets)
            is_frozen = core in targets and set(after.values()) == {STOPPED} and STOPPED not in before.values()
            return Injected.of(
                self,
                proved=is_frozen,
                because=f"process {listed(targets)} was {shown(before)} and is {shown(after)} (T: stopped)",
                before={"states": before},
                after={"states": after},
            )

        def prove_end() -> Injected:
            left = [target for target in targets if target.state() == STOPPED]
            return Injected.of(
                self,
                proved=not left,
                because=f"of {len(targets)} processes that were frozen {len(left)} still are",
                after=states_of(targets),
            )

        injected = prove()
        if not injected.proved:
            resume()
        return Struckdown(injected, prove, resume, prove_end)


def frozen_process() -> FrozenProcess:
    """Stop the process that computes with SIGSTOP: vLLM's `/health` goes on saying 200. Source: taxonomy row M04."""
    return FrozenProcess()
