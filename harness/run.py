"""Runs scenarios: the only place that knows in which order things are acquired, done and released."""

from __future__ import annotations

import platform
import secrets
import shutil
import sys
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from harness import sweep, watchdog
from harness.adapted import adapted
from harness.adapter_update import adaptable, require_own_adapters
from harness.bare_start import BareStart, seen_at
from harness.checkpoint.models import default_cache
from harness.checkpoint.stamp import stamps_of
from harness.clock import Deadline, now_ns, seconds_between, wall_time
from harness.engine.choose import starter_for
from harness.engine.dev_api import reloadable, sleepable, updatable
from harness.engine.engine import EngineIdentity, EngineSite, EngineStarter
from harness.engine.launch import Launch
from harness.errors import EnvironmentMissing, LeftOver
from harness.goldens import Goldens
from harness.ground import LIVE, Ground, compile_cache_of, weight_cache_of
from harness.handover import Handover
from harness.judge.claim import Claim, Context
from harness.judge.detection import Detection
from harness.judge.expectations import load_expectations
from harness.label import new_label, shared_memory_directory, work_directory
from harness.load.capacity import capacity_here
from harness.load.loaders import require_keepable
from harness.machine import Cores, Neighbours, command, commit, listed
from harness.narrator import Progress, narrator
from harness.observe.history import EventKind, Recorder
from harness.play import Play
from harness.report.store import (
    ScenarioRecord,
    create_run,
    declare,
    finish_run,
    judge_scenario,
    note_of_machine,
)
from harness.requirements import require, require_for_faults
from harness.scenario import Mode, Scenario
from harness.settings import Settings

DEEP_TOKENS = 200  # of a prompt that fills a block of the KV cache: 128 tokens on a CPU, 16 on a GPU


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
        self.is_whole = True  # so far: everything that was asked for was run, or cannot be run here

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
            self._neighbours = Neighbours(own=self.label, tell=self.progress)
            self.look_around()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.look_around()
            if self.is_whole and kind is None:
                finish_run(self.directory)
        finally:
            self._stack.close()

    def _end_left_overs(self) -> None:
        left = sweep.find_of(self.label)
        if not left.is_empty():
            sweep.end(self.label)
            raise LeftOver(left.as_json())

    def look_around(self) -> None:
        """Note which other runs live on this machine: those that begin after this one too."""
        with suppress(OSError):  # a note that cannot be written, or told, ends no run
            if self._neighbours.look():
                note_of_machine(self.directory, "other_runs", str(self._neighbours))

    @property
    def golden_starts(self) -> int:
        """Count the engines that were started to learn what undamaged checkpoints answer."""
        return self._goldens.engine_starts

    def scenario(self, scenario: Scenario, mode: Mode) -> ScenarioRecord:
        """Run one scenario in one mode and return it judged; what fails on the way is in its history.

        Raises: EnvironmentMissing; UsageError when the scenario cannot be run with these settings.
        """
        try:
            return self._judged(scenario, mode)
        except EnvironmentMissing:  # it was not begun: skipped
            raise
        except BaseException:
            self.is_whole = False
            raise

    def _judged(self, scenario: Scenario, mode: Mode) -> ScenarioRecord:
        scenario = adapted(scenario, self.settings)
        require_for_faults(scenario, self.identity)
        if self.settings.old is None:  # a user's old checkpoint stays the old one
            scenario = self._handover.in_the_fitting_direction(scenario)
        require_keepable(
            scenario.load,
            seed=self.settings.seed,
            horizon_s=scenario.limit_s,
            cores=len(self.cores.load),
            capacity=capacity_here(),
        )
        ground, place = self._prepare_ground(scenario, mode, scenario.claims(mode), suffix=str(mode))
        try:
            self._play(ground, place).carry_out()
        finally:
            record = self._release_ground(ground, place)
        self.records.append(record)
        self.progress(f"{scenario.name} [{mode}]: {record.verdict} (noticed at: {record.layer})")
        return record

    def start_only(self, scenario: Scenario, number: int) -> tuple[Detection, Path]:
        """Start the engine once on the faulty checkpoint, without load, and say who notices; for expectations.

        Raises: EnvironmentMissing; HarnessError when the fault did not prove itself or something else went wrong.
        """
        scenario = adapted(scenario, self.settings)
        require_for_faults(scenario, self.identity)
        ground, place = self._prepare_ground(scenario, Mode.UNGUARDED, (), suffix=f"start-{number}")
        start = BareStart.on(ground, self._handover, shared=self.work / "shared")
        try:
            start.carry_out()
        finally:
            start.operations.stop_all()
            self._release_ground(ground, place)
        return seen_at(place), place

    # --- parts, in order of use ---

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
            deep_tokens = min(DEEP_TOKENS, launch_base.max_model_len - 16)
            launch_base = adaptable(launch_base) if scenario.adapts else reloadable(launch_base)
        if scenario.updates:
            launch_base = updatable(launch_base)
        if scenario.sleeps:
            launch_base = sleepable(launch_base)
        old, new = scenario.old.build(default_cache()), scenario.new.build(default_cache())
        if scenario.adapts:
            require_own_adapters(old, new)
        goldens = self._goldens.pair(old, new, launch_base, deep_tokens=deep_tokens)
        golden_s = seconds_between(begun, now_ns())
        known = load_expectations(self.expectations, self.identity.label).get(scenario.name)
        context = Context(
            scenario=scenario.name,
            engine_label=self.identity.label,
            expected_layers=() if known is None else known.layers,
            faults=tuple(fault.name for fault in scenario.faults),
            replaced=self.settings.replaced,
        )
        self.look_around()
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

    def _play(self, ground: Ground, place: Path) -> Play:
        return Play(
            ground=ground,
            place=place,
            settings=self.settings,
            cores=self.cores,
            label=self.label,
            handover=self._handover,
            progress=self.progress,
        )

    def _release_ground(self, ground: Ground, place: Path) -> ScenarioRecord:
        """Keep the logs, remove the scenario's directories, look for left-overs, and judge what was recorded."""
        self.look_around()
        self._collect_logs(place / "logs")
        self._look_for_left_overs(ground, ground.work, ground.cache.parent)
        ground.recorder.close()
        ground.recorder.require_written()
        return judge_scenario(place)

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
            "checkpoints": stamps_of(self.settings),
        }
