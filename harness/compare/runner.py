"""Runs a comparison: the only place that knows in which order its blocks come."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

from harness.checkpoint.manifest import read_checkpoint
from harness.clock import wall_time
from harness.compare.canaries import SideCanaries
from harness.compare.load import BlockLoad, require_room
from harness.compare.options import Options
from harness.compare.sides import NEW, NULL, OLD, Side, make_sides
from harness.engine.engine import Engine, EngineStarter
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
from harness.judge.failures import requests_needed
from harness.judge.remarks import price_of_one_start
from harness.machine import command
from harness.narrator import Progress
from harness.observe.gpu import driver_version
from harness.report.comparison import write_comparison
from harness.report.store import write_json
from harness.run import Run
from harness.settings import Settings

READY_LIMIT_S = 600.0


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
    require_room(settings, options)  # a mistake is named before anything is started
    confirms = "" if options.confirms is None else load_declaration(options.confirms).name
    with Run(settings, progress=progress, expectations=Path("scenarios/expectations"), starter=starter) as run:
        with ExitStack() as stack:
            runner = _Runner(run, options, stack, confirms=confirms, progress=progress)
            comparison = runner.carry_out()
        write_comparison(run.directory, comparison, runner.blocks)
        return run.directory, comparison


class _Runner:
    """One comparison inside a run."""

    def __init__(self, run: Run, options: Options, stack: ExitStack, *, confirms: str, progress: Progress) -> None:
        self._run = run
        self._confirms = confirms
        self._options = options
        self._progress = progress
        self._stack = stack
        self.blocks: list[Block] = []
        self._starts = 0
        self._engines: dict[str, Engine] = {}
        self._sides = make_sides(run, options, stack, progress=progress)
        vocabulary_size = min(
            int(read_checkpoint(side.checkpoint).config["vocab_size"]) for side in self._sides.values()
        )
        canaries = None
        if options.canaries:
            canaries = SideCanaries(
                self._sides,
                api_key=run.api_key,
                seed=run.settings.seed,
                vocabulary_size=vocabulary_size,
                progress=progress,
            )
        self._problems = () if canaries is None else tuple(canaries.problems)
        self._load = BlockLoad(run, options, vocabulary_size=vocabulary_size, canaries=canaries)
        self._declared = self._declare()

    def carry_out(self) -> Comparison:
        """Run pairs up to the next look, judge, and go on while the answer is open."""
        options, rule = self._options, self._declared.rule
        if self._problems:
            return judge_blocks(self._declared, ())
        valid = void = nulls = pair = 0
        if not options.is_fresh:
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
            if void <= options.spare_pairs and not (is_valid and valid in rule.looks) and not self._is_wrong():
                continue
            comparison = judge_blocks(self._declared, self.blocks)
            self._progress(f"after {valid} pairs: slower: {comparison.answer}: {comparison.because}")
            if comparison.is_final or valid >= rule.looks[-1]:
                return comparison

    # --- parts, in order of use ---

    def _declare(self) -> Declaration:
        run, options = self._run, self._options
        schedule = self._load.plan(0).schedule_sha256
        driver = driver_version()
        arms = tuple(
            Arm(name=side.name, key=side.key(driver=driver, schedule=schedule)) for side in self._sides.values()
        )
        declared = Declaration(
            name=run.directory.name,
            profile=options.profile,
            gating=options.gating or self._gating(arms[0]),
            arms=arms,
            schedule_sha256=schedule,
            fresh=options.is_fresh,
            started_at=wall_time(),
            command=command(sys.argv),
            family=options.family,
            spare_pairs=options.spare_pairs,
            failure_budget=options.failure_budget,
            slo=options.slo,
            confirms=self._confirms,
            limits=options.limits,
            blocks_per_arm=options.arm_blocks,
            blocks_per_start=options.start_blocks,
            problems=self._problems,
        )
        write_json(run.directory / DECLARATION, declared.as_json())
        price = price_of_one_start(declared)
        if price:
            self._progress(price)
        self._warn_of_few_requests(declared)
        return declared

    def _warn_of_few_requests(self, declared: Declaration) -> None:
        """Say so at once when even the last look has too few requests to clear the new side of failures."""
        blocks = declared.rule.looks[-1] * declared.blocks_per_arm
        requests = round(blocks * self._load.plan(0).shape.rate_rps * self._options.block_s)
        needed = requests_needed(declared.failure_budget)
        if requests < needed:
            self._progress(
                f"{requests} requests to each side at most, {needed} without a failure are needed to answer no within a "
                f"failure budget of {declared.failure_budget:.2%}: longer blocks, a higher rate or another budget would do"
            )

    def _gating(self, old: Arm) -> tuple[str, ...]:
        if self._options.baselines is None:
            return ALWAYS_GATING
        try:
            return find(self._options.baselines, old.key).gating()
        except UsageError as error:
            self._progress(f"only the medians decide: {error}")
            return ALWAYS_GATING

    def _is_wrong(self) -> bool:
        """Say whether the newest pairs had a wrong answer: nothing that follows could make up for it."""
        return any(block.canaries is not None and block.canaries.wrong for block in self.blocks)

    def _pair(self, number: int, *, parity: int, is_null: bool) -> bool:
        """Run one pair, A B or A B B A, the next one the other way round; say whether every block passed its gates.

        A wrong answer ends it: nothing that follows could make up for it.
        """
        arms = (OLD, NULL if is_null else NEW)
        in_turn = self._declared.blocks_per_start
        order = [
            arm
            for turn in range(self._declared.blocks_per_arm // in_turn)
            for arm in (arms if (parity + turn) % 2 == 0 else arms[::-1])
        ]
        first = len(self.blocks)
        for arm in order:
            if self._is_wrong():
                break
            with ExitStack() as stack:
                engine = self._engines.get(arm)
                if engine is None:
                    engine = self._start(self._sides[arm])
                    stack.callback(engine.stop)
                for _ in range(in_turn):
                    if not self._is_wrong():
                        self._block(engine, arm, pair=number, is_null=is_null)
        blocks = self.blocks[first:]
        failed = [gate.sentence() for block in blocks for gate in block.failed_gates]
        what = f"{'null pair' if is_null else 'pair'} {number}"
        metric = self._declared.gating[0]
        self._progress(
            f"{what}: {metric}: {', '.join(f'{block.arm} {block.values[metric]:.1f}' for block in blocks)}"
            + (f"; void: {'; '.join(failed)}" if failed else "")
        )
        return not failed

    def _block(self, engine: Engine, arm: str, *, pair: int, is_null: bool) -> None:
        self._run.look_around()
        number = len(self.blocks)
        folder = self._run.directory / BLOCKS / block_name(number, arm)
        folder.mkdir(parents=True)
        self._load.send(engine, folder, number=number, arm=arm, pair=pair, is_null=is_null)
        self.blocks.append(load_block(folder, self._declared))

    def _start(self, side: Side) -> Engine:
        self._starts += 1
        engine = side.starter.start(side.launch, incarnation=f"{side.name}-{self._starts}")
        try:
            took_s = engine.wait_ready(READY_LIMIT_S * self._run.settings.patience)
        except BaseException:
            engine.stop()
            raise
        self._progress(f"engine {engine.incarnation} is ready after {took_s:.1f} s")
        return engine
