"""Runs a comparison: two engines, one plan, blocks of load in ABBA order, until the verdict is there or pairs run out."""

from __future__ import annotations

import hashlib
import shlex
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from harness.checkpoint.manifest import read_checkpoint, weights_id
from harness.checkpoint.models import default_cache, directory, smollm2, tiny_llama
from harness.clock import NS_PER_S, now_ns, pause, seconds_between, wall_time
from harness.engine.choose import starter_for
from harness.engine.engine import Engine, EngineIdentity, EngineStarter
from harness.engine.launch import SERVED_MODEL_NAME, Launch
from harness.errors import UsageError
from harness.judge.baseline import ALWAYS_GATING, find
from harness.judge.blocks import (
    BLOCKS,
    DECLARATION,
    Arm,
    Block,
    Declaration,
    block_name,
    load_block,
    load_declaration,
)
from harness.judge.comparison import Comparison, judge_blocks
from harness.judge.crosscheck import cross_check
from harness.judge.gates import GateLimits
from harness.judge.paired import profile_named
from harness.judge.records import Records
from harness.judge.slo import Slo
from harness.load.driver import Heartbeat, LoadDriver
from harness.load.plan import LoadPlan, make_plan
from harness.load.shape import LoadShape, steady
from harness.machine import command
from harness.narrator import Progress
from harness.observe.gpu import driver_version
from harness.observe.history import EventKind, Recorder, Request
from harness.observe.metrics import HistogramSample, pick_histograms, read_page
from harness.observe.probes import Observers
from harness.report.store import write_json
from harness.run import MODEL_RATE_RPS, SMOLLM2_FINE_TUNE_SEED, Run
from harness.settings import Settings

OLD, NEW, NULL = "old", "new", "null"
TINY_RATE_RPS = 10.0
READY_LIMIT_S = 600.0
VERDICT = "verdict.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is compared, besides the settings of the old side, and how.

    Raises: UsageError naming what cannot be used.
    """

    profile: str = "nightly"
    same: bool = False  # the old checkpoint on both sides
    environment: tuple[tuple[str, str], ...] = ()  # of both sides
    new_arguments: tuple[str, ...] = ()  # launch arguments that only the new side has
    new_environment: tuple[tuple[str, str], ...] = ()
    new_image: str | None = None
    new_python: Path | None = None
    block_s: float = 20.0
    warm_s: float = 5.0
    prompt_tokens: int = 24
    output_tokens: int = 16
    fresh: bool = False  # an engine of its own for every block
    null_every: int = 4  # pairs, after which a pair of the negative control follows; 0: none
    spare_pairs: int = 4
    family: int = 1
    failure_budget: float = 0.01
    slo: Slo | None = None
    limits: GateLimits = field(default_factory=GateLimits)
    gating: tuple[str, ...] | None = None  # None: the medians, and each p95 that the old side's baseline finds steady
    baselines: Path | None = None
    confirms: Path | None = None

    def __post_init__(self) -> None:
        profile_named(self.profile)
        for name, value, least in (("block_s", self.block_s, 0.5), ("warm_s", self.warm_s, 0.0)):
            if not least <= value < 36_000:
                raise UsageError(f"{name} must be from {least:g} to 36000 s, got {value:g}")
        for name, number, least in (
            ("null_every", self.null_every, 0),
            ("spare_pairs", self.spare_pairs, 0),
            ("family", self.family, 1),
        ):
            if number < least:
                raise UsageError(f"{name} must be at least {least}, got {number}")
        if not 0 < self.failure_budget < 1:
            raise UsageError(f"failure_budget must be between 0 and 1, got {self.failure_budget:g}")
        if (self.profile == "confirm") != (self.confirms is not None):
            raise UsageError(
                "the profile confirm needs the run it confirms (--confirms RUN), and no other profile takes one"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    """One arm as it is started."""

    name: str
    starter: EngineStarter
    identity: EngineIdentity
    launch: Launch
    weights: str


def compare(
    settings: Settings,
    options: Options,
    *,
    progress: Progress,
    starter: EngineStarter | None = None,
) -> tuple[Path, Comparison]:
    """Run blocks until the verdict is final; return the run's directory and the verdict.

    Everything that is measured is on disk before it is judged, so an interrupted comparison can be judged as far as it
    came. Engines come from `starter`, or from what the settings name.
    Raises: EnvironmentMissing, EngineNotReady, LoadBroken; UsageError for options that cannot be used together.
    """
    with Run(settings, progress=progress, expectations=Path("scenarios/expectations"), starter=starter) as run:
        with ExitStack() as stack:
            comparison = _Runner(run, options, stack, progress=progress).carry_out()
        write_json(run.directory / VERDICT, comparison.as_json())
        return run.directory, comparison


class _Runner:
    """One comparison inside a run."""

    def __init__(self, run: Run, options: Options, stack: ExitStack, *, progress: Progress) -> None:
        self._run = run
        self._options = options
        self._progress = progress
        self._stack = stack
        self._blocks: list[Block] = []
        self._starts = 0
        self._engines: dict[str, Engine] = {}
        old, new = self._checkpoints()
        self._vocabulary = min(int(read_checkpoint(path).config["vocab_size"]) for path in (old, new))
        self._shape = self._load_shape()
        self._sides = self._make_sides(old, new)
        self._declared = self._declare()

    def carry_out(self) -> Comparison:
        """Run pairs up to the next look, judge, and go on while the answer is open."""
        options, rule = self._options, self._declared.rule
        valid = void = nulls = pair = 0
        if not options.fresh:
            for side in self._sides.values():
                self._engines[side.name] = self._start(side)
                self._stack.callback(self._engines[side.name].stop)
        while True:
            is_valid = self._pair(pair, parity=valid, is_null=False)
            pair += 1
            valid, void = valid + is_valid, void + (not is_valid)
            if options.null_every and is_valid and valid % options.null_every == 0:
                self._pair(nulls, parity=nulls, is_null=True)
                nulls += 1
            if void <= options.spare_pairs and not (is_valid and valid in rule.looks):
                continue
            comparison = judge_blocks(self._declared, self._blocks)
            self._progress(f"after {valid} pairs: slower: {comparison.answer}: {comparison.because}")
            if comparison.is_final or valid >= rule.looks[-1]:
                return comparison

    # --- parts, in order of use ---

    def _checkpoints(self) -> tuple[Path, Path]:
        settings = self._run.settings
        if settings.old is not None and settings.new is not None:
            sources = directory(settings.old), directory(settings.new)
        elif settings.model == "smollm2":
            sources = smollm2(), smollm2(seed=SMOLLM2_FINE_TUNE_SEED)
        else:
            sources = tiny_llama(seed=1), tiny_llama(seed=2)
        old = sources[0].build(default_cache())
        return old, old if self._options.same else sources[1].build(default_cache())

    def _load_shape(self) -> LoadShape:
        settings, options = self._run.settings, self._options
        is_tiny = settings.old is None and settings.model != "smollm2"
        longest = options.prompt_tokens + options.output_tokens
        if longest > settings.max_model_len:
            raise UsageError(
                f"prompt_tokens and output_tokens are {longest} together, max_model_len is {settings.max_model_len}"
            )
        return steady(
            rate_rps=settings.rate_rps or (TINY_RATE_RPS if is_tiny else MODEL_RATE_RPS),
            canary_ratio=0.0,
            prompt_tokens=options.prompt_tokens,
            output_tokens=options.output_tokens,
        )

    def _plan(self, number: int) -> LoadPlan:
        horizon_s = self._options.warm_s + self._options.block_s
        return make_plan(
            self._shape,
            seed=self._run.settings.seed,
            horizon_s=horizon_s,
            vocabulary_size=self._vocabulary,
            canary_prompts=(),
            exactly=max(1, round(self._shape.rate_rps * horizon_s)),
            block=number,
        )

    def _make_sides(self, old: Path, new: Path) -> dict[str, _Side]:
        run, options = self._run, self._options
        settings = run.settings
        base = Launch(
            checkpoint_root=old.parent,
            checkpoint_name=old.name,
            max_model_len=settings.max_model_len,
            extra_arguments=settings.engine_arguments,
            environment=options.environment,
        )
        launch = replace(
            base,
            checkpoint_root=new.parent,
            checkpoint_name=new.name,
            extra_arguments=(*base.extra_arguments, *options.new_arguments),
            environment=(*options.environment, *options.new_environment),
        )
        starter = self._new_starter()
        of_old = _Side(name=OLD, starter=run.starter, identity=run.identity, launch=base, weights=weights_id(old))
        sides = {
            OLD: of_old,
            NEW: _Side(name=NEW, starter=starter, identity=starter.identity(), launch=launch, weights=weights_id(new)),
        }
        if options.null_every:
            sides[NULL] = replace(of_old, name=NULL)
        return sides

    def _new_starter(self) -> EngineStarter:
        """Return what starts the new side: the run's own starter, unless another image or interpreter is asked for."""
        run, options = self._run, self._options
        if options.new_image is None and options.new_python is None:
            return run.starter
        changed = replace(
            run.settings,
            engine="container" if options.new_image is not None else "process",
            image=options.new_image,
            python=options.new_python,
        )
        starter = starter_for(changed, progress=self._progress)
        self._stack.callback(starter.close)
        starter.open(replace(run.site, work_directory=run.work / "engines-new"))
        return starter

    def _declare(self) -> Declaration:
        run, options = self._run, self._options
        schedule = self._plan(0).schedule_sha256
        driver = driver_version()
        confirms = "" if options.confirms is None else load_declaration(options.confirms).name
        arms = tuple(
            Arm(name=side.name, key=_key(side, driver=driver, schedule=schedule)) for side in self._sides.values()
        )
        declared = Declaration(
            name=run.directory.name,
            profile=options.profile,
            gating=options.gating or self._gating(arms[0]),
            arms=arms,
            schedule_sha256=schedule,
            fresh=options.fresh,
            started_at=wall_time(),
            command=command(sys.argv),
            family=options.family,
            spare_pairs=options.spare_pairs,
            failure_budget=options.failure_budget,
            slo=options.slo,
            confirms=confirms,
            limits=options.limits,
        )
        write_json(run.directory / DECLARATION, declared.as_json())
        return declared

    def _gating(self, old: Arm) -> tuple[str, ...]:
        if self._options.baselines is None:
            return ALWAYS_GATING
        try:
            return find(self._options.baselines, old.key).gating()
        except UsageError as error:
            self._progress(f"only the medians decide: {error}")
            return ALWAYS_GATING

    def _pair(self, number: int, *, parity: int, is_null: bool) -> bool:
        """Run two blocks, the second pair the other way round than the first; say whether both passed their gates."""
        arms = (OLD, NULL if is_null else NEW)
        blocks = [self._block(arm, pair=number, is_null=is_null) for arm in (arms if parity % 2 == 0 else arms[::-1])]
        failed = [gate.sentence() for block in blocks for gate in block.failed_gates]
        what = f"{'null pair' if is_null else 'pair'} {number}"
        seen = {block.arm: block.values[self._declared.gating[0]] for block in blocks}
        self._progress(
            f"{what}: {self._declared.gating[0]}: {', '.join(f'{arm} {value:.1f}' for arm, value in seen.items())}"
            + (f"; void: {'; '.join(failed)}" if failed else "")
        )
        return not failed

    def _block(self, arm: str, *, pair: int, is_null: bool) -> Block:
        number = len(self._blocks)
        folder = self._run.directory / BLOCKS / block_name(number, arm)
        folder.mkdir(parents=True)
        with ExitStack() as stack:
            engine = self._engines.get(arm)
            if engine is None:
                engine = self._start(self._sides[arm])
                stack.callback(engine.stop)
            self._load(engine, folder, number=number, arm=arm, pair=pair, is_null=is_null)
        block = load_block(folder, self._declared)
        self._blocks.append(block)
        return block

    def _start(self, side: _Side) -> Engine:
        self._starts += 1
        engine = side.starter.start(side.launch, incarnation=f"{side.name}-{self._starts}")
        try:
            took_s = engine.wait_ready(READY_LIMIT_S * self._run.settings.patience)
        except BaseException:
            engine.stop()
            raise
        self._progress(f"engine {engine.incarnation} is ready after {took_s:.1f} s")
        return engine

    def _load(self, engine: Engine, folder: Path, *, number: int, arm: str, pair: int, is_null: bool) -> None:
        """Send one block's arrivals and write everything that is known of it."""
        plan = self._plan(number)
        requests: list[Request] = []
        recorder = Recorder(folder / "history.jsonl")

        def on_heartbeat(heartbeat: Heartbeat) -> None:
            recorder.event("load", EventKind.LOAD_HEARTBEAT, **asdict(heartbeat))

        with ExitStack() as stack:
            stack.callback(recorder.close)
            driver = LoadDriver(
                plan,
                directory=folder / "load",
                api_key=self._run.api_key,
                model=SERVED_MODEL_NAME,
                cpus=self._run.cores.load,
                on_request=requests.append,
                on_heartbeat=on_heartbeat,
                run_label=str(self._run.label),
            )
            stack.callback(driver.close)
            stack.enter_context(Observers(recorder))
            before = self._histograms(engine)
            start_ns = driver.start(engine.endpoint, engine.incarnation)
            recorder.event("load", EventKind.LOAD_STARTED, at_ns=start_ns, plan_sha256=plan.sha256)
            end_ns = start_ns + round((self._options.warm_s + self._options.block_s) * NS_PER_S)
            pause(seconds_between(now_ns(), end_ns))
            report = driver.stop()
            recorder.event("load", EventKind.LOAD_ENDED, **asdict(report))
            after = self._histograms(engine)
        recorder.require_written()
        records = Records.of(requests)
        records.save(folder / "records.npz")
        notes = cross_check(records.of_users(), before, after) if before is not None and after is not None else ()
        write_json(
            folder / "block.json",
            {
                "number": number,
                "arm": arm,
                "pair": pair,
                "is_null": is_null,
                "incarnation": engine.incarnation,
                "window_ns": [start_ns + round(self._options.warm_s * NS_PER_S), end_ns],
                "plan_sha256": plan.sha256,
                "schedule_sha256": plan.schedule_sha256,
                "notes": [f"block {folder.name}: {note}" for note in notes],
                "report": {**asdict(report), "planned_events_per_s": plan.busiest_per_s()[1]},
            },
        )

    def _histograms(self, engine: Engine) -> dict[str, HistogramSample] | None:
        """Return the engine's own latency histograms, None where they cannot be had: they are for notes alone."""
        try:
            return pick_histograms(read_page(engine.endpoint, api_key=self._run.api_key))
        except (OSError, ValueError):
            return None


def _key(side: _Side, *, driver: str, schedule: str) -> dict[str, str]:
    """Return what decides how fast one side is; values of its environment may be secrets and are only digested."""
    launch = side.launch
    plain = replace(launch, environment=()).flags()
    environment = [f"{name}={hashlib.sha256(value.encode()).hexdigest()[:12]}" for name, value in launch.environment]
    return {
        "engine": side.identity.label,
        "build": side.identity.build,
        "model": side.weights,
        "flags": shlex.join([*plain, *environment]),
        "hardware": side.identity.hardware,
        "driver": driver,
        "load": schedule,
    }
