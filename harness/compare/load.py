"""The load of a comparison: the plan that its blocks share, and one block of it sent and written down."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness.adapted import MODEL_RATE_RPS
from harness.clock import NS_PER_S, now_ns, pause, seconds_between
from harness.compare.canaries import SideCanaries
from harness.compare.options import Options
from harness.engine.engine import Engine
from harness.engine.launch import SERVED_MODEL_NAME
from harness.errors import UsageError
from harness.judge.crosscheck import cross_check
from harness.judge.records import Records
from harness.load.driver import LoadDriver
from harness.load.plan import LoadPlan, make_plan
from harness.load.report import Heartbeat
from harness.load.shape import LoadShape, steady
from harness.observe.history import EventKind, Recorder, Request
from harness.observe.metrics import HistogramSample, pick_histograms, read_page
from harness.observe.probes import Observers
from harness.report.store import write_json
from harness.run import Run
from harness.settings import Settings

TINY_RATE_RPS = 10.0
CANARY_SHARE = 0.05  # of the arrivals, on top of them
CANARIES_MIN = 3  # of each block


class BlockLoad:
    """Sends the blocks of one comparison, all with the same schedule of arrivals."""

    def __init__(
        self, run: Run, options: Options, *, vocabulary_size: int, canaries: SideCanaries | None = None
    ) -> None:
        self._run = run
        self._options = options
        self._vocabulary_size = vocabulary_size
        self._canaries = canaries
        prompts = () if canaries is None else canaries.prompts
        self._shape = _shape(run.settings, options, with_canaries=bool(prompts))
        self._canary_prompts = prompts

    def plan(self, number: int) -> LoadPlan:
        """Return the arrivals of a block: the same for all but for the nonces of their prompts."""
        horizon_s = self._options.warm_s + self._options.block_s
        return make_plan(
            self._shape,
            seed=self._run.settings.seed,
            horizon_s=horizon_s,
            vocabulary_size=self._vocabulary_size,
            canary_prompts=self._canary_prompts,
            exactly=max(1, round(self._shape.rate_rps * horizon_s)),
            block=number,
        )

    def send(self, engine: Engine, folder: Path, *, number: int, arm: str, pair: int, is_null: bool) -> None:
        """Send one block's arrivals and write everything that is known of it.

        Raises: LoadBroken; HarnessError when it cannot be written.
        """
        plan = self.plan(number)
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
            driver.spawn()  # the loaders need a moment for their imports
            beside = self._ask(engine, arm)
            stack.enter_context(Observers(recorder))
            before = self._histograms(engine)
            start_ns = driver.start(engine.endpoint, engine.incarnation)
            recorder.event("load", EventKind.LOAD_STARTED, at_ns=start_ns, plan_sha256=plan.sha256)
            end_ns = start_ns + round((self._options.warm_s + self._options.block_s) * NS_PER_S)
            pause(seconds_between(now_ns(), end_ns))
            report = driver.stop()
            recorder.event("load", EventKind.LOAD_ENDED, **asdict(report))
            after = self._histograms(engine)
        beside += self._ask(engine, arm)
        recorder.require_written()
        records = Records.of(requests)
        records.save(folder / "records.npz")
        notes = cross_check(records, before, after) if before is not None and after is not None else ()
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
                "canaries": self._counted(arm, beside, requests),
                "notes": [f"block {folder.name}: {note}" for note in notes],
                "report": {**asdict(report), "planned_events_per_s": plan.busiest_per_s()[1]},
            },
        )

    def _counted(self, arm: str, beside: Sequence[float | None], requests: Sequence[Request]) -> dict[str, Any] | None:
        if self._canaries is None:
            return None
        return self._canaries.counted(arm, beside, self._canaries.differences(requests, arm))

    def _ask(self, engine: Engine, arm: str) -> list[float | None]:
        return [] if self._canaries is None else [self._canaries.ask(engine, arm)]

    def _histograms(self, engine: Engine) -> dict[str, HistogramSample] | None:
        """Return the engine's own latency histograms, None where they cannot be had: they are for notes alone."""
        try:
            return pick_histograms(read_page(engine.endpoint, api_key=self._run.api_key))
        except (OSError, ValueError):
            return None


def require_room(settings: Settings, options: Options) -> None:
    """Check that the prompts and answers of a comparison fit into what the engines are started for.

    Raises: UsageError naming both lengths; ScenarioInvalid for a load that cannot be.
    """
    longest = options.prompt_tokens + options.output_tokens
    if longest > settings.max_model_len:
        raise UsageError(
            f"prompt_tokens and output_tokens are {longest} together, max_model_len is {settings.max_model_len}"
        )
    _shape(settings, options, with_canaries=False)  # names what else cannot be


def _shape(settings: Settings, options: Options, *, with_canaries: bool) -> LoadShape:
    is_tiny = settings.old is None and settings.model != "smollm2"
    rate_rps = settings.rate_rps or (TINY_RATE_RPS if is_tiny else MODEL_RATE_RPS)
    least = CANARIES_MIN / (rate_rps * (options.warm_s + options.block_s))
    return steady(
        rate_rps=rate_rps,
        canary_ratio=max(CANARY_SHARE, least) if with_canaries else 0.0,
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
    )
