"""What an operator does in a rollout: publish, start, check, admit traffic, remedy; without and with guards."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness.admission import preflight_refusals
from harness.checkpoint.adapter import ADAPTER
from harness.checkpoint.manifest import weights_id
from harness.clock import now_ns, seconds_between
from harness.engine.engine import Engine, HandedOn
from harness.engine.launch import Launch
from harness.engine.rollout import How, Rollout
from harness.errors import EngineNotReady, HarnessError
from harness.faults.compile_cache import clear_compile_cache
from harness.faults.fault import (
    Acting,
    AdapterFault,
    CacheFault,
    CompileCacheFault,
    Damage,
    Injected,
    LaunchFault,
    LiveFault,
    Racing,
    StartRace,
)
from harness.ground import Ground
from harness.guards import purge
from harness.guards.canary import Answer
from harness.in_place import roll_in_place
from harness.incident import Incident
from harness.observe.history import EventKind
from harness.publication import Publication
from harness.scenario import Action, Guard, Mode
from harness.service import Service


@dataclass(slots=True)
class Operations:
    """Carries out the steps of one scenario and records what was done and seen."""

    ground: Ground
    service: Service
    incident: Incident = field(init=False)
    publication: Publication = field(init=False)
    _acting: list[Acting] = field(default_factory=list)
    _refused: str = ""
    _completed: bool = False
    _is_remedied: bool = False  # what serves was started as undamaged
    _undone: list[dict[str, str]] | None = None  # what pre-flight said about the repaired checkpoint
    _left_spoilt: str = ""  # what clearing the compile cache could not undo

    def __post_init__(self) -> None:
        self.incident = Incident(self.ground, self.service)
        self.publication = Publication(self.ground)

    # --- before the load ---

    def prepare(self) -> None:
        """Lay out the old checkpoint where the engine reads it, and damage a private copy of the new one."""
        ground, staged = self.ground, self.publication.staged
        self.publication.lay_out()
        for fault in ground.scenario.faults:
            if isinstance(fault, Damage):
                self._record(fault.damage(staged, old=ground.old, random=ground.random))
            elif isinstance(fault, AdapterFault):
                self._record(fault.distort(staged / ADAPTER, base=ground.old))

    def start_old(self, running: HandedOn | None = None) -> Engine:
        """Start the engine on the old checkpoint, or take one that serves it already; see it answer rightly.

        Raises: EngineNotReady; HarnessError when it answers from other weights.
        """
        service, launch = self.service, self.ground.launch
        if running is None:
            engine = service.start(launch, expects=Answer.OLD)
        else:
            engine = service.take_over(running, launch, expects=Answer.OLD)
        service.wait_ready(engine, self.ground.scenario.rollout.ready_limit_s)
        if not service.answers_from(engine, Answer.OLD):
            raise HarnessError(f'"{engine.incarnation}" does not answer from the old checkpoint it was started on')
        service.serving = engine
        return engine

    # --- the steps ---

    def publish_new(self) -> None:
        """Put the new checkpoint where the engine reads it, the wrong way if the fault is one."""
        publication = self.publication
        fault = publication.fault
        how = "atomic" if fault is None else fault.name
        self._event(EventKind.PUBLISH_STARTED, version="new", how=how)
        if fault is None:
            if self._is_guarded_by(Guard.PREFLIGHT) and not self._preflight(publication.staged):
                return
            publication.publish_staged()
        else:
            acting = fault.start(publication.staged, publication.live, random=self.ground.random)
            self._acting.append(acting)
            self._record(acting.injected)
        self._event(EventKind.PUBLISH_ENDED, version="new", how=how)

    def start_rollout(self) -> None:
        """Move the service to what was published; with guards, only if they agree."""
        rollout = self._rollout
        self._event(EventKind.ROLLOUT_STARTED, how=rollout.how)
        launch = self.alter_launch()
        for fault in self.ground.scenario.faults:
            if isinstance(fault, CacheFault):
                self._record(fault.prove(self.ground.cache, old=self.ground.old, new=self.ground.new))
            elif isinstance(fault, CompileCacheFault) and launch.compile_cache is not None:
                cache, injected = fault.spoil(launch.compile_cache, random=self.ground.random)
                launch = replace(launch, compile_cache=cache)
                self._record(injected)
        if self.publication.fault is not None and self._is_guarded_by(Guard.PREFLIGHT):
            self._preflight(self.publication.live)
        if self._refused:
            for acting in self._acting:  # no engine is started that could find it: this is what pre-flight found
                self._record(acting.state())
        else:
            gated = self._is_guarded_by(Guard.CANARY_GATE)
            self._completed = self._roll(launch, rollout, gated=gated, is_faulty=True)
            if not self._completed and not self._refused:
                self._refused = "the new engine was not admitted"
        self._event(EventKind.ROLLOUT_ENDED, how=rollout.how, completed=self._completed, because=self._refused)

    def inject(self) -> Engine:
        """Let the scenario's live faults strike the engine that users are sent to, and return it.

        Raises: HarnessError when there is none.
        """
        engine = self.service.serving
        if engine is None:
            raise HarnessError("no engine serves that an incident could strike")
        self.incident.strike(engine, expects=Answer.NEW if self._completed else Answer.OLD)
        return engine

    def alter_launch(self) -> Launch:
        """Return the launch with every fault of its line in it, and record that they are."""
        launch, proofs = self._altered()
        for injected in proofs:
            self._record(injected)
        return launch

    def remedy(self) -> None:
        """Undo the fault as documented: whole checkpoint published atomically, cache purged, engine started anew."""
        ground = self.ground
        if ground.scenario.is_incident:
            self.incident.remedy(gated=ground.mode is Mode.GUARDED)
            return
        self._event(
            EventKind.REMEDY_STARTED, what="publish the undamaged checkpoint, purge the cache, start the engine anew"
        )
        for acting in self._acting:
            acting.finish(limit_s=0)  # an operator who repairs a rollout does not wait for the copy that spoilt it
        self.service.stop_failed()
        self.incident.finish()
        self.publication.repair()
        refused = self._refusals(self.publication.live, ground.launch) if self._is_guarded_by(Guard.PREFLIGHT) else []
        if ground.launch.weight_cache is not None:
            self._purge()
        if ground.launch.compile_cache is not None:
            self._left_spoilt = clear_compile_cache(ground.launch.compile_cache)
        gated = ground.mode is Mode.GUARDED
        completed = not refused and self._roll(
            ground.launch, self._rollout.as_remedy(beside=gated), gated=gated, is_faulty=False
        )
        self._is_remedied = completed
        self._event(EventKind.REMEDY_ENDED, what="rollout of the undamaged checkpoint", completed=completed, because="")
        self._undone = refused

    def prove_undone(self) -> None:
        """Prove that the remedy left the undamaged checkpoint where engines read it; digests take time, so it comes last."""
        self.incident.prove_undone()
        if self._undone is None:
            return
        live = self.publication.live.resolve()
        differing = self.publication.differing()
        because = (
            f"the live checkpoint is not the undamaged one: {', '.join(differing)}"
            if differing
            else f"the live checkpoint ({weights_id(live)}) has every file of the undamaged one, and no other"
        )
        names = [fault.name for fault in self.ground.scenario.faults if not isinstance(fault, LiveFault)]
        for name in names or [str(self._rollout.how)]:  # a reload alone may be what was wrong
            self._event(
                EventKind.FAULT_UNDONE,
                fault=name,
                proved=not differing and not self._left_spoilt,
                because=self._left_spoilt or because,
                refused=self._undone,
            )

    def hand_on(self) -> Engine | None:
        """Give away the engine that serves the undamaged new checkpoint, as it would be started for another scenario.

        None when there is no such engine, or when it has anything of this scenario's own: a cache, or a fault, also one
        that changed nothing that canaries see.
        """
        launch = self.ground.launch
        if not self._is_remedied or launch.weight_cache is not None or launch.compile_cache is not None:
            return None
        return self.service.give_away()

    def stop_all(self) -> None:
        """End everything that was started, whatever happened before."""
        for acting in self._acting:
            with contextlib.suppress(HarnessError, OSError):
                acting.finish(limit_s=0)
        with contextlib.ExitStack() as stack:  # what an engine leaves is undone once it has ended, and in any case
            stack.callback(self.incident.finish)
            self.service.stop_all()

    # --- parts ---

    @property
    def rollout_succeeded(self) -> bool:
        """Say whether the new engine was admitted."""
        return self._completed

    @property
    def _rollout(self) -> Rollout:
        scenario = self.ground.scenario
        return scenario.guarded_rollout if self.ground.mode is Mode.GUARDED else scenario.rollout

    def _is_guarded_by(self, guard: Guard) -> bool:
        return self.ground.mode is Mode.GUARDED and guard in self.ground.scenario.guards

    def _preflight(self, path: Path) -> bool:
        started = now_ns()
        findings = self._refusals(path, self._altered()[0])
        if findings:
            self._refused = "pre-flight refused the checkpoint"
            self._event(EventKind.GUARD_REFUSED, guard=Guard.PREFLIGHT, findings=findings)
            return False
        self._event(EventKind.GUARD_PASSED, guard=Guard.PREFLIGHT, took_s=seconds_between(started, now_ns()))
        return True

    def _refusals(self, path: Path, launch: Launch) -> list[dict[str, str]]:
        return preflight_refusals(path, launch, engine=self.ground.starter.identity())

    def _altered(self) -> tuple[Launch, list[Injected]]:
        serving = self.service.serving
        launch, proofs = replace(self.ground.launch, beside="" if serving is None else serving.endpoint), []
        for fault in self.ground.scenario.faults:
            if isinstance(fault, LaunchFault):
                launch, injected = fault.alter(launch)
                proofs.append(injected)
        return launch, proofs

    def _purge(self) -> None:
        report = purge.purge(self.ground.cache)
        self._event(EventKind.GUARD_ACTED, guard=Guard.PURGE_CACHE, did=f"removed {report}")

    def _roll(self, launch: Launch, rollout: Rollout, *, gated: bool, is_faulty: bool) -> bool:
        """Start an engine for the new checkpoint and admit traffic to it; say whether that came about."""
        service = self.service
        before = service.serving
        if rollout.is_in_place and before is not None:
            return self._reload(before, rollout, gated=gated)
        if rollout.how is How.RESTART and before is not None:
            service.stop(before, how="rollout")
        if self._is_guarded_by(Guard.PURGE_CACHE):
            self._purge()
        engine = service.start(launch, expects=Answer.NEW)
        racing: list[Racing] = []
        if is_faulty:
            for acting in self._acting:  # it has to go on while the engine starts
                self._record(acting.state())
            races = (fault for fault in self.ground.scenario.faults if isinstance(fault, StartRace))
            racing = [race.after_start(self.ground.cache) for race in races]
            self._acting += racing
            if all(step.action is not Action.INJECT for step in self.ground.scenario.timeline) and self.incident.faults:
                self.incident.strike(engine, expects=Answer.NEW)
        try:
            service.wait_ready(engine, rollout.ready_limit_s)
        except EngineNotReady:
            return False
        finally:
            for race in racing:
                race.engine_is_ready()
                self._record(race.state())
        if gated and not service.answers_from(engine, Answer.NEW):
            self._refused = "the canary gate refused the new engine"
            service.stop(engine, how="refused by the canary gate")
            return False
        service.admit(engine)
        service.replace(before)
        return True

    def _reload(self, engine: Engine, rollout: Rollout, *, gated: bool) -> bool:
        """Give other weights to the engine that serves; say whether the rollout came about."""
        for acting in self._acting:
            self._record(acting.state())
        self._refused = roll_in_place(engine, rollout, service=self.service, live=self.publication.live, is_gated=gated)
        return not self._refused

    def _record(self, injected: Injected) -> None:
        self._event(
            EventKind.FAULT_INJECTED,
            fault=injected.fault,
            fault_id=injected.fault_id,
            proved=injected.proved,
            because=injected.because,
            before=dict(injected.before),
            after=dict(injected.after),
        )

    def _event(self, kind: EventKind, **data: Any) -> None:
        self.ground.recorder.event("operator", kind, **data)
