"""Runs scenarios: the only place that knows in which order things are acquired, done and released."""

from __future__ import annotations

import os
import platform
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from harness import sweep, watchdog
from harness.checkpoint.manifest import read_checkpoint, weights_id
from harness.checkpoint.models import default_cache, directory, smollm2
from harness.clock import Deadline, now_ns, pause, poll_until, seconds_between, wall_time
from harness.engine.choose import starter_for
from harness.engine.engine import EngineIdentity, EngineSite, EngineStarter
from harness.engine.launch import SERVED_MODEL_NAME, Launch
from harness.errors import HarnessError, LeftOver, WaitExpired
from harness.guards.canary import Golden, GoldenPair
from harness.judge.claims import Context
from harness.judge.expectations import load_expectations
from harness.judge.moments import Layer, detection, recovery_at_ns
from harness.label import new_label, shared_memory_directory, work_directory
from harness.load.driver import LoadDriver
from harness.load.plan import make_plan
from harness.observe.golden import GoldenRequest, canary_prompts, choose_pair, golden_key, measure_golden
from harness.observe.history import Event, EventKind, Recorder, Request
from harness.observe.probes import Observers
from harness.operations import Ground, Operations, weight_cache_of
from harness.report.store import ScenarioRecord, create_run, declare, finish_run, judge_scenario
from harness.scenario import Action, Mode, Scenario, Step
from harness.settings import Settings

POLL_S = 0.1
STOP_LIMIT_S = 20.0
SMOLLM2_FINE_TUNE_SEED = 2
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cores:
    """Which processor cores the engine and the load generator get; empty means no pinning."""

    engine: tuple[int, ...]
    load: tuple[int, ...]

    @classmethod
    def divided(cls) -> Cores:
        """Give the last core to the load and the others to the engine, where there are two or more."""
        cores = tuple(sorted(os.sched_getaffinity(0)))
        return cls(engine=cores[:-1], load=cores[-1:]) if len(cores) > 1 else cls(engine=(), load=())


class Run:
    """One run: an engine kind, a label, a results directory, and the scenarios in it. Use as a context manager."""

    def __init__(self, settings: Settings, *, progress: Progress, expectations: Path) -> None:
        self.settings = settings
        self.progress = progress
        self.expectations = expectations
        self.label = new_label()
        self.api_key = secrets.token_urlsafe(24)
        self.cores = Cores.divided()
        self.records: list[ScenarioRecord] = []
        self._stack = ExitStack()
        self._goldens: dict[str, Golden] = {}

    def __enter__(self) -> Run:
        self.starter: EngineStarter = starter_for(self.settings, progress=self.progress)
        self.work = work_directory(self.label)
        self.shared = shared_memory_directory(self.label)
        name = f"{wall_time()[:19].replace(':', '').replace('T', '-')}-{self.label.token}"
        try:
            self._stack.enter_context(watchdog.watch(self.label))
            for scratch in (self.work, self.shared):
                scratch.mkdir(mode=0o755)
                self._stack.callback(shutil.rmtree, scratch, ignore_errors=True)
            self.site = EngineSite(
                run_label=str(self.label),
                log_directory=self.settings.results / name / "logs",
                work_directory=self.work / "engines",
                api_key=self.api_key,
                engine_cpus=self.cores.engine,
            )
            self.starter.identity()  # what is missing is said before anything is made
            self._stack.callback(self.starter.close)
            self.starter.open(self.site)
            self.identity: EngineIdentity = self.starter.identity()
            self.directory = create_run(self.settings.results, name, self._description())
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            finish_run(self.directory)
        finally:
            self._stack.close()
        left = sweep.find_of(self.label)
        if not left.is_empty():
            sweep.end(self.label)
            raise LeftOver(left.as_json())

    def scenario(self, scenario: Scenario, mode: Mode) -> ScenarioRecord:
        """Run one scenario in one mode and return it judged; what fails on the way is in its history.

        Raises: EnvironmentMissing; UsageError when the scenario cannot be run with these settings.
        """
        begun = now_ns()
        scenario = self._with_models(scenario)
        launch_base = Launch(checkpoint_root=self.work, checkpoint_name="live")
        old, new = scenario.old.build(default_cache()), scenario.new.build(default_cache())
        goldens = self._golden_pair(old, new, launch_base)
        golden_s = seconds_between(begun, now_ns())
        known = load_expectations(self.expectations, self.identity.label).get(scenario.name)
        context = Context(
            scenario=scenario.name,
            engine_label=self.identity.label,
            expected_layers=() if known is None else known.layers,
        )
        place = declare(self.directory, scenario.declaration(), mode, scenario.claims(mode), context)
        work = self.work / place.name
        work.mkdir()
        cache = self.shared / place.name / "weight_cache"
        cache.mkdir(parents=True)
        ground = Ground(
            scenario=scenario,
            mode=mode,
            starter=self.starter,
            recorder=Recorder(place / "history.jsonl", on_event=_narrator(self.progress, scenario.name, mode)),
            goldens=goldens,
            old=old,
            new=new,
            work=work,
            cache=cache,
            launch=replace(
                launch_base, checkpoint_root=work / "checkpoints", weight_cache=weight_cache_of(scenario, cache)
            ),
            api_key=self.api_key,
            random=Random(f"{self.settings.seed}:{scenario.name}"),
            deadline=Deadline.after(scenario.limit_s),
        )
        ground.recorder.event("runner", EventKind.PHASE_ENDED, phase="golden", took_s=round(golden_s, 2))
        self._play(ground, place)
        self._collect_logs(place / "logs")
        self._look_for_left_overs(ground, work, self.shared / place.name)
        ground.recorder.close()
        record = judge_scenario(place)
        self.records.append(record)
        self.progress(f"{scenario.name} [{mode}]: {record.verdict} (noticed at: {record.layer})")
        return record

    # --- parts, in order of use ---

    def _play(self, ground: Ground, place: Path) -> None:
        """Acquire, carry out the timeline under load, release; an error of the harness becomes part of the history."""
        recorder = ground.recorder
        recorder.event("runner", EventKind.SCENARIO_STARTED, scenario=ground.scenario.name, mode=ground.mode)
        operations = Operations(ground)
        because = "timeline finished"
        try:
            with ExitStack() as stack:
                stack.callback(self._timed, recorder, "engine", operations.stop_all)
                with self._phase(recorder, "prepare"):
                    driver = self._load(ground, place)
                    stack.callback(driver.close)
                    driver.spawn()
                    operations.prepare()
                with self._phase(recorder, "engine"):
                    engine = operations.start_old()
                with self._phase(recorder, "load start"):
                    observers = stack.enter_context(Observers(recorder))
                    operations.watcher = observers
                    observers.watch(engine.endpoint, engine.incarnation, self.api_key)
                    start_ns = driver.start(engine.endpoint, engine.incarnation)
                    operations.traffic = driver
                recorder.event(
                    "load",
                    EventKind.LOAD_STARTED,
                    at_ns=start_ns,
                    plan_sha256=driver.plan.sha256,
                    rate_rps=ground.scenario.load.rate_rps,
                    seed=self.settings.seed,
                    engine_cpus=list(self.cores.engine),
                    load_cpus=list(self.cores.load),
                )
                recorder.event(
                    "runner", EventKind.TRAFFIC_ADMITTED, incarnation=engine.incarnation, endpoint=engine.endpoint
                )
                with self._phase(recorder, "load"):
                    for step in ground.scenario.timeline:
                        self._carry_out(step, ground, operations, start_ns)
                    self._await_recovery(ground, operations)
                    pause(min(ground.scenario.load.tail_s, ground.deadline.remaining_s()))
                    report = driver.stop(STOP_LIMIT_S)
                recorder.event(
                    "load",
                    EventKind.LOAD_ENDED,
                    **{name: getattr(report, name) for name in report.__slots__},
                )
        except HarnessError as error:
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

        def on_request(request: Request) -> None:
            if request.prompt_logprobs:
                seen = ground.goldens.compare(request.prompt_logprobs)
                request = replace(
                    request,
                    answer=seen.answer,
                    difference_old=seen.difference_old,
                    difference_new=seen.difference_new,
                )
            ground.recorder.request(request)

        return LoadDriver(
            plan,
            directory=place / "load",
            api_key=self.api_key,
            model=SERVED_MODEL_NAME,
            cpus=self.cores.load,
            on_request=on_request,
            run_label=str(self.label),
        )

    def _carry_out(self, step: Step, ground: Ground, operations: Operations, start_ns: int) -> None:
        if step.at_s is not None:
            self._wait(ground, operations, lambda: None, limit_s=step.at_s - seconds_between(start_ns, now_ns()))
        if step.after_detection_limit_s is not None:
            self._await_detection(ground, operations, step.after_detection_limit_s)
        if step.action is Action.PUBLISH:
            operations.publish_new()
        elif step.action is Action.START_ROLLOUT:
            operations.start_rollout()
        elif not self._needs_no_remedy(ground, operations):
            operations.remedy()

    def _needs_no_remedy(self, ground: Ground, operations: Operations) -> bool:
        return operations.rollout_succeeded and detection(ground.recorder.snapshot()).layer is Layer.HARMLESS

    def _await_detection(self, ground: Ground, operations: Operations, limit_s: float) -> None:
        def noticed() -> bool | None:
            return None if detection(ground.recorder.snapshot()).layer is Layer.NEVER else True

        self._wait(ground, operations, noticed, limit_s=limit_s)
        seen = detection(ground.recorder.snapshot())
        ground.recorder.event("runner", EventKind.DETECTION_SEEN, layer=seen.layer, because=seen.because)

    def _await_recovery(self, ground: Ground, operations: Operations) -> None:
        limit_s = ground.scenario.load.limits.total_s + 10 / max(ground.scenario.load.canary_rate_rps, 0.1)
        self._wait(ground, operations, lambda: recovery_at_ns(ground.recorder.snapshot()), limit_s=limit_s)
        recovered = recovery_at_ns(ground.recorder.snapshot())
        if recovered is not None:
            ground.recorder.event("runner", EventKind.RECOVERY_SEEN, at_ns=recovered)

    def _wait(self, ground: Ground, operations: Operations, ask: Callable[[], Any], *, limit_s: float) -> None:
        """Wait for an answer or for the limit, whichever comes first, looking after the engines meanwhile."""

        def look() -> Any:
            operations.look_after_engines()
            return ask()

        limit_s = min(limit_s, ground.deadline.remaining_s())
        if limit_s > 0:
            try:
                poll_until(look, what="next step", limit_s=limit_s, every_s=POLL_S)
            except WaitExpired:
                return

    def _look_for_left_overs(self, ground: Ground, *scratch: Path) -> None:
        """Release the scenario's own directories and look for anything else that outlived it."""
        for path in scratch:
            shutil.rmtree(path, ignore_errors=True)
        left = sweep.find_of(self.label)
        things = {
            "containers": list(left.containers),
            "processes": [str(pid) for pid in left.processes],
            "directories": [str(path) for path in scratch if path.exists()],
        }
        if any(things.values()):
            ground.recorder.event("runner", EventKind.LEFT_OVER, things=things)
        else:
            ground.recorder.event("runner", EventKind.NOTHING_LEFT, checked=", ".join(things))

    def _collect_logs(self, target: Path) -> None:
        if self.site.log_directory.is_dir():
            for log in self.site.log_directory.iterdir():
                if log.is_file() and not log.name.startswith("golden-"):
                    shutil.move(str(log), target / log.name)

    def _golden_pair(self, old: Path, new: Path, launch: Launch) -> GoldenPair:
        """Return the known-good answers for both checkpoints, measured once per engine build, flags and weights."""
        vocabulary = int(read_checkpoint(old).config["vocab_size"])

        def golden(source: Path, prompts: tuple[tuple[int, ...], ...]) -> Golden:
            served = replace(launch, checkpoint_root=source.parent, checkpoint_name=source.name)
            request = GoldenRequest(
                source=source,
                weights_id=weights_id(source),
                launch=served,
                prompts=prompts,
                vocabulary_size=vocabulary,
            )
            key = golden_key(self.identity, request)
            if key not in self._goldens:
                kept = default_cache() / "goldens" / f"{key}.json"
                kept.parent.mkdir(parents=True, exist_ok=True)
                if not kept.is_file():
                    self.progress(f'measuring known-good answers of "{source.name}" on {self.identity.label} (once)')
                    measure_golden(
                        self.starter,
                        request,
                        api_key=self.api_key,
                        seed=self.settings.seed,
                        ready_limit_s=300.0,
                        forward=forward_pass_for(source),
                    ).save(kept)
                self._goldens[key] = Golden.load(kept)
            return self._goldens[key]

        def measure(attempt: int) -> GoldenPair:
            prompts = canary_prompts(vocabulary, seed=self.settings.seed, attempt=attempt)
            return GoldenPair(golden(old, prompts), golden(new, prompts))

        pair, warnings = choose_pair(measure)
        for warning in warnings:
            self.progress(f"warning: {warning}")
        return pair

    def _with_models(self, scenario: Scenario) -> Scenario:
        """Replace the declared checkpoints by those the user asked for."""
        settings = self.settings
        if settings.old is not None and settings.new is not None:
            return replace(scenario, old=directory(settings.old), new=directory(settings.new))
        if settings.model == "smollm2":
            return replace(scenario, old=smollm2(), new=smollm2(seed=SMOLLM2_FINE_TUNE_SEED))
        return scenario

    def _description(self) -> dict[str, Any]:
        return {
            "engine_label": self.identity.label,
            "engine_kind": self.identity.kind,
            "engine_build": self.identity.build,
            "seed": self.settings.seed,
            "command": _command(sys.argv),
            "commit": _commit(),
            "started_at": wall_time(),
            "machine": {
                "processor": self.identity.hardware,
                "system": platform.platform(),
                "python": platform.python_version(),
                "engine_cores": _listed(self.cores.engine),
                "load_cores": _listed(self.cores.load),
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


def _command(arguments: list[str]) -> str:
    """Return a command that a person can type to do this again."""
    program = Path(arguments[0]).name
    words = ["python", "-m", Path(arguments[0]).parent.name] if program == "__main__.py" else [program]
    return shlex.join([*words, *arguments[1:]])


def _listed(cores: tuple[int, ...]) -> str:
    return ", ".join(str(core) for core in cores) or "not pinned"


def _commit() -> str:
    """Return the commit the harness runs from, marked when files are changed; empty outside a repository."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _narrator(progress: Progress, name: str, mode: Mode) -> Callable[[Event], None]:
    """Tell people what is happening, as it happens."""
    started = now_ns()

    def tell(event: Event) -> None:
        words = _SENTENCES.get(event.kind)
        if words is not None:
            elapsed_s = seconds_between(started, now_ns())
            progress(f"{name} [{mode}] {elapsed_s:6.1f} s  {words.format_map(_Missing(event.data))}")

    return tell


class _Missing(dict[str, Any]):
    def __missing__(self, key: str) -> str:
        return "?"


_SENTENCES = {
    EventKind.ENGINE_STARTING: "starting engine {incarnation}",
    EventKind.ENGINE_READY: "engine {incarnation} is ready after {took_s} s",
    EventKind.ENGINE_NOT_READY: "engine {incarnation} did not start: {reason}",
    EventKind.ENGINE_DIED: "engine {incarnation} died, exit code {exit_code}",
    EventKind.LOAD_STARTED: "load begins at {rate_rps} requests/s",
    EventKind.PUBLISH_STARTED: "publishing the new checkpoint ({how})",
    EventKind.FAULT_INJECTED: "fault {fault}: {because}",
    EventKind.GUARD_REFUSED: "guard {guard} refused",
    EventKind.ROLLOUT_STARTED: "rolling out ({how})",
    EventKind.DETECTION_SEEN: "noticed at layer {layer}: {because}",
    EventKind.REMEDY_STARTED: "remedy: {what}",
    EventKind.RECOVERY_SEEN: "service is back",
}


def forward_pass_for(source: Path) -> Callable[[Path, Any], Any] | None:
    """Return our own forward pass for small checkpoints of the Llama family, None for others."""
    from harness.engine.reference.check import forward_logprobs, is_supported

    return forward_logprobs if is_supported(source) else None
