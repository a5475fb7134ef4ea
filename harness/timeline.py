"""The timeline of one scenario: carry out each step when it is due, then watch until service is back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from harness.clock import now_ns, pause, poll_until, seconds_between
from harness.errors import WaitExpired
from harness.ground import Ground
from harness.judge.detection import WITNESSES_S, detection
from harness.judge.latency import REQUESTS_PER_WINDOW_MIN
from harness.judge.moments import Layer, Window, recovery_at_ns, requests_in, service_changed
from harness.observe.history import EventKind
from harness.operations import Operations
from harness.scenario import Action, Step

POLL_S = 0.1
ENOUGH_LIMIT_S = 60.0  # beyond the planned time, for requests that a claim needs


@dataclass(frozen=True, slots=True)
class Timeline:
    """Paces the operations of a scenario under load that began at `start_ns`."""

    ground: Ground
    operations: Operations
    start_ns: int

    def carry_out(self) -> None:
        """Carry out every step, wait until service is back, and let the load go on for its tail."""
        for step in self.ground.scenario.timeline:
            self._carry_out(step)
        self._await_recovery()
        pause(min(self.ground.scenario.load.tail_s, self.ground.deadline.remaining_s()))
        self._await_enough(Window.AFTER)

    def _carry_out(self, step: Step) -> None:
        operations = self.operations
        if step.at_s is not None:
            self._wait(lambda: None, limit_s=step.at_s - seconds_between(self.start_ns, now_ns()))
        if step.after_detection_limit_s is not None:
            self._await_detection(step.after_detection_limit_s)
        if step.action is Action.PUBLISH:
            self._await_enough(Window.BEFORE)
            operations.publish_new()
        elif step.action is Action.START_ROLLOUT:
            operations.start_rollout()
        elif step.action is Action.INJECT:
            self._await_enough(Window.BEFORE)
            operations.inject()
        elif not self._needs_no_remedy():
            operations.remedy()

    def _needs_no_remedy(self) -> bool:
        went_well = self.operations.rollout_succeeded or self.ground.scenario.is_incident
        return went_well and detection(self.ground.recorder.snapshot()).layer is Layer.HARMLESS

    def _await_detection(self, limit_s: float) -> None:
        recorder = self.ground.recorder

        def noticed() -> bool | None:
            return None if detection(recorder.snapshot()).layer is Layer.NEVER else True

        is_cut = self.ground.deadline.remaining_s() < limit_s
        self._wait(noticed, limit_s=limit_s)
        so_far = recorder.snapshot()
        if so_far.first(EventKind.INCIDENT_STARTED) is not None or detection(so_far).layer is Layer.CLIENT:
            self._wait(lambda: None, limit_s=WITNESSES_S)  # others may notice what a client saw first
        seen = detection(recorder.snapshot())
        recorder.event("runner", EventKind.DETECTION_SEEN, layer=seen.layer, because=seen.because, is_cut=is_cut)

    def _await_recovery(self) -> None:
        ground = self.ground
        scenario, seen = ground.scenario, ground.recorder.snapshot()
        limit_s = scenario.load.limits.total_s + 10 / max(scenario.load.canary_rate_rps, 0.1)
        claimed_s = [float(c.parameters["within_s"]) for c in scenario.claims(ground.mode) if c.name == "recovered"]
        begun = service_changed(seen)
        if claimed_s and begun is not None:  # what is claimed can only be denied by looking as long as that
            limit_s = max(limit_s, max(claimed_s) - seconds_between(begun.at_ns, now_ns()))
        self._wait(lambda: recovery_at_ns(ground.recorder.snapshot()), limit_s=limit_s)
        recovered = recovery_at_ns(ground.recorder.snapshot())
        if recovered is not None:
            ground.recorder.event("runner", EventKind.RECOVERY_SEEN, at_ns=recovered)

    def _await_enough(self, window: Window) -> None:
        """Let the load go on until a window holds as many requests as the claims about latency need."""
        ground = self.ground
        wanted = [
            int(claim.parameters["windows"]) * REQUESTS_PER_WINDOW_MIN
            for claim in ground.scenario.claims(ground.mode)
            if claim.name == "latency_back_in_band"
        ]
        if not wanted or (window is Window.AFTER and recovery_at_ns(ground.recorder.snapshot()) is None):
            return

        def enough() -> bool | None:
            return True if len(requests_in(ground.recorder.snapshot(), window, canaries=False)) >= max(wanted) else None

        self._wait(enough, limit_s=ENOUGH_LIMIT_S)

    def _wait(self, ask: Callable[[], Any], *, limit_s: float) -> None:
        """Wait for an answer or for the limit, whichever comes first, looking after the engines meanwhile."""

        def look() -> Any:
            service = self.operations.service
            service.look_after()
            self.ground.recorder.require_written()
            if service.traffic is not None:  # without it nobody notices anything, and nothing recovers
                service.traffic.require_running()
            return ask()

        limit_s = min(limit_s, self.ground.deadline.remaining_s())
        if limit_s > 0:
            try:
                poll_until(look, what="next step", limit_s=limit_s, every_s=POLL_S)
            except WaitExpired:
                return
