"""The service of one scenario: its engines, and the one that users are sent to."""

from __future__ import annotations

import contextlib
import signal
from dataclasses import dataclass, field
from typing import Any

from harness.clock import now_ns, poll_until, seconds_between
from harness.engine.engine import Engine, HandedOn
from harness.engine.launch import Launch
from harness.errors import EngineNotReady, WaitExpired
from harness.ground import Ground, Traffic, Watcher
from harness.guards.canary import Answer, Comparison
from harness.guards.canary_pass import ask, check_stream
from harness.guards.engine_api import EngineApi
from harness.observe.history import EventKind
from harness.observe.logs import classify
from harness.observe.metrics import scrape
from harness.observe.probes import health_status
from harness.observe.signatures import ERROR

CANARY_LIMIT_S = 60.0
DRAIN_LIMIT_S = 15.0
HEALTH_LIMIT_S = 5.0


@dataclass(slots=True)
class Service:
    """Starts, asks, admits and stops engines, and records what was seen of them."""

    ground: Ground
    traffic: Traffic | None = None
    watcher: Watcher | None = None
    serving: Engine | None = None
    _engines: list[Engine] = field(default_factory=list)
    _died: set[str] = field(default_factory=set)
    _noted_lines: dict[str, int] = field(default_factory=dict)

    def start(self, launch: Launch, *, expects: Answer) -> Engine:
        """Start an engine and return at once; it is stopped with the others.

        Raises: HarnessError when nothing could be started.
        """
        started = self.ground.recorder.snapshot().of(EventKind.ENGINE_STARTING)
        incarnation = f"{expects}-{1 + len([event for event in started if event.data['expects'] == expects])}"
        self._event(EventKind.ENGINE_STARTING, incarnation=incarnation, expects=expects, launch=launch.as_json())
        engine = self.ground.starter.start(launch, incarnation=incarnation)
        self._engines.append(engine)
        return engine

    def take_over(self, running: HandedOn, launch: Launch, *, expects: Answer) -> Engine:
        """Make an engine that another scenario left running one of this service's own."""
        data = {**launch.as_json(), "handed_on": running.engine.incarnation}
        self._event(EventKind.ENGINE_STARTING, incarnation=running.incarnation, expects=expects, launch=data)
        self._engines.append(running)
        return running

    def wait_ready(self, engine: Engine, limit_s: float) -> None:
        """Wait until an engine is ready, and begin to watch it.

        Raises: EngineNotReady, once what its log says is recorded.
        """
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

    def answers_from(self, engine: Engine, expected: Answer, *, limit_s: float = CANARY_LIMIT_S) -> bool:
        """Ask before any user does: every canary prompt, then one stream, at which a fresh engine also compiles."""
        goldens, model = self.ground.goldens, self.ground.launch.asked_model
        limit_s = min(limit_s, max(self.ground.deadline.remaining_s(), 1.0))
        api = EngineApi(url=engine.endpoint, api_key=self.ground.api_key, limit_s=limit_s)
        seen: Comparison | None = None
        answer = ""
        told: dict[str, int] = {}
        try:
            seen = goldens.compare(ask(api, model, goldens.old.prompts, rotation=None).rows)
            answer = str(seen.answer)
            streamed = check_stream(api, model, goldens.new if expected is Answer.NEW else goldens.old)
            if seen.answer is expected and streamed.because:
                answer = f"broken stream ({streamed.because[:200]})"
        except (OSError, ValueError) as failure:
            answer = f"no answer ({type(failure).__name__}: {failure}"[:211] + ")"
            told["health"] = health_status(engine.endpoint, limit_s=HEALTH_LIMIT_S)
        self._event(
            EventKind.CANARY_CHECKED,
            incarnation=engine.incarnation,
            answer=answer,
            difference_old=None if seen is None else seen.difference_old,
            difference_new=None if seen is None else seen.difference_new,
            **told,
        )
        return answer == expected

    def admit(self, engine: Engine) -> None:
        """Send users to this engine from now on."""
        self.serving = engine
        if self.traffic is not None:
            self.traffic.admit(engine.endpoint, engine.incarnation)
        self._event(EventKind.TRAFFIC_ADMITTED, incarnation=engine.incarnation, endpoint=engine.endpoint)

    def replace(self, before: Engine | None) -> None:
        """Let an engine that no user is sent to any more finish its requests, and stop it, if it still runs."""
        if before is not None and before in self._engines:
            self._drain(before)
            self.stop(before, how="replaced")

    def stop(self, engine: Engine, *, how: str) -> None:
        """End an engine and record how it ended, and how long it took when it did not listen."""
        if self.watcher is not None:
            self.watcher.unwatch(engine.incarnation)
        self._engines.remove(engine)
        if engine is self.serving:
            self.serving = None
        was_running, asked_ns = engine.exit_code() is None, now_ns()
        code = engine.stop()
        took_s = round(seconds_between(asked_ns, now_ns()), 3)
        is_killed = was_running and code == -signal.SIGKILL
        because = (
            f"it had not ended when its time to end was over, and was killed after {took_s:g} s" if is_killed else ""
        )
        data = {"exit_code": code, "how": how, "took_s": took_s, "because": because}
        self._event(EventKind.ENGINE_STOPPED, incarnation=engine.incarnation, **data)

    def stop_failed(self) -> None:
        """End every engine that users are not sent to."""
        for engine in list(self._engines):
            if engine is not self.serving:
                self.stop(engine, how="failed")

    def stop_all(self) -> None:
        """End every engine, also when one of them cannot be stopped."""
        with contextlib.ExitStack() as stack:
            for engine in list(self._engines):
                stack.callback(self.stop, engine, how="scenario ended")

    def give_away(self) -> Engine | None:
        """Return the engine that users are sent to, which then is no part of this service; None if it has ended."""
        engine = self.serving
        if engine is None or engine.exit_code() is not None:
            return None
        self._engines.remove(engine)
        if self.watcher is not None:
            self.watcher.unwatch(engine.incarnation)
        self.serving = None
        return engine

    def look_after(self) -> None:
        """Record engines that ended without being asked to."""
        for engine in self._engines:
            code = engine.exit_code()
            if code is not None and engine.incarnation not in self._died:
                self._died.add(engine.incarnation)
                self._event(EventKind.ENGINE_DIED, incarnation=engine.incarnation, exit_code=code)
                self._note_log(engine)

    def note_logs(self) -> None:
        """Record what running engines have printed since they became ready."""
        for engine in self._engines:
            self._note_log(engine)

    def _drain(self, engine: Engine) -> None:
        """Let the requests that an engine still works on come to their end."""

        def is_idle() -> bool | None:
            if engine.exit_code() is not None:
                return True  # a dead engine finishes nothing
            values = scrape(engine.endpoint, api_key=self.ground.api_key)
            if "num_requests_running" not in values:  # its statistics are off: it gets the whole limit
                return None
            return True if values["num_requests_running"] + values.get("num_requests_waiting", 0) == 0 else None

        with contextlib.suppress(WaitExpired):
            poll_until(is_idle, what="requests finished", limit_s=DRAIN_LIMIT_S, every_s=0.1)

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

    def _event(self, kind: EventKind, **data: Any) -> None:
        self.ground.recorder.event("operator", kind, **data)
