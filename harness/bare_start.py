"""One start of an engine on a fault, without load: who notices is what an expectation is made of."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from harness import reuse
from harness.errors import FaultNotProved
from harness.faults.old_server import PortOfOldServer
from harness.ground import Ground
from harness.guards.canary import Answer
from harness.handover import Handover
from harness.judge.detection import RIGHT_FOR_HARMLESS, Detection, detection
from harness.observe.history import EventKind, load_history
from harness.operations import Operations
from harness.scenario import Action
from harness.service import Service

OBSERVE_LIMIT_S = 30.0  # for somebody to notice an incident


@dataclass(frozen=True, slots=True)
class BareStart:
    """Carries out a scenario up to its remedy and asks canaries, with an engine handed on where the fault allows it."""

    ground: Ground
    service: Service
    operations: Operations
    handover: Handover

    @classmethod
    def on(cls, ground: Ground, handover: Handover, *, shared: Path) -> BareStart:
        """Make it; engines that several faults can share serve from a directory below `shared`."""
        if reuse.can_share(ground):
            ground = replace(ground, launch=replace(ground.launch, checkpoint_root=shared / "checkpoints"))
        service = Service(ground)
        return cls(ground, service, Operations(ground, service), handover)

    def carry_out(self) -> None:
        """Start what the fault needs, inject it, and ask as many canaries as prove a fault harmless.

        Raises: HarnessError when nothing serves that a live fault could strike.
        """
        operations, scenario = self.operations, self.ground.scenario
        operations.prepare()
        running = self.handover.take(self.ground)
        if self._needs_old():
            operations.start_old(running)
        for step in scenario.timeline:
            if step.action is Action.PUBLISH:
                operations.publish_new()
            elif step.action is Action.START_ROLLOUT:
                operations.start_rollout()
                self._ask()
            elif step.action is Action.INJECT:
                operations.incident.observe(operations.inject(), limit_s=OBSERVE_LIMIT_S)
        is_struck = any(step.action is Action.INJECT for step in scenario.timeline)
        if reuse.can_share(self.ground) and operations.rollout_succeeded and not is_struck:
            self._hand_on()

    def _ask(self) -> None:
        service = self.service
        for _ in range(RIGHT_FOR_HARMLESS):
            if service.serving is not None:
                service.answers_from(service.serving, Answer.NEW if self.operations.rollout_succeeded else Answer.OLD)

    def _needs_old(self) -> bool:
        scenario, launch = self.ground.scenario, self.ground.launch
        is_beside = any(isinstance(fault, PortOfOldServer) for fault in scenario.faults)
        is_struck_first = scenario.timeline[0].action is Action.INJECT
        has_cache = launch.weight_cache is not None or launch.compile_cache is not None
        return has_cache or is_beside or is_struck_first or scenario.rollout.is_in_place

    def _hand_on(self) -> None:
        reloaded = self.service.give_away()
        if reloaded is not None and reuse.take_back(reloaded, self.ground, self.operations.publication.root):
            self.handover.hold(reloaded, self.ground, source=self.ground.old)
        elif reloaded is not None:
            reloaded.stop()


def seen_at(place: Path) -> Detection:
    """Return who noticed the fault of a start that is over.

    Raises: FaultNotProved when the fault did not prove itself, or the sign of it may have had another cause.
    """
    history = load_history(place / "history.jsonl")
    unproved = [e.data["because"] for e in history.of(EventKind.FAULT_INJECTED) if not e.data["proved"]]
    if unproved:
        raise FaultNotProved(f'"{place.name}": {"; ".join(unproved)}; evidence: {place / "history.jsonl"}')
    seen = detection(history)
    if seen.doubt:
        raise FaultNotProved(f'"{place.name}": {seen.because}; but {seen.doubt}; evidence: {place}')
    return seen
