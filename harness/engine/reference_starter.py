"""Starts the reference engine: a child process of this interpreter, ready in under a second."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from socket import AF_INET, SO_REUSEADDR, SOCK_STREAM, SOL_SOCKET, socket

from harness.engine.engine import EngineIdentity, EngineSite
from harness.engine.launch import WEIGHT_CACHE_KEY_VARIABLE, WEIGHT_CACHE_PATH_VARIABLE, Launch
from harness.engine.process_child import ENGINE_VARIABLE, RUN_VARIABLE, ProcessEngine, engine_label, processor_name
from harness.engine.reference.version import PARENT_VARIABLE, REFERENCE_VERSION
from harness.engine.undisturbed import undisturbed
from harness.errors import EnvironmentMissing, UsageError

_LOOPBACK = "127.0.0.1"
# What decides an engine's behaviour comes from its launch, never from the shell the harness was started in.
_DROPPED_PREFIXES = ("VLLM_", "PYTHON", "PYTEST_", "COVERAGE_", "ROLLOUT_", "OPENBLAS_", "OMP_", "MKL_")


class ReferenceStarter:
    """Starts reference engines; they share nothing."""

    def __init__(self, *, defects: Sequence[str] = ()) -> None:
        """Start engines with these planted defects (`harness.engine.reference.defects`), added to those of a launch."""
        self._defects = tuple(defects)
        self._site: EngineSite | None = None
        self._engines: list[ProcessEngine] = []

    def identity(self) -> EngineIdentity:
        """Say which version of the reference engine this is."""
        cpus = self._site.engine_cpus if self._site is not None else ()
        python = ".".join(str(part) for part in sys.version_info[:3])
        return EngineIdentity(
            kind="reference",
            name="reference",
            version=REFERENCE_VERSION,
            build=f"python {python}, numpy {version('numpy')}",
            hardware=f"{processor_name()}, {len(cpus) or len(os.sched_getaffinity(0))} cores",
        )

    def open(self, site: EngineSite) -> None:
        """Take the run's directories."""
        site.log_directory.mkdir(parents=True, exist_ok=True)
        site.work_directory.mkdir(parents=True, exist_ok=True)
        self._site = site

    def start(self, launch: Launch, *, incarnation: str) -> ProcessEngine:
        """Start serving on a free loopback port and return at once.

        Raises: EnvironmentMissing when the interpreter cannot be run or pinned to the run's processors.
        """
        site = self._site
        if site is None:
            raise UsageError(f'engine "{incarnation}" cannot be started: its starter is not open')
        port = _held_port()
        number = launch.port or port.getsockname()[1]
        scratch = Path(tempfile.mkdtemp(prefix="e-", dir=site.work_directory))
        label = engine_label(site, incarnation, scratch)
        engine = ProcessEngine(
            incarnation=incarnation,
            endpoint=f"http://{_LOOPBACK}:{number}",
            log_path=site.log_directory / f"{incarnation}.log",
            label=label,
            secrets=(site.api_key,),
            port=port,
            scratch=scratch,
        )
        model = str(launch.checkpoint_root.absolute() / launch.checkpoint_name)
        arguments = launch.arguments(model=model, host=_LOOPBACK, port=number)
        command = (sys.executable, "-P", "-m", "harness.engine.reference", *arguments)
        environment = self._environment(launch, site=site, label=label)
        self._engines.append(engine)  # before it is there: nothing that comes in between can lose it
        try:
            with undisturbed(), _pinned(site.engine_cpus):
                engine.spawn(command, environment=environment)
        except OSError as error:
            engine.stop()
            what = error.strerror or str(error)
            raise EnvironmentMissing("python", f'"{sys.executable}" cannot be run as an engine: {what}') from error
        return engine

    def close(self) -> None:
        """End every engine that still runs. Idempotent."""
        with ExitStack() as release:  # goes on after an error, and raises it at the end
            for engine in self._engines:
                release.callback(engine.stop)

    def _environment(self, launch: Launch, *, site: EngineSite, label: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_DROPPED_PREFIXES)}
        cache: dict[str, str] = {}
        if launch.weight_cache is not None:
            cache = {
                WEIGHT_CACHE_PATH_VARIABLE: str(launch.weight_cache.directory),
                WEIGHT_CACHE_KEY_VARIABLE: launch.weight_cache.key,
            }
        asked = dict(launch.environment)
        defects = (*self._defects, *filter(None, (asked.pop("ROLLOUT_REFERENCE_DEFECT", ""),)))
        return {
            **kept,
            "PYTHONUNBUFFERED": "1",
            "ROLLOUT_REFERENCE_DEFECT": ",".join(defects),
            **cache,
            **asked,
            # What a sweep finds it by, and what every request must show, is nobody else's to choose.
            RUN_VARIABLE: site.run_label,
            ENGINE_VARIABLE: label,
            PARENT_VARIABLE: str(os.getpid()),
            "VLLM_API_KEY": site.api_key,
        }


def _held_port() -> socket:
    """Bind a free port without listening: connecting is refused, and only a server that is told the number takes it."""
    held = socket(AF_INET, SOCK_STREAM)
    try:
        held.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
        held.bind((_LOOPBACK, 0))
    except OSError:
        held.close()
        raise
    return held


@contextmanager
def _pinned(cpus: Sequence[int]) -> Iterator[None]:
    """Let children started inside run on `cpus` only: a child inherits the affinity of the thread that starts it."""
    if not cpus:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
