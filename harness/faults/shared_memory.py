"""Too little shared memory in an engine's container, from its start or all at once.

The host's `/dev/shm` is never filled: only a container has one of its own. Source: taxonomy row M01.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from random import Random
from typing import Any, ClassVar

from harness.engine.engine import Contained, Engine, EngineIdentity
from harness.engine.launch import Launch
from harness.errors import EnvironmentMissing, FaultNotApplicable, HarnessError
from harness.faults.fault import Injected, Struck, Surroundings, parameters_of
from harness.faults.struckdown import Struckdown, has_ended

SMALL_BYTES = 64 * 1024
PAGE_BYTES = 4096
FILLER = "/dev/shm/rollout-harness-filler"


@dataclass(frozen=True, slots=True, kw_only=True)
class FullSharedMemory:
    """The container's own `/dev/shm` is full."""

    name: ClassVar[str] = "full_shared_memory"
    fault_id: ClassVar[str] = "M01"

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def undo(self) -> str:
        return f"in the container: rm {FILLER}"

    def require(self, identity: EngineIdentity) -> None:
        """Return for engines that have a `/dev/shm` of their own."""
        _require_container(identity, "its /dev/shm is the host's, which a fault must not fill")

    def strike(self, engine: Engine, surroundings: Surroundings, *, random: Random) -> Struck:
        if not isinstance(engine, Contained):
            raise FaultNotApplicable(f'engine "{engine.incarnation}" has no /dev/shm of its own')
        before = _free_shared_memory(engine)

        def empty() -> None:
            with suppress(HarnessError):  # gone with its memory, or Docker does not answer: the proof says which
                engine.run_inside("rm", "-f", FILLER)

        try:
            engine.run_inside(
                "sh", "-c", f"dd if=/dev/zero of={FILLER} bs=65536 2>/dev/null; dd if=/dev/zero bs=512 >>{FILLER}"
            )
            after = _free_shared_memory(engine)
        except BaseException:
            empty()
            raise

        def injected(is_proved: bool, because: str) -> Injected:
            return Injected.of(
                self, proved=is_proved, because=because, before={"free_bytes": before}, after={"free_bytes": after}
            )

        def prove_end() -> Injected:
            try:
                free = _free_shared_memory(engine)
            except HarnessError as error:
                if has_ended(engine.exit_code):
                    return injected(True, "the container has ended, and its shared memory with it")
                return injected(False, f"/dev/shm may still be full, the container runs as far as is known: {error}")
            because = f"{free:,} bytes of /dev/shm are free again, {before:,} were before it was filled"
            return injected(free >= before - PAGE_BYTES, because)

        proof = injected(before > 0 and after == 0, f"{before:,} bytes of /dev/shm were free, {after:,} are")
        return Struckdown(proof, lambda: proof, empty, prove_end)


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallSharedMemory:
    """A container with less shared memory than its engine may want; Docker's own 64 MiB is such a size."""

    name: ClassVar[str] = "small_shared_memory"
    fault_id: ClassVar[str] = "M01"
    size_bytes: int

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def require(self, identity: EngineIdentity) -> None:
        """Return for engines that have a `/dev/shm` of their own."""
        _require_container(identity, "the size of its /dev/shm is the host's")

    def alter(self, launch: Launch) -> tuple[Launch, Injected]:
        altered = replace(launch, shared_memory_bytes=self.size_bytes)
        return altered, Injected.of(
            self,
            proved=altered.shared_memory_bytes == self.size_bytes != launch.shared_memory_bytes,
            because=f"the engine is launched with {self.size_bytes:,} bytes of shared memory",
            before={"shared_memory_bytes": launch.shared_memory_bytes},
            after={"shared_memory_bytes": altered.shared_memory_bytes},
        )


def _free_shared_memory(engine: Contained) -> int:
    code, said = engine.run_inside("sh", "-c", "df -k --output=avail /dev/shm | tail -1")
    if code != 0 or not said.isdigit():
        raise HarnessError(f'the container does not say how full its /dev/shm is: exit code {code}, "{said[:200]}"')
    return int(said) * 1024


def _require_container(identity: EngineIdentity, why: str) -> None:
    if identity.kind != "container":
        raise EnvironmentMissing("container", f"this fault needs an engine in a container; of a {identity.kind}, {why}")


def full_shared_memory() -> FullSharedMemory:
    """Fill the container's own `/dev/shm` while it serves. Source: taxonomy row M01."""
    return FullSharedMemory()


def small_shared_memory(size_bytes: int = SMALL_BYTES) -> SmallSharedMemory:
    """Launch a container with so little shared memory. Source: taxonomy row M01."""
    return SmallSharedMemory(size_bytes=size_bytes)
