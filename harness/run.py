"""Runs scenarios: the only place that knows in which order things are acquired, done and released."""

from __future__ import annotations

import platform
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from harness import sweep, watchdog
from harness.bare_start import BareStart, seen_at
from harness.checkpoint.manifest import read_checkpoint
from harness.checkpoint.models import default_cache, directory, smollm2
from harness.clock import Deadline, now_ns, seconds_between, wall_time
from harness.engine.choose import starter_for
from harness.engine.dev_api import reloadable
from harness.engine.engine import Engine, EngineIdentity, EngineSite, EngineStarter, Eventful
from harness.engine.launch import SERVED_MODEL_NAME, Launch
from harness.errors import HarnessError, LeftOver
from harness.faults.fault import Demanding
from harness.goldens import Goldens
from harness.ground import LIVE, Ground, compile_cache_of, weight_cache_of
from harness.handover import Handover
from harness.judge.claim import Claim, Context
from harness.judge.expectations import load_expectations
from harness.judge.moments import Detection
from harness.label import new_label, shared_memory_directory, work_directory
from harness.load.capacity import capacity_here
from harness.load.driver import LoadDriver
from harness.load.loaders import require_keepable
from harness.load.plan import make_plan
from harness.machine import Cores, command, commit, listed
from harness.narrator import Progress, narrator
from harness.observe.history import EventKind, Recorder
from harness.observe.probes import Observers
from harness.operations import Operations
from harness.report.store import TIMELINE_FINISHED, ScenarioRecord, create_run, declare, finish_run, judge_scenario
from harness.requirements import require
from harness.scenario import Mode, Scenario
from harness.service import Service
from harness.settings import Settings
from harness.timeline import Timeline

POLL_S = 0.1
DEEP_TOKENS = 200  # of a prompt that fills a block of the KV cache: 128 tokens on a CPU, 16 on a GPU
STOP_LIMIT_S = 20.0
SMOLLM2_FINE_TUNE_SEED = 2
MODEL_RATE_RPS = 1.0  # a 135 M model on one core answers 28 tokens/s alone: more would be a queue, not a rollout


class Run:
    """One run: an engine kind, a label, a results directory, and the scenarios in it. Use as a context manager."""

    def __init__(
        self, settings: Settings, *, progress: Progress, expectations: Path, starter: EngineStarter | None = None
    ) -> None:
        """Prepare a run; its engines come from `starter`, or from what the settings name when there is none."""
        self.settings = settings
        self._given_starter = starter
        self.progress = progress
        self.expectations = expectations
        self.label = new_label()
        self.api_key = secrets.token_urlsafe(24)
        self.cores = Cores.divided()
        self.records: list[ScenarioRecord] = []
        self._stack = ExitStack()
        self._handover = Handover()
        self._is_interrupted = False

    def __enter__(self) -> Run:
        require(self.settings)
        self.starter: EngineStarter = self._given_starter or starter_for(self.settings, progress=self.progress)
        self.work = work_directory(self.label)
        self.shared = shared_memory_directory(self.label)
        name = f"{wall_time()[:19].replace(':', '').replace('T', '-')}-{self.label.token}"
        try:
            self._stack.enter_context(watchdog.watch(self.label))
            self._stack.callback(self._end_left_overs)  # also after a second Ctrl-C in the middle of the clean-up
            for scratch in (self.work, self.shared):
                scratch.mkdir(mode=0o711)  # engines of other users pass through, nobody else finds what is in it
                self._stack.callback(sweep.remove_directory, scratch)
            self.site = EngineSite(
                run_label=str(self.label),
                log_directory=self.settings.results / name / "logs",
                work_directory=self.work / "engines",
                api_key=self.api_key,
                engine_cpus=self.cores.engine,
                memory_limit_bytes=round(self.settings.memory_gib * 1024**3),
            )
            self.starter.identity()  # what is missing is said before anything is made
            self._stack.callback(self.starter.close)
            self.starter.open(self.site)
            self.identity: EngineIdentity = self.starter.identity()
            self._goldens = Goldens(
                self.starter, self.identity, api_key=self.api_key, seed=self.settings.seed, progress=self.progress
            )
            self.directory = create_run(self.settings.results, name, self._description())
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if not self._is_interrupted:
                finish_run(self.directory)
        finally:
            self._stack.close()

    def _end_left_overs(self) -> None:
        left = sweep.find_of(self.label)
        if not left.is_empty():
            sweep.end(self.label)
            raise LeftOver(left.as_json())

    def scenario(self, scenario: Scenario, mode: Mode) -> ScenarioRecord:
        """Run one scenario in one mode and return it judged; what fails on the way is in its history.

        Raises: EnvironmentMissing; UsageError when the scenario cannot be run with these settings.
        """
        scenario = self._with_models(scenario)
        self._require_for_faults(scenario)
        if self.settings.old is None:  # a user's old checkpoint stays the old one
            scenario = self._handover.in_the_fitting_direction(scenario)
        require_keepable(
            scenario.load,
            seed=self.settings.seed,
            horizon_s=scenario.limit_s,
            cores=len(self.cores.load),
            capacity=capacity_here(),
        )
        try:
            ground, place = self._prepare_ground(scenario, mode, scenario.claims(mode), suffix=str(mode))
            try:
                self._play(ground, place)
            finally:
                record = self._release_ground(ground, place)
        except KeyboardInterrupt:
            self._is_interrupted = True
            raise
        self.records.append(record)
        self.progress(f"{scenario.name} [{mode}]: {record.verdict} (noticed at: {record.layer})")
        return record

    def start_only(self, scenario: Scenario, number: int) -> tuple[Detection, Path]:
        """Start the engine once on the faulty checkpoint, without load, and say who notices; for expectations.

        Raises: EnvironmentMissing; HarnessError when the fault did not prove itself or something else went wrong.
        """
        scenario = self._with_models(scenario)
        self._require_for_faults(scenario)
        ground, place = self._prepare_ground(scenario, Mode.UNGUARDED, (), suffix=f"start-{number}")
        start = BareStart.on(ground, self._handover, shared=self.work / "shared")
        try:
            start.carry_out()
        finally:
            start.operations.stop_all()
            self._release_ground(ground, place)
        return seen_at(place), place

    # --- parts, in order of use ---

    def _require_for_faults(self, scenario: Scenario) -> None:
        for fault in scenario.faults:
            if isinstance(fault, Demanding):
                fault.require(self.identity)

    def _prepare_ground(
        self, scenario: Scenario, mode: Mode, claims: tuple[Claim, ...], *, suffix: str
    ) -> tuple[Ground, Path]:
        """Build the checkpoints, measure what is right, declare the scenario and make its own directories."""
        begun = now_ns()
        launch_base = Launch(
            checkpoint_root=self.work,
            checkpoint_name=LIVE,
            max_model_len=self.settings.max_model_len,
            compile_cache=compile_cache_of(scenario, self.work / "compile_cache_of_goldens"),
            extra_arguments=(*self.settings.engine_arguments, *scenario.engine_arguments),
        )
        deep_tokens = 0
        if scenario.reloads:
            launch_base, deep_tokens = reloadable(launch_base), min(DEEP_TOKENS, launch_base.max_model_len - 16)
        old, new = scenario.old.build(default_cache()), scenario.new.build(default_cache())
        goldens = self._goldens.pair(old, new, launch_base, deep_tokens=deep_tokens)
        golden_s = seconds_between(begun, now_ns())
        known = load_expectations(self.expectations, self.identity.label).get(scenario.name)
        context = Context(
            scenario=scenario.name,
            engine_label=self.identity.label,
            expected_layers=() if known is None else known.layers,
            faults=tuple(fault.name for fault in scenario.faults),
        )
        place = declare(self.directory, scenario.declaration(), suffix, claims, context)
        work = self.work / place.name
        work.mkdir()
        cache = self.shared / place.name / "weight_cache"
        cache.mkdir(parents=True)
        launch = replace(
            launch_base,
            checkpoint_root=work / "checkpoints",
            weight_cache=weight_cache_of(scenario, cache),
            compile_cache=compile_cache_of(scenario, work / "compile_cache"),
        )
        ground = Ground(
            scenario=scenario,
            mode=mode,
            starter=self.starter,
            recorder=Recorder(place / "history.jsonl", on_event=narrator(self.progress, scenario.name, suffix)),
            goldens=goldens,
            old=old,
            new=new,
            work=work,
            cache=cache,
            launch=launch,
            api_key=self.api_key,
            random=Random(f"{self.settings.seed}:{scenario.name}"),
            deadline=Deadline.after(scenario.limit_s),
        )
        ground.recorder.event("runner", EventKind.PHASE_ENDED, phase="golden", took_s=round(golden_s, 2))
        return ground, place

    def _release_ground(self, ground: Ground, place: Path) -> ScenarioRecord:
        """Keep the logs, remove the scenario's directories, look for left-overs, and judge what was recorded."""
        self._collect_logs(place / "logs")
        self._look_for_left_overs(ground, ground.work, ground.cache.parent)
        ground.recorder.close()
        ground.recorder.require_written()
        return judge_scenario(place)

    def _play(self, ground: Ground, place: Path) -> None:
        """Acquire, carry out the timeline under load, release; an error of the harness becomes part of the history."""
        recorder = ground.recorder
        recorder.event("runner", EventKind.SCENARIO_STARTED, scenario=ground.scenario.name, mode=ground.mode)
        service = Service(ground)
        operations = Operations(ground, service)
        because = TIMELINE_FINISHED
        try:
            with ExitStack() as stack:
                stack.callback(self._timed, recorder, "engine", operations.stop_all)
                with self._phase(recorder, "prepare"):
                    driver = self._load(ground, place)
                    stack.callback(driver.close)
                    driver.spawn()
                    operations.prepare()
                with self._phase(recorder, "engine"):
                    engine = operations.start_old(self._handover.take(ground))
                with self._phase(recorder, "load start"):
                    observers = stack.enter_context(Observers(recorder))
                    if isinstance(self.starter, Eventful):
                        stack.enter_context(self.starter.watch_events(_container_recorder(recorder, engine)))
                    service.watcher = observers
                    observers.watch(engine.endpoint, engine.incarnation, self.api_key)
                    start_ns = driver.start(engine.endpoint, engine.incarnation)
                    for url in driver.web_ui_urls:
                        self.progress(f"{ground.scenario.name}: locust's own page, to look at while load runs: {url}")
                    service.traffic = driver
                recorder.event(
                    "load",
                    EventKind.LOAD_STARTED,
                    at_ns=start_ns,
                    plan_sha256=driver.plan.sha256,
                    schedule_sha256=driver.plan.schedule_sha256,
                    loaders=driver.loaders,
                    rate_rps=ground.scenario.load.rate_rps,
                    seed=self.settings.seed,
                    engine_cpus=list(self.cores.engine),
                    load_cpus=list(self.cores.load),
                )
                recorder.event(
                    "runner", EventKind.TRAFFIC_ADMITTED, incarnation=engine.incarnation, endpoint=engine.endpoint
                )
                with self._phase(recorder, "load"):
                    Timeline(ground, operations, start_ns).carry_out()
                    report = driver.stop(STOP_LIMIT_S)
                service.note_logs()
                recorder.event(
                    "load",
                    EventKind.LOAD_ENDED,
                    **{name: getattr(report, name) for name in report.__slots__},
                )
                with self._phase(recorder, "proof of undo"):
                    operations.prove_undone()
                self._handover.keep(ground, operations)
        except (HarnessError, OSError) as error:  # such as a disk that is full
            because = f"{type(error).__name__}: {error}"
            self.progress(f"{ground.scenario.name} [{ground.mode}]: {because}")
        recorder.event("runner", EventKind.SCENARIO_ENDED, because=because)

    def _load(self, ground: Ground, place: Path) -> LoadDriver:
        plan = make_plan(
            ground.scenario.load,
            seed=self.settings.seed,
            horizon_s=ground.scenario.limit_s,
            vocabulary_size=int(read_checkpoint(ground.old).config["vocab_size"]),
            canary_prompts=ground.goldens.old.prompts,
        )

        return LoadDriver(
            plan,
            directory=place / "load",
            api_key=self.api_key,
            model=SERVED_MODEL_NAME,
            cpus=self.cores.load,
            on_request=ground.keep_request,
            on_heartbeat=ground.keep_heartbeat,
            run_label=str(self.label),
            web_ui=self.settings.locust_web_ui,
        )

    def _look_for_left_overs(self, ground: Ground, *scratch: Path) -> None:
        """Release the scenario's own directories and look for anything else that outlived it."""
        for path in scratch:
            sweep.remove_directory(path)
        left = sweep.find_of(self.label)
        kept = self._handover.parts()
        things = {
            "containers": [name for name in left.containers if name not in kept],
            "processes": [str(pid) for pid in left.processes if str(pid) not in kept],
            "directories": [str(path) for path in scratch if path.exists()],
        }
        if any(things.values()):
            ground.recorder.event("runner", EventKind.LEFT_OVER, things=things)
        elif left.unanswered:
            ground.recorder.event("runner", EventKind.OBSERVER_FAILED, observer="left-overs", because=left.unanswered)
        else:
            ground.recorder.event("runner", EventKind.NOTHING_LEFT, checked=", ".join(things))

    def _collect_logs(self, target: Path) -> None:
        if self.site.log_directory.is_dir():
            for log in self.site.log_directory.iterdir():
                if log.is_file() and not log.name.startswith("golden-"):
                    shutil.move(str(log), target / log.name)

    def _with_models(self, scenario: Scenario) -> Scenario:
        """Replace the declared checkpoints by those the user asked for."""
        settings = self.settings
        rate_rps = settings.rate_rps
        if settings.old is not None and settings.new is not None:
            scenario = replace(scenario, old=directory(settings.old), new=directory(settings.new))
            rate_rps = rate_rps or MODEL_RATE_RPS
        elif settings.model == "smollm2":
            scenario = replace(scenario, old=smollm2(), new=smollm2(seed=SMOLLM2_FINE_TUNE_SEED))
            rate_rps = rate_rps or MODEL_RATE_RPS
        if settings.patience != 1:
            scenario = scenario.with_patience(settings.patience)
        return scenario if rate_rps is None else scenario.at_rate(rate_rps)

    def _description(self) -> dict[str, Any]:
        return {
            "engine_label": self.identity.label,
            "engine_kind": self.identity.kind,
            "engine_build": self.identity.build,
            "seed": self.settings.seed,
            "command": command(sys.argv),
            "commit": commit(),
            "started_at": wall_time(),
            "machine": {
                "processor": self.identity.hardware,
                "system": platform.platform(),
                "python": platform.python_version(),
                "engine_cores": listed(self.cores.engine),
                "load_cores": listed(self.cores.load),
            },
            "settings": self.settings.as_json(),
        }

    @contextmanager
    def _phase(self, recorder: Recorder, phase: str) -> Iterator[None]:
        started = now_ns()
        try:
            yield
        finally:
            took_s = round(seconds_between(started, now_ns()), 3)
            recorder.event("runner", EventKind.PHASE_ENDED, phase=phase, took_s=took_s)

    def _timed(self, recorder: Recorder, phase: str, act: Callable[[], None]) -> None:
        with self._phase(recorder, phase):
            act()


def _container_recorder(recorder: Recorder, first: Engine) -> Callable[[str, str, Mapping[str, str]], None]:
    """Record container events; an engine that was handed on goes by the name it has in this scenario."""
    parts = first.parts()

    def record(incarnation: str, action: str, attributes: Mapping[str, str]) -> None:
        name = first.incarnation if attributes["container"] in parts else incarnation
        recorder.event("docker", EventKind.CONTAINER, incarnation=name, action=action, attributes=dict(attributes))

    return record
