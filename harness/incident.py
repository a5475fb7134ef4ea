"""An incident: live faults strike a running engine, and an operator gets the service back on the same checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.clock import Deadline, poll_until
from harness.engine.engine import Engine, HandedOn
from harness.errors import EngineNotReady, HarnessError, WaitExpired
from harness.faults.fault import Injected, LiveFault, Struck, Surroundings
from harness.ground import Ground
from harness.guards.canary import Answer
from harness.judge.detection import WITNESSES_S, detection
from harness.judge.moments import Layer
from harness.observe.history import EventKind
from harness.observe.probes import health_status
from harness.service import Service

CANARY_LIMIT_S = 5.0  # an engine that serves answers the canaries of a small model in a fraction of it
HEALTH_LIMIT_S = 2.0
LOOK_EVERY_S = 0.25


@dataclass(slots=True)
class Incident:
    """Strikes engines with the live faults of a scenario, undoes that, and proves it."""

    ground: Ground
    service: Service
    _struck: list[tuple[LiveFault, Struck]] = field(default_factory=list)
    _undos: list[Callable[[], None]] = field(default_factory=list)  # of strikes that were interrupted too

    @property
    def faults(self) -> Sequence[LiveFault]:
        """Return the live faults of the scenario."""
        return [fault for fault in self.ground.scenario.faults if isinstance(fault, LiveFault)]

    def strike(self, engine: Engine, *, expects: Answer) -> None:
        """Let every live fault strike an engine; how each is undone is written down before.

        Raises: HarnessError when a fault cannot strike: then the scenario ends.
        """
        ground = self.ground
        undo = {fault.name: fault.undo() for fault in self.faults}
        self._event(EventKind.INCIDENT_STARTED, incarnation=engine.incarnation, undo=undo)
        surroundings = Surroundings(
            live=(ground.launch.checkpoint_root / ground.launch.checkpoint_name).resolve(),
            other=ground.new if expects is Answer.OLD else ground.old,
            work=ground.work,
            shared=ground.cache.parent,
            undos=self._undos,
        )
        running = engine.engine if isinstance(engine, HandedOn) else engine
        for fault in self.faults:
            struck = fault.strike(running, surroundings, random=ground.random)
            self._struck.append((fault, struck))
            self._record(EventKind.FAULT_INJECTED, struck.injected)

    def remedy(self, *, gated: bool) -> bool:
        """Stop the engine that was struck, undo the faults, start another on the same checkpoint; say whether it serves."""
        service, ground = self.service, self.ground
        what = "stop the engine, undo what was done to it, start it anew on the same checkpoint"
        self._event(EventKind.REMEDY_STARTED, what=what)
        struck = service.serving
        if struck is not None and struck.exit_code() is None:
            service.stop(struck, how="remedy")
            self.finish()
        # Beside an engine that ended by itself the next one starts at once, as under a supervisor, among what it left.
        completed, because = False, ""
        engine = service.start(ground.launch, expects=Answer.OLD)
        try:
            service.wait_ready(engine, ground.scenario.rollout.ready_limit_s)
            completed = not gated or service.answers_from(engine, Answer.OLD)
        except EngineNotReady as error:
            because = error.reason
        if completed:
            service.admit(engine)
        service.stop_failed()
        self.finish()
        self._event(EventKind.REMEDY_ENDED, what="restart on the same checkpoint", completed=completed, because=because)
        return completed

    def observe(self, engine: Engine, *, limit_s: float) -> None:
        """Look without load who notices: the process, `/health`, and canaries, until one does or the limit passes."""
        deadline = Deadline.after(limit_s)

        def look() -> None:
            self.service.look_after()
            status = health_status(engine.endpoint, limit_s=HEALTH_LIMIT_S)
            self._event(EventKind.HEALTH, incarnation=engine.incarnation, status=status, took_ms=None)

        def noticed() -> bool | None:
            look()
            if deadline.remaining_s() > CANARY_LIMIT_S:
                self.service.answers_from(engine, Answer.OLD, limit_s=CANARY_LIMIT_S)
            return None if detection(self.ground.recorder.snapshot()).layer in (Layer.NEVER, Layer.HARMLESS) else True

        with contextlib.suppress(WaitExpired):
            poll_until(noticed, what="somebody notices the incident", limit_s=limit_s, every_s=LOOK_EVERY_S)
        with contextlib.suppress(WaitExpired):  # a cheaper witness than the first may come a little later
            poll_until(look, what="every witness", limit_s=WITNESSES_S, every_s=LOOK_EVERY_S)

    def finish(self) -> None:
        """Undo everything, also where one of the faults cannot be undone. Idempotent."""
        with contextlib.ExitStack() as stack:
            for undo in self._undos:
                stack.callback(undo)
            for _, struck in self._struck:
                stack.callback(struck.finish, limit_s=0)

    def prove_undone(self) -> None:
        """Prove that nothing of the faults acts any more."""
        with contextlib.suppress(HarnessError, OSError):  # what cannot be undone is said by the proof
            self.finish()
        for _, struck in self._struck:
            self._record(EventKind.FAULT_UNDONE, struck.undone())

    def _record(self, kind: EventKind, injected: Injected) -> None:
        self._event(
            kind,
            fault=injected.fault,
            fault_id=injected.fault_id,
            proved=injected.proved,
            because=injected.because,
            before=dict(injected.before),
            after=dict(injected.after),
        )

    def _event(self, kind: EventKind, **data: Any) -> None:
        self.ground.recorder.event("operator", kind, **data)
