"""What an operator does in a rollout: publish, start, check, admit traffic, remedy; without and with guards."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.checkpoint.copy import private_copy
from harness.checkpoint.manifest import weights_id
from harness.clock import now_ns, poll_until, seconds_between
from harness.engine.engine import Engine, HandedOn
from harness.engine.launch import SERVED_MODEL_NAME, Launch
from harness.engine.rollout import How, Rollout
from harness.errors import EngineNotReady, HarnessError, WaitExpired
from harness.faults.fault import Acting, CacheFault, Damage, Injected, LaunchFault, PublishFault, Racing, StartRace
from harness.ground import LIVE, Ground, Traffic, Watcher
from harness.guards import preflight, publish, purge
from harness.guards.canary import Answer, Comparison, complete, prompt_logprobs_of, request_body
from harness.observe.history import EventKind
from harness.observe.logs import classify
from harness.observe.metrics import scrape
from harness.observe.signatures import ERROR
from harness.scenario import Guard, Mode

CANARY_LIMIT_S = 60.0
DRAIN_LIMIT_S = 15.0
WARM_UP_TOKENS = 8


@dataclass(slots=True)
class Operations:
    """Carries out the steps of one scenario and records what was done and seen."""

    ground: Ground
    traffic: Traffic | None = None
    watcher: Watcher | None = None
    serving: Engine | None = None
    _engines: list[Engine] = field(default_factory=list)
    _acting: list[Acting] = field(default_factory=list)
    _refused: str = ""
    _completed: bool = False
    _is_remedied: bool = False  # what serves was started as undamaged
    _died: set[str] = field(default_factory=set)
    _undone: list[dict[str, str]] | None = (
        None  # what pre-flight said about the repaired checkpoint, once it is repaired
    )
    _noted_lines: dict[str, int] = field(default_factory=dict)

    # --- before the load ---

    def prepare(self) -> None:
        """Lay out the old checkpoint where the engine reads it, and damage a private copy of the new one."""
        ground = self.ground
        self.root.mkdir(parents=True)
        if self._publish_fault is None:
            publish.publish(ground.old, self.root, name=LIVE)
        else:
            private_copy(ground.old, self.live)
        private_copy(ground.new, self.staged)
        for fault in ground.scenario.faults:
            if isinstance(fault, Damage):
                self._record(fault.damage(self.staged, old=ground.old, random=ground.random))

    def start_old(self, running: HandedOn | None = None) -> Engine:
        """Start the engine on the old checkpoint, or take one that serves it already; see it answer rightly.

        Raises: EngineNotReady; HarnessError when it answers from other weights.
        """
        if running is None:
            engine = self._start(self.ground.launch, expects=Answer.OLD)
        else:
            engine = running
            launch = {**self.ground.launch.as_json(), "handed_on": running.engine.incarnation}
            self._event(EventKind.ENGINE_STARTING, incarnation=engine.incarnation, expects=Answer.OLD, launch=launch)
            self._engines.append(engine)
        self._wait_ready(engine, self.ground.scenario.rollout.ready_limit_s)
        if not self._canary_is(engine, Answer.OLD):
            raise HarnessError(f'"{engine.incarnation}" does not answer from the old checkpoint it was started on')
        self.serving = engine
        return engine

    # --- the steps ---

    def publish_new(self) -> None:
        """Put the new checkpoint where the engine reads it, the wrong way if the fault is one."""
        fault = self._publish_fault
        how = "atomic" if fault is None else fault.name
        self._event(EventKind.PUBLISH_STARTED, version="new", how=how)
        if fault is None:
            if self._is_guarded_by(Guard.PREFLIGHT) and not self._preflight(self.staged):
                return
            publish.publish(self.staged, self.root, name=LIVE)
        else:
            acting = fault.start(self.staged, self.live, random=self.ground.random)
            self._acting.append(acting)
            self._record(acting.injected)
        self._event(EventKind.PUBLISH_ENDED, version="new", how=how)

    def start_rollout(self) -> None:
        """Move the service to what was published; with guards, only if they agree."""
        rollout = self._rollout
        self._event(EventKind.ROLLOUT_STARTED, how=rollout.how)
        launch = self.ground.launch
        for fault in self.ground.scenario.faults:
            if isinstance(fault, LaunchFault):
                launch, injected = fault.alter(launch)
                self._record(injected)
            elif isinstance(fault, CacheFault):
                self._record(fault.prove(self.ground.cache, old=self.ground.old, new=self.ground.new))
        if self._publish_fault is not None and self._is_guarded_by(Guard.PREFLIGHT):
            self._preflight(self.live)
        if self._refused:
            for acting in self._acting:  # no engine is started that could find it: this is what pre-flight found
                self._record(acting.state())
        else:
            gated = self._is_guarded_by(Guard.CANARY_GATE)
            self._completed = self._roll(launch, rollout, gated=gated, is_faulty=True)
            if not self._completed and not self._refused:
                self._refused = "the new engine was not admitted"
        self._event(EventKind.ROLLOUT_ENDED, how=rollout.how, completed=self._completed, because=self._refused)

    def remedy(self) -> None:
        """Undo the fault as documented: whole checkpoint published atomically, cache purged, engine started anew."""
        ground = self.ground
        self._event(
            EventKind.REMEDY_STARTED, what="publish the undamaged checkpoint, purge the cache, start the engine anew"
        )
        for acting in self._acting:
            acting.finish(limit_s=0)  # an operator who repairs a rollout does not wait for the copy that spoilt it
        self._release_failed()
        if self._publish_fault is None:
            publish.publish(ground.new, self.root, name=LIVE)
        else:
            repaired = ground.work / "repaired"
            private_copy(ground.new, repaired)
            publish.exchange(repaired, self.live)
        refused = preflight_refusals(self.live, ground.launch) if self._is_guarded_by(Guard.PREFLIGHT) else []
        if ground.launch.weight_cache is not None:
            self._purge()
        gated = ground.mode is Mode.GUARDED
        completed = not refused and self._roll(ground.launch, self._rollout, gated=gated, is_faulty=False)
        self._is_remedied = completed
        self._event(EventKind.REMEDY_ENDED, what="rollout of the undamaged checkpoint", completed=completed, because="")
        self._undone = refused

    def prove_undone(self) -> None:
        """Prove that the remedy left the undamaged checkpoint where engines read it; digests take time, so it comes last."""
        if self._undone is None:
            return
        served, wanted = weights_id(self.live.resolve()), weights_id(self.ground.new)
        for fault in self.ground.scenario.faults:
            self._event(
                EventKind.FAULT_UNDONE,
                fault=fault.name,
                proved=served == wanted,
                because=f"the live checkpoint has weights {served}, wanted {wanted}",
                refused=self._undone,
            )

    def check_serving(self, times: int) -> None:
        """Ask canaries of the engine that was admitted, if one was."""
        for _ in range(times):
            if self.serving is not None:
                self._canary_is(self.serving, Answer.NEW)

    def look_after_engines(self) -> None:
        """Note engines that ended without being asked to."""
        for engine in self._engines:
            code = engine.exit_code()
            if code is not None and engine.incarnation not in self._died:
                self._died.add(engine.incarnation)
                self._event(EventKind.ENGINE_DIED, incarnation=engine.incarnation, exit_code=code)
                self._note_log(engine)

    def note_logs(self) -> None:
        """Note what running engines have printed since they became ready."""
        for engine in self._engines:
            self._note_log(engine)

    def hand_on(self) -> Engine | None:
        """Give away the engine that serves the undamaged new checkpoint, as it would be started for another scenario.

        None when there is no such engine, or when it has anything of this scenario's own: a cache, or a fault, also one
        that changed nothing that canaries see.
        """
        engine = self.serving
        if engine is None or engine.exit_code() is not None:
            return None
        if not self._is_remedied or self.ground.launch.weight_cache is not None:
            return None
        self._engines.remove(engine)
        if self.watcher is not None:
            self.watcher.unwatch(engine.incarnation)
        self.serving = None
        return engine

    def stop_all(self) -> None:
        """End everything that was started, whatever happened before."""
        for acting in self._acting:
            with contextlib.suppress(HarnessError, OSError):
                acting.finish(limit_s=0)
        with contextlib.ExitStack() as stack:  # one that cannot be stopped must not keep the others running
            for engine in list(self._engines):
                stack.callback(self._stop, engine, how="scenario ended")

    # --- parts ---

    @property
    def root(self) -> Path:
        """Return the directory that is mounted into engines."""
        return self.ground.work / "checkpoints"

    @property
    def live(self) -> Path:
        """Return what engines are started on."""
        return self.root / LIVE

    @property
    def staged(self) -> Path:
        """Return the private, damaged copy of the new checkpoint."""
        return self.ground.work / "staged"

    @property
    def rollout_succeeded(self) -> bool:
        """Say whether the new engine was admitted."""
        return self._completed

    @property
    def _rollout(self) -> Rollout:
        scenario = self.ground.scenario
        return scenario.guarded_rollout if self.ground.mode is Mode.GUARDED else scenario.rollout

    @property
    def _publish_fault(self) -> PublishFault | None:
        return next((fault for fault in self.ground.scenario.faults if isinstance(fault, PublishFault)), None)

    def _is_guarded_by(self, guard: Guard) -> bool:
        return self.ground.mode is Mode.GUARDED and guard in self.ground.scenario.guards

    def _preflight(self, path: Path) -> bool:
        launch = self.ground.launch
        for fault in self.ground.scenario.faults:
            if isinstance(fault, LaunchFault):
                launch, _ = fault.alter(launch)
        started = now_ns()
        findings = preflight_refusals(path, launch)
        if findings:
            self._refused = "pre-flight refused the checkpoint"
            self._event(EventKind.GUARD_REFUSED, guard=Guard.PREFLIGHT, findings=findings)
            return False
        self._event(EventKind.GUARD_PASSED, guard=Guard.PREFLIGHT, took_s=seconds_between(started, now_ns()))
        return True

    def _purge(self) -> None:
        report = purge.purge(self.ground.cache)
        self._event(EventKind.GUARD_ACTED, guard=Guard.PURGE_CACHE, did=f"removed {report}")

    def _roll(self, launch: Launch, rollout: Rollout, *, gated: bool, is_faulty: bool) -> bool:
        """Start an engine for the new checkpoint and admit traffic to it; say whether that came about."""
        before = self.serving
        if rollout.how is How.RESTART and before is not None:
            self._stop(before, how="rollout")
            self.serving = None
        if self._is_guarded_by(Guard.PURGE_CACHE):
            self._purge()
        engine = self._start(launch, expects=Answer.NEW)
        racing: list[Racing] = []
        if is_faulty:
            for acting in self._acting:  # it has to go on while the engine starts
                self._record(acting.state())
            races = (fault for fault in self.ground.scenario.faults if isinstance(fault, StartRace))
            racing = [race.after_start(self.ground.cache) for race in races]
            self._acting += racing
        try:
            self._wait_ready(engine, rollout.ready_limit_s)
        except EngineNotReady:
            return False
        finally:
            for race in racing:
                race.engine_is_ready()
                self._record(race.state())
        if gated and not self._canary_is(engine, Answer.NEW):
            self._refused = "the canary gate refused the new engine"
            self._stop(engine, how="refused by the canary gate")
            return False
        self._admit(engine)
        if before is not None and before in self._engines:
            self._drain(before)
            self._stop(before, how="replaced")
        return True

    def _start(self, launch: Launch, *, expects: Answer) -> Engine:
        number = 1 + len(
            [e for e in self.ground.recorder.snapshot().of(EventKind.ENGINE_STARTING) if e.data["expects"] == expects]
        )
        incarnation = f"{expects}-{number}"
        self._event(EventKind.ENGINE_STARTING, incarnation=incarnation, expects=expects, launch=launch.as_json())
        engine = self.ground.starter.start(launch, incarnation=incarnation)
        self._engines.append(engine)
        return engine

    def _wait_ready(self, engine: Engine, limit_s: float) -> None:
        try:
            took_s = engine.wait_ready(min(limit_s, max(self.ground.deadline.remaining_s(), 1.0)))
        except EngineNotReady as error:
            self._died.add(engine.incarnation)
            self._event(
                EventKind.ENGINE_NOT_READY,
                incarnation=engine.incarnation,
                reason=error.reason,
                exit_code=error.engine_exit_code,
                log_lines=list(error.log_lines),
                log=error.log_path.name,
            )
            self._note_log(engine)
            raise
        self._event(EventKind.ENGINE_READY, incarnation=engine.incarnation, took_s=round(took_s, 2))
        self._note_log(engine)
        if self.watcher is not None:
            self.watcher.watch(engine.endpoint, engine.incarnation, self.ground.api_key)

    def _canary_is(self, engine: Engine, expected: Answer) -> bool:
        """Ask before any user does; afterwards decode once, since a fresh engine compiles at its first request."""
        prompts = self.ground.goldens.old.prompts
        limit_s = min(CANARY_LIMIT_S, max(self.ground.deadline.remaining_s(), 1.0))
        error = ""
        try:
            body = request_body(SERVED_MODEL_NAME, prompts)
            answer = complete(engine.endpoint, body, api_key=self.ground.api_key, limit_s=limit_s)
            seen: Comparison | None = self.ground.goldens.compare(prompt_logprobs_of(answer, prompts))
            warm_up = {**request_body(SERVED_MODEL_NAME, prompts[:1], max_tokens=WARM_UP_TOKENS)}
            complete(engine.endpoint, warm_up, api_key=self.ground.api_key, limit_s=limit_s)
        except (OSError, ValueError) as failure:
            seen, error = None, f"{type(failure).__name__}: {failure}"
        self._event(
            EventKind.CANARY_CHECKED,
            incarnation=engine.incarnation,
            answer=f"no answer ({error[:200]})" if seen is None else seen.answer,
            difference_old=None if seen is None else seen.difference_old,
            difference_new=None if seen is None else seen.difference_new,
        )
        return seen is not None and seen.answer is expected

    def _admit(self, engine: Engine) -> None:
        self.serving = engine
        if self.traffic is not None:
            self.traffic.admit(engine.endpoint, engine.incarnation)
        self._event(EventKind.TRAFFIC_ADMITTED, incarnation=engine.incarnation, endpoint=engine.endpoint)

    def _drain(self, engine: Engine) -> None:
        """Let the requests that an engine still works on come to their end."""

        def is_idle() -> bool | None:
            if engine.exit_code() is not None:
                return True  # a dead engine finishes nothing
            values = scrape(engine.endpoint, api_key=self.ground.api_key)
            return True if values.get("num_requests_running", 0) + values.get("num_requests_waiting", 0) == 0 else None

        with contextlib.suppress(WaitExpired):
            poll_until(is_idle, what="requests finished", limit_s=DRAIN_LIMIT_S, every_s=0.1)

    def _stop(self, engine: Engine, *, how: str) -> None:
        if self.watcher is not None:
            self.watcher.unwatch(engine.incarnation)
        self._engines.remove(engine)
        code = engine.stop()
        self._event(EventKind.ENGINE_STOPPED, incarnation=engine.incarnation, exit_code=code, how=how)

    def _release_failed(self) -> None:
        for engine in list(self._engines):
            if engine is not self.serving:
                self._stop(engine, how="failed")

    def _note_log(self, engine: Engine) -> None:
        """Turn the log lines that name a problem into events."""
        try:
            text = engine.log_path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return
        noted = self._noted_lines.get(engine.incarnation, 0)
        for line in classify(text):
            if line.weight == ERROR and line.number > noted:
                self._noted_lines[engine.incarnation] = line.number
                self._event(
                    EventKind.LOG_LINE,
                    incarnation=engine.incarnation,
                    **{"class": line.klass, "line": line.text[:400], "fault_ids": list(line.fault_ids)},
                )

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


def preflight_refusals(path: Path, launch: Launch) -> list[dict[str, str]]:
    """Return what pre-flight finds that stops a rollout; a mere risk does not."""
    findings = preflight.check(path.resolve(), dtype=launch.dtype, arguments=launch.extra_arguments, read_tensors=True)
    return [
        {"id": f.id, "severity": f.severity, "seen": f.seen, "expected": f.expected, "where": f.where}
        for f in findings
        if f.severity != "risk"
    ]
