"""What the imperative fixtures give: checkpoints to damage, engines to start, load to put on them."""

from __future__ import annotations

import re
import shutil
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.checkpoint.copy import private_copy
from harness.checkpoint.manifest import read_checkpoint
from harness.checkpoint.models import default_cache, tiny_llama
from harness.engine.engine import Engine
from harness.engine.launch import SERVED_MODEL_NAME, Launch
from harness.guards.canary import LogprobRows, TokenRows, complete, prompt_logprobs_of, request_body
from harness.load.driver import LoadDriver
from harness.load.plan import make_plan
from harness.load.report import LoadReport
from harness.load.shape import LoadShape, steady
from harness.observe.canary_prompts import canary_prompts
from harness.observe.history import Request

if TYPE_CHECKING:
    from harness.run import Run

LOAD_HORIZON_S = 3600.0
ASK_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Private copies that a test may change."""

    old: Path
    new: Path


@dataclass(frozen=True, slots=True)
class EngineHandle:
    """A running engine and how to ask it."""

    engine: Engine
    api_key: str
    prompts: TokenRows

    @property
    def endpoint(self) -> str:
        """Return `http://127.0.0.1:PORT`."""
        return self.engine.endpoint

    def prompt_logprobs(self) -> LogprobRows:
        """Ask the canary prompts and return the logprobs of their tokens.

        Raises: OSError for transport faults, ValueError for anything but a usable answer.
        """
        body = request_body(SERVED_MODEL_NAME, self.prompts)
        return prompt_logprobs_of(self.complete(body), self.prompts)

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """Send a completions request and return the decoded answer."""
        return complete(self.endpoint, {"model": SERVED_MODEL_NAME, **body}, api_key=self.api_key, limit_s=ASK_LIMIT_S)

    def stop(self) -> int | None:
        """End the engine and return its exit code."""
        return self.engine.stop()


@dataclass(slots=True)
class LoadHandle:
    """Load that runs until it is stopped."""

    driver: LoadDriver
    requests: list[Request] = field(default_factory=list)

    def stop(self) -> LoadReport:
        """End the load; `requests` is complete afterwards."""
        return self.driver.stop()


class Bench:
    """Hands out engines and load inside a run and takes everything back at the end. Use as a context manager."""

    def __init__(self, run: Run, name: str) -> None:
        self._run = run
        self._name = re.sub(r"[^A-Za-z0-9_.-]", "_", name)
        self._stack = ExitStack()
        self._starts = 0
        self._loads = 0

    def __enter__(self) -> Bench:
        self._work = self._run.work / f"bench-{self._name}"
        self._work.mkdir()
        self._stack.callback(shutil.rmtree, self._work, ignore_errors=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def checkpoints(self) -> Checkpoints:
        """Return private copies of the old and the new tiny checkpoint."""
        copies = {}
        for which, seed in (("old", 1), ("new", 2)):
            copies[which] = self._work / which
            private_copy(tiny_llama(seed=seed).build(default_cache()), copies[which])
        return Checkpoints(**copies)

    def start_engine(
        self,
        checkpoint: Path,
        *,
        ready_limit_s: float = 180.0,
        dtype: str = "auto",
        extra_arguments: tuple[str, ...] = (),
        environment: tuple[tuple[str, str], ...] = (),
    ) -> EngineHandle:
        """Start an engine on a checkpoint directory and wait until it is ready.

        Raises: EngineNotReady, with the first error lines of its log, when it refuses.
        """
        launch = Launch(
            checkpoint_root=checkpoint.parent,
            checkpoint_name=checkpoint.name,
            dtype=dtype,
            extra_arguments=extra_arguments,
            environment=environment,
        )
        self._starts += 1
        engine = self._run.starter.start(launch, incarnation=f"{self._name}-{self._starts}")
        self._stack.callback(engine.stop)
        engine.wait_ready(ready_limit_s)
        vocabulary = int(read_checkpoint(checkpoint).config["vocab_size"])
        prompts = canary_prompts(vocabulary, seed=self._run.settings.seed)
        return EngineHandle(engine, self._run.api_key, prompts)

    def start_load(self, engine: EngineHandle, *, rate_rps: float, shape: LoadShape | None = None) -> LoadHandle:
        """Put steady load on an engine until the handle is stopped."""
        vocabulary = max(max(prompt) for prompt in engine.prompts) + 1
        plan = make_plan(
            shape or steady(rate_rps=rate_rps),
            seed=self._run.settings.seed,
            horizon_s=LOAD_HORIZON_S,
            vocabulary_size=vocabulary,
            canary_prompts=engine.prompts,
        )
        requests: list[Request] = []
        self._loads += 1
        driver = LoadDriver(
            plan,
            directory=self._work / f"load-{self._loads}",
            api_key=engine.api_key,
            model=SERVED_MODEL_NAME,
            cpus=self._run.cores.load,
            on_request=requests.append,
            run_label=str(self._run.label),
        )
        self._stack.callback(driver.close)
        driver.start(engine.endpoint, engine.engine.incarnation)
        return LoadHandle(driver, requests)
