"""Plays one scenario: an engine on the old checkpoint, load on it, the timeline, and all of that released again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.checkpoint.manifest import read_checkpoint
from harness.clock import now_ns, seconds_between
from harness.engine.engine import Engine, Eventful
from harness.errors import HarnessError
from harness.ground import Ground
from harness.guards.canary import pass_count
from harness.handover import Handover
from harness.label import RunLabel
from harness.load.driver import LoadDriver
from harness.load.plan import make_plan
from harness.machine import Cores
from harness.narrator import Progress
from harness.observe.history import EventKind, Recorder
from harness.observe.probes import Observers
from harness.operations import Operations
from harness.report.store import TIMELINE_FINISHED
from harness.service import Service
from harness.settings import Settings
from harness.timeline import Timeline

STOP_LIMIT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """Acquires what one scenario needs, carries it out and releases everything; what happens is in its history."""

    ground: Ground
    place: Path  # of the scenario in the results
    settings: Settings
    cores: Cores
    label: RunLabel
    handover: Handover
    progress: Progress

    def carry_out(self) -> None:
        """Carry out the timeline under load; an error of the harness becomes part of the history."""
        ground, recorder = self.ground, self.ground.recorder
        recorder.event("runner", EventKind.SCENARIO_STARTED, scenario=ground.scenario.name, mode=ground.mode)
        service = Service(ground)
        operations = Operations(ground, service)
        because = TIMELINE_FINISHED
        try:
            with ExitStack() as stack:
                stack.callback(self._timed, "engine", operations.stop_all)
                with self._phase("prepare"):
                    driver = self._load()
                    stack.callback(driver.close)
                    driver.spawn()
                    operations.prepare()
                with self._phase("engine"):
                    engine = operations.start_old(self.handover.take(ground))
                with self._phase("load start"):
                    observers = stack.enter_context(Observers(recorder))
                    if isinstance(ground.starter, Eventful):
                        stack.enter_context(ground.starter.watch_events(_container_recorder(recorder, engine)))
                    service.watcher = observers
                    observers.watch(engine.endpoint, engine.incarnation, ground.api_key)
                    start_ns = driver.start(engine.endpoint, engine.incarnation)
                    for url in driver.web_ui_urls:
                        self.progress(f"{ground.scenario.name}: locust's own page, to look at while load runs: {url}")
                    service.traffic = driver
                self._note_load(driver, start_ns)
                recorder.event(
                    "runner", EventKind.TRAFFIC_ADMITTED, incarnation=engine.incarnation, endpoint=engine.endpoint
                )
                with self._phase("load"):
                    Timeline(ground, operations, start_ns).carry_out()
                    report = driver.stop(STOP_LIMIT_S)
                service.note_logs()
                recorder.event(
                    "load",
                    EventKind.LOAD_ENDED,
                    **{name: getattr(report, name) for name in report.__slots__},
                )
                with self._phase("proof of undo"):
                    operations.prove_undone()
                self.handover.keep(ground, operations)
        except (HarnessError, OSError) as error:  # such as a disk that is full
            because = f"{type(error).__name__}: {error}"
            self.progress(f"{ground.scenario.name} [{ground.mode}]: {because}")
        recorder.event("runner", EventKind.SCENARIO_ENDED, because=because)

    def _load(self) -> LoadDriver:
        ground = self.ground
        plan = make_plan(
            ground.scenario.load,
            seed=self.settings.seed,
            horizon_s=ground.scenario.limit_s,
            vocabulary_size=int(read_checkpoint(ground.old).config["vocab_size"]),
            canary_prompts=ground.goldens.old.prompts,
        )
        return LoadDriver(
            plan,
            directory=self.place / "load",
            api_key=ground.api_key,
            model=ground.launch.asked_model,
            cpus=self.cores.load,
            on_request=ground.keep_request,
            on_heartbeat=ground.keep_heartbeat,
            run_label=str(self.label),
            web_ui=self.settings.locust_web_ui,
        )

    def _note_load(self, driver: LoadDriver, start_ns: int) -> None:
        self.ground.recorder.event(
            "load",
            EventKind.LOAD_STARTED,
            at_ns=start_ns,
            plan_sha256=driver.plan.sha256,
            schedule_sha256=driver.plan.schedule_sha256,
            loaders=driver.loaders,
            canary_passes=pass_count(driver.plan.canary_prompts),
            rate_rps=self.ground.scenario.load.rate_rps,
            seed=self.settings.seed,
            engine_cpus=list(self.cores.engine),
            load_cpus=list(self.cores.load),
        )

    @contextmanager
    def _phase(self, phase: str) -> Iterator[None]:
        started = now_ns()
        try:
            yield
        finally:
            took_s = round(seconds_between(started, now_ns()), 3)
            self.ground.recorder.event("runner", EventKind.PHASE_ENDED, phase=phase, took_s=took_s)

    def _timed(self, phase: str, act: Callable[[], None]) -> None:
        with self._phase(phase):
            act()


def _container_recorder(recorder: Recorder, first: Engine) -> Callable[[str, str, Mapping[str, str]], None]:
    """Record container events; an engine that was handed on goes by the name it has in this scenario."""
    parts = first.parts()

    def record(incarnation: str, action: str, attributes: Mapping[str, str]) -> None:
        name = first.incarnation if attributes["container"] in parts else incarnation
        recorder.event("docker", EventKind.CONTAINER, incarnation=name, action=action, attributes=dict(attributes))

    return record
