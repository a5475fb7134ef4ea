"""What every fault is: a change, and the proof that it happened."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from random import Random
from typing import Any, Protocol, runtime_checkable

from harness.engine.engine import Engine, EngineIdentity
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

    @classmethod
    def of(
        cls,
        fault: Fault,
        *,
        proved: bool,
        because: str,
        before: Mapping[str, Any] | None = None,
        after: Mapping[str, Any] | None = None,
    ) -> Injected:
        """Return the evidence of this fault."""
        return cls(
            fault=fault.name,
            fault_id=fault.fault_id,
            proved=proved,
            because=because,
            before=before or {},
            after=after or {},
        )


@runtime_checkable
class Fault(Protocol):
    """Anything injected. `name` is the function in `harness.faults`, `fault_id` the row of the fault taxonomy."""

    @property
    def name(self) -> str: ...

    @property
    def fault_id(self) -> str: ...

    def parameters(self) -> Mapping[str, Any]:
        """Return what the fault was made with, so that it can be declared in results."""


def parameters_of(fault: Any) -> dict[str, Any]:
    """Return the fields a fault was made with, ready for JSON."""
    return {each.name: getattr(fault, each.name) for each in fields(fault)}


@runtime_checkable
class Damage(Fault, Protocol):
    """A change to a checkpoint at rest."""

    def damage(self, target: Path, *, old: Path, random: Random) -> Injected:
        """Change the checkpoint in `target`, a private copy of the new one, and prove it.

        `old` is the checkpoint that is being replaced (some faults leave parts of it behind); it is only read.
        Raises: FaultNotApplicable when the checkpoint lacks what the fault needs.
        """


@runtime_checkable
class AdapterFault(Fault, Protocol):
    """A change to a LoRA adapter at rest, whose base stays as it is."""

    def distort(self, adapter: Path, *, base: Path) -> Injected:
        """Change the adapter in a directory of this run's own, and prove it; `base` is only read.

        Raises: FaultNotApplicable when the adapter lacks what the fault needs.
        """


@runtime_checkable
class LaunchFault(Fault, Protocol):
    """A wrong launch argument or environment."""

    def alter(self, launch: Launch) -> tuple[Launch, Injected]:
        """Return the altered launch and the proof that it differs."""


class Acting(Protocol):
    """A fault that may go on acting after it was injected; it ends with this process at the latest."""

    @property
    def injected(self) -> Injected:
        """Return the proof taken when it was injected."""

    def state(self) -> Injected:
        """Prove it again from what is there now: counts when the engine is started; after `finish` it is a record."""

    def finish(self, *, limit_s: float) -> None:
        """Wait until it has run its course, or end it when the limit passes; 0 ends it now. Idempotent."""


@runtime_checkable
class PublishFault(Fault, Protocol):
    """A wrong way to put the new checkpoint where the engine reads it."""

    def start(self, source: Path, live: Path, *, random: Random) -> Acting:
        """Publish `source`, which is only read, over `live`, and leave it as an engine started right now would find it.

        `live` is a real directory in the run's own workspace that holds the old checkpoint.
        Raises: FaultNotApplicable when `live` is not such a directory, or shares files with something else.
        """


@runtime_checkable
class CacheFault(Fault, Protocol):
    """A cache that outlives the old checkpoint; the engine is launched with it."""

    @property
    def key(self) -> str:
        """Return what the cache is keyed by: "path" or "content"."""

    def prove(self, cache_directory: Path, *, old: Path, new: Path) -> Injected:
        """Prove, just before the new start, that the cache still holds the old checkpoint's tensors and not the new's."""


@runtime_checkable
class CompileCacheFault(Fault, Protocol):
    """A compile cache that the old engine filled and the new one finds spoilt; engines of such a scenario compile."""

    def spoil(self, cache: Path, *, random: Random) -> tuple[Path, Injected]:
        """Spoil the cache below `cache`, and return where the new engine looks for one, and the proof.

        Raises: FaultNotApplicable when no engine has written a compile cache there.
        """


class Racing(Acting, Protocol):
    """A race with a start: it is told how the start goes on."""

    def engine_is_ready(self) -> None:
        """Do now what is due when the engine has loaded, or has failed to."""


@runtime_checkable
class StartRace(Fault, Protocol):
    """A remedy that races with the start it belongs to."""

    def after_start(self, cache_directory: Path) -> Racing:
        """Begin right after the engine was started; what it found and did is in `state`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What an engine runs among, all of it the scenario's own: a fault may change it and has to put it back."""

    live: Path  # the directory the engine was started on
    other: Path  # the checkpoint it was not started on, undamaged; only read
    work: Path  # scratch that a sweep removes, with what is mounted there
    shared: Path  # the same in shared memory; what its SEGMENTS_RECORD names is removed with it
    undos: list[Callable[[], None]] = field(
        default_factory=list
    )  # of what acts; added first, called if a strike is cut short


class Struck(Acting, Protocol):
    """A fault that struck an engine and acts until `finish`, which undoes what outlives the engine."""

    def undone(self) -> Injected:
        """Prove, from what is there after `finish`, that nothing of the fault acts any more."""


@runtime_checkable
class Demanding(Protocol):
    """A fault that not every engine or machine has what it needs for."""

    def require(self, identity: EngineIdentity) -> None:
        """Return if it can be injected into such an engine on this machine.

        Raises: EnvironmentMissing with the reason.
        """


@runtime_checkable
class LiveFault(Fault, Demanding, Protocol):
    """Something that happens to a running engine: to its processes, to what it may use, or to files it reads.

    With a step `inject()` it strikes the engine that serves; without, the new engine of a rollout while it starts.
    """

    def undo(self) -> str:
        """Say how it is undone by hand. This is in the history before the fault strikes."""

    def strike(self, engine: Engine, surroundings: Surroundings, *, random: Random) -> Struck:
        """Act on the engine and prove it: state before, state after.

        Nothing acts any more when it raises. What would outlive the engine must be found by a sweep of the run's label.
        Raises: FaultNotApplicable when the engine lacks what the fault needs; HarnessError when it could not be done.
        """
