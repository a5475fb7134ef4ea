"""What every fault is: a change, and the proof that it happened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Protocol, runtime_checkable

from harness.engine.launch import Launch


@dataclass(frozen=True, slots=True, kw_only=True)
class Injected:
    """The evidence of one fault: state before, state after, and whether that proves it."""

    fault: str
    fault_id: str
    proved: bool
    because: str  # one sentence with the values seen
    before: Mapping[str, Any] = field(default_factory=dict)
    after: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class Fault(Protocol):
    """Anything injected. `name` is the function in `harness.faults`, `fault_id` the row of the fault taxonomy."""

    @property
    def name(self) -> str: ...

    @property
    def fault_id(self) -> str: ...

    def parameters(self) -> Mapping[str, Any]:
        """Return what the fault was made with, so that it can be declared in results."""


@runtime_checkable
class Damage(Fault, Protocol):
    """A change to a checkpoint at rest."""

    def damage(self, target: Path, *, old: Path, random: Random) -> Injected:
        """Change the checkpoint in `target`, a private copy of the new one, and prove it.

        `old` is the checkpoint that is being replaced (some faults leave parts of it behind); it is only read.
        Raises: FaultNotApplicable when the checkpoint lacks what the fault needs.
        """


@runtime_checkable
class LaunchFault(Fault, Protocol):
    """A wrong launch argument or environment."""

    def alter(self, launch: Launch) -> tuple[Launch, Injected]:
        """Return the altered launch and the proof that it differs."""


@runtime_checkable
class PublishFault(Fault, Protocol):
    """A wrong way to put the new checkpoint where the engine reads it.

    `live` is what the engine serves. Before, it is a real directory with the old checkpoint. `start` must leave the live
    path as the engine will find it when it is started right afterwards; anything that goes on in the background is
    ended by `finish`.
    """

    def start(self, source: Path, live: Path, *, random: Random) -> Injected: ...

    def finish(self, *, limit_s: float) -> None:
        """Wait for, or end, what still runs in the background."""


@runtime_checkable
class CacheFault(Fault, Protocol):
    """A cache that outlives the old checkpoint; the engine is launched with it."""

    @property
    def key(self) -> str:
        """Return what the cache is keyed by: "path" or "content"."""

    def prove(self, cache_directory: Path) -> Injected:
        """Prove, just before the new start, that the cache still holds the old checkpoint's tensors."""
