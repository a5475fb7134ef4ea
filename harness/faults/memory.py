"""An engine that reaches its memory limit.

A container's limit is the kernel's: it kills. Other engines' processes may then map no more than they have, and an
allocation fails. A limit ends with the container or the process that has it. Source: taxonomy row M05.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

import psutil

from harness.clock import poll_until
from harness.engine.engine import Contained, Engine, EngineIdentity, Inspectable
from harness.engine.proc import find
from harness.errors import FaultNotApplicable, HarnessError, WaitExpired
from harness.faults.fault import Injected, Struck, Surroundings, parameters_of
from harness.faults.struckdown import Struckdown, has_ended

HEADROOM_BYTES = 64 * 1024**2  # what a container is left above what it holds
NEIGHBOUR_BYTES = 2 * HEADROOM_BYTES  # what is then asked for
KILL_LIMIT_S = 20.0
_READ_MEMORY = (
    "cat /sys/fs/cgroup/memory.max /sys/fs/cgroup/memory/memory.limit_in_bytes 2>/dev/null | head -1; "
    "cat /sys/fs/cgroup/memory.stat /sys/fs/cgroup/memory/memory.stat 2>/dev/null "
    '| awk \'$1=="anon"||$1=="total_rss"{print $2; exit}\'; '
    "cat /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control 2>/dev/null "
    "| awk '$1==\"oom_kill\"{print $2; exit}'"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """The engine reaches its memory limit: the container's, where the kernel kills; else each process's own."""

    name: ClassVar[str] = "memory_limit"
    fault_id: ClassVar[str] = "M05"

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def undo(self) -> str:
        return "raise the limit again (docker update --memory, prlimit --as=unlimited), or start the engine anew"

    def require(self, identity: EngineIdentity) -> None:
        """Every engine uses memory."""

    def strike(self, engine: Engine, surroundings: Surroundings, *, random: Random) -> Struck:
        if isinstance(engine, Contained):
            pids = engine.processes("all") if isinstance(engine, Inspectable) else ()
            return self._squeeze_container(engine, pids, engine.exit_code)
        if isinstance(engine, Inspectable):
            return self._squeeze_processes(engine.processes("all"), computing=engine.processes("core"))
        raise FaultNotApplicable(f'the memory of engine "{engine.incarnation}" cannot be limited')

    def _squeeze_container(
        self, engine: Contained, pids: tuple[int, ...], exit_code: Callable[[], int | None]
    ) -> Struck:
        own = [proc for pid in pids if (proc := find(pid)) is not None and proc.is_running()]
        limit, held, kills = _memory_of(engine)
        lowered = held + HEADROOM_BYTES
        seen: dict[str, int] = {"limit_bytes": lowered, "oom_kills": kills, "own_ended": 0}

        def killed() -> bool | None:
            with suppress(HarnessError):  # when the container has ended, only Docker can be asked
                now_limit, now_held, now_kills = _memory_of(engine)
                seen.update(limit_bytes=now_limit, held_bytes=now_held, oom_kills=now_kills)
            if seen["oom_kills"] == kills and engine.ended_for_memory():
                seen["oom_kills"] = kills + 1
            # The kernel may as well have killed the neighbour alone.
            seen["own_ended"] = sum(not proc.is_running() for proc in own) or int(exit_code() is not None)
            return True if seen["oom_kills"] > kills and seen["own_ended"] else None

        def restore() -> None:
            with suppress(HarnessError):  # gone with its limit, or Docker does not answer: the proof says which
                engine.limit_memory(limit)

        try:
            engine.limit_memory(lowered)
            # Who starts next beside the engine asks for more than is left: the kernel ends the largest process.
            code, _ = engine.run_inside("python3", "-c", f"x = b'x' * {NEIGHBOUR_BYTES}")
            with suppress(WaitExpired, HarnessError):
                poll_until(
                    killed,
                    what="the kernel has killed of the engine for want of memory",
                    limit_s=KILL_LIMIT_S,
                    every_s=0.2,
                )
        except BaseException:
            restore()
            raise
        injected = Injected.of(
            self,
            proved=seen["oom_kills"] > kills and seen["own_ended"] > 0,
            because=f"limit {limit:,} bytes, {held:,} held; lowered to {seen['limit_bytes']:,}, a neighbour asked for "
            f"{NEIGHBOUR_BYTES:,} (exit code {code}); killed for want of memory: {kills} before, "
            f"{seen['oom_kills']} after; of the engine's own processes {seen['own_ended']} ended",
            before={"limit_bytes": limit, "held_bytes": held, "oom_kills": kills},
            after={**seen, "neighbour_exit_code": code},
        )

        def prove_end() -> Injected:
            try:
                now_limit = _memory_of(engine)[0]
            except HarnessError as error:
                if has_ended(exit_code):
                    return Injected.of(self, proved=True, because="the container has ended, and its limit with it")
                because = f"the limit was lowered and may still be, the container runs as far as is known: {error}"
                return Injected.of(self, proved=False, because=because)
            return Injected.of(
                self, proved=now_limit == limit, because=f"the limit is {now_limit:,} bytes, it was {limit:,}"
            )

        return Struckdown(injected, lambda: injected, restore, prove_end)

    def _squeeze_processes(self, pids: tuple[int, ...], *, computing: tuple[int, ...]) -> Struck:
        before: dict[int, tuple[int, int]] = {}
        sizes: dict[int, int] = {}
        starts = {pid: find(pid) for pid in pids}
        for pid in pids:
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                soft, hard = process.rlimit(psutil.RLIMIT_AS)
                sizes[pid] = process.memory_info().vms
                process.rlimit(psutil.RLIMIT_AS, (sizes[pid], hard))
                before[pid] = (soft, hard)

        def limits() -> dict[str, int]:
            found = {}
            for pid in before:
                with suppress(psutil.Error):
                    if starts[pid] == find(pid):
                        found[str(pid)] = int(psutil.Process(pid).rlimit(psutil.RLIMIT_AS)[0])
            return found

        def prove() -> Injected:
            after = limits()
            lowered = {str(pid): size for pid, size in sizes.items()}
            limited = [pid for pid in computing if pid in before and _is_lower(after.get(str(pid)), before[pid][0])]
            return Injected.of(
                self,
                proved=bool(computing)
                and len(limited) == len(computing)
                and all(after[pid] == lowered[pid] for pid in after),
                because=f"{len(after)} processes are limited to the {sum(after.values()):,} bytes they had mapped; of "
                f"{len(computing)} that compute {len(limited)} are limited to less than before",
                before={"limits": {str(pid): soft for pid, (soft, _) in before.items()}, "mapped_bytes": lowered},
                after={"limits": after},
            )

        def restore() -> None:
            for pid, limit in before.items():
                with suppress(psutil.Error):
                    if starts[pid] == find(pid):
                        psutil.Process(pid).rlimit(psutil.RLIMIT_AS, limit)

        def prove_end() -> Injected:
            after = limits()
            low = [pid for pid, limit in after.items() if limit != before[int(pid)][0]]
            because = f"{len(low)} of {len(after)} processes that still run have the lowered limit"
            return Injected.of(self, proved=not low, because=because, after={"limits": after})

        return Struckdown(prove(), prove, restore, prove_end)


def _is_lower(limit: int | None, earlier: int) -> bool:
    """Say whether a limit is lower than an earlier one, each as the kernel says it: a number or RLIM_INFINITY."""
    return limit not in (None, psutil.RLIM_INFINITY) and (earlier == psutil.RLIM_INFINITY or limit < earlier)


def _memory_of(engine: Contained) -> tuple[int, int, int]:
    """Return limit, memory that cannot be given back, and how many processes the kernel has killed for want of it.

    Raises: HarnessError when the container does not say.
    """
    code, said = engine.run_inside("sh", "-c", _READ_MEMORY)
    values = said.split()
    if code != 0 or len(values) != 3 or not all(value.isdigit() for value in values):
        raise HarnessError(f'the container does not say how much memory it holds: exit code {code}, "{said[:200]}"')
    return int(values[0]), int(values[1]), int(values[2])


def memory_limit() -> MemoryLimit:
    """Let the engine reach its memory limit.

    A container's limit is lowered to little more than it holds, then something beside the engine asks for more: the kernel
    kills the largest process. Other engines' processes may map no more memory than they have. Source: taxonomy row M05.
    """
    return MemoryLimit()
