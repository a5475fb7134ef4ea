"""What the operations of one scenario stand on: the scenario, its engines, checkpoints and directories."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Protocol

from harness.clock import Deadline
from harness.engine.engine import EngineStarter
from harness.engine.launch import Launch, WeightCache
from harness.faults.fault import CacheFault, CompileCacheFault
from harness.guards.canary import GoldenPair
from harness.load.report import Heartbeat
from harness.observe.history import EventKind, Recorder, Request
from harness.scenario import Mode, Scenario

LIVE = "live"  # the entry that engines are started on


class Traffic(Protocol):
    """Where users' requests go from now on."""

    def admit(self, endpoint: str, incarnation: str) -> None:
        """Send arrivals from now on to this engine."""

    def require_running(self) -> None:
        """Return while there is any traffic."""


class Watcher(Protocol):
    """Observers of running engines."""

    def watch(self, endpoint: str, incarnation: str, api_key: str) -> None:
        """Begin to observe an engine."""

    def unwatch(self, incarnation: str) -> None:
        """Stop observing it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What a scenario's operations stand on."""

    scenario: Scenario
    mode: Mode
    starter: EngineStarter
    recorder: Recorder
    goldens: GoldenPair
    old: Path  # undamaged checkpoints, only read
    new: Path
    work: Path  # the scenario's own scratch directory
    cache: Path  # the weight cache, in shared memory
    launch: Launch  # of the undamaged checkpoints
    api_key: str
    random: Random
    deadline: Deadline

    def keep_request(self, request: Request) -> None:
        """Record what became of an arrival, with which checkpoint a canary was answered from."""
        if request.prompt_logprobs:
            seen = self.goldens.compare(request.prompt_logprobs, request.rotation)
            request = replace(
                request,
                answer=seen.answer,
                difference_old=seen.difference_old,
                difference_new=seen.difference_new,
            )
        self.recorder.request(request)

    def keep_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Record how a loader was doing."""
        self.recorder.event("load", EventKind.LOAD_HEARTBEAT, **asdict(heartbeat))


def compile_cache_of(scenario: Scenario, directory: Path) -> Path | None:
    """Make the compile cache that a scenario's engines are launched with; None for a scenario whose engines are eager."""
    if not any(isinstance(fault, CompileCacheFault) for fault in scenario.faults):
        return None
    directory.mkdir(exist_ok=True)
    return directory


def weight_cache_of(scenario: Scenario, directory: Path) -> WeightCache | None:
    """Return the weight cache that a scenario's engines are launched with."""
    fault = next((fault for fault in scenario.faults if isinstance(fault, CacheFault)), None)
    return None if fault is None else WeightCache(directory=directory, key=fault.key)
