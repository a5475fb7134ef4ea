"""A process that still holds the memory of a GPU when the next engine wants it, as an old engine that does not end does.

The holder speaks with the driver directly, so that it is quicker than any engine: it holds the memory before that looks. It
ends with this process, whose end of a pipe it waits for. Source: taxonomy row M06.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

from harness.clock import poll_until
from harness.engine.engine import Engine, EngineIdentity
from harness.engine.undisturbed import undisturbed
from harness.errors import EnvironmentMissing, HarnessError, ScenarioInvalid, WaitExpired
from harness.faults.device import free_bytes
from harness.faults.fault import Injected, Struck, Surroundings, parameters_of
from harness.faults.struckdown import Struckdown

LEAVE_BYTES = 512 * 1024**2
SEEN_RATIO = 0.9  # of what the holder says it holds: others come and go meanwhile
HOLD_LIMIT_S = 30.0  # the driver of a machine with many GPUs takes seconds to begin
END_LIMIT_S = 10.0
FREED_LIMIT_S = 10.0
# Takes all free memory but so many bytes, in blocks, says how much that is, and waits for the end of its input.
HOLDER = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
def must(call, *arguments):
    code = getattr(cuda, call)(*arguments)
    if code:
        sys.exit(f"{call}: CUDA error {code}")
device, context = ctypes.c_int(), ctypes.c_void_p()
must("cuInit", 0)
must("cuDeviceGet", ctypes.byref(device), int(sys.argv[1]))
must("cuCtxCreate_v2", ctypes.byref(context), 0, device)
leave, held, block = int(sys.argv[2]), 0, 1024**3
free, total = ctypes.c_size_t(), ctypes.c_size_t()
while block >= 1024**2:
    must("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    place = ctypes.c_uint64()
    if free.value - block < leave or cuda.cuMemAlloc_v2(ctypes.byref(place), ctypes.c_size_t(block)):
        block //= 2
    else:
        held += block
print(held, flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldDeviceMemory:
    """All memory of a GPU but a little is held by another process while an engine starts."""

    name: ClassVar[str] = "held_device_memory"
    fault_id: ClassVar[str] = "M06"
    device: int
    leave_bytes: int

    def __post_init__(self) -> None:
        if self.device < 0 or self.leave_bytes < 0:
            raise ScenarioInvalid(
                f"held_device_memory: device={self.device}, leave_bytes={self.leave_bytes}, expected no negative number"
            )

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def undo(self) -> str:
        return "end the process that holds the memory (nvidia-smi names it), then start the engine anew"

    def require(self, identity: EngineIdentity) -> None:
        """Return for vLLM on a GPU.

        Raises: EnvironmentMissing.
        """
        if identity.name != "vllm":
            raise EnvironmentMissing("gpu", f"{identity.name} has no device memory that another process could hold")

    def strike(self, engine: Engine, surroundings: Surroundings, *, random: Random) -> Struck:
        before = free_bytes(self.device)
        holder = self._start()
        freed: list[int] = []  # what came back when the holder ended

        def end() -> None:
            held_then = free_bytes(self.device)
            if not _end(holder) or held_then is None:
                return
            with suppress(WaitExpired):  # the driver takes a moment; the proof says what came back
                poll_until(
                    lambda: True if (free_bytes(self.device) or 0) - held_then >= SEEN_RATIO * held else None,
                    what="device memory is free again",
                    limit_s=FREED_LIMIT_S,
                )
            freed.append((free_bytes(self.device) or 0) - held_then)

        held = 0
        surroundings.undos.append(end)
        try:
            held = _held_bytes(holder)
            after = free_bytes(self.device)
        except BaseException:  # an interrupt too
            end()
            raise
        is_seen = before is not None and after is not None and before - after >= SEEN_RATIO * held
        injected = Injected.of(
            self,
            proved=held > 0 and is_seen and holder.poll() is None,
            because=f"process {holder.pid} holds {held:,} bytes of GPU {self.device}; free there were {_shown(before)}, are "
            f"{_shown(after)}",
            before={"free_bytes": before},
            after={"free_bytes": after, "held_bytes": held, "pid": holder.pid},
        )

        def prove_end() -> Injected:
            runs, came_back = holder.poll() is None, freed[0] if freed else 0
            because = f"process {holder.pid} {'still runs' if runs else 'has ended'}; of {held:,} bytes {came_back:,} came back"
            return Injected.of(
                self,
                proved=not runs and came_back >= SEEN_RATIO * held > 0,
                because=because,
                after={"freed_bytes": came_back},
            )

        return Struckdown(injected, lambda: injected, end, prove_end)

    def _start(self) -> subprocess.Popen[str]:
        # As the driver's own tools number GPUs, whichever of them this process may use.
        environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        with undisturbed():
            return subprocess.Popen(
                (sys.executable, "-I", "-c", HOLDER, str(self.device), str(self.leave_bytes)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**environment, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
                start_new_session=True,  # Ctrl-C is for the harness, which then ends it
            )


def _held_bytes(holder: subprocess.Popen[str]) -> int:
    """Return what the holder says it holds.

    Raises: HarnessError when it ends, or says nothing within the limit.
    """
    assert holder.stdout is not None
    assert holder.stderr is not None
    if not select.select([holder.stdout], [], [], HOLD_LIMIT_S)[0]:
        raise HarnessError(f"device memory could not be held: process {holder.pid} said nothing for {HOLD_LIMIT_S:g} s")
    said = holder.stdout.readline()
    if not said.strip().isdecimal():
        words = " ".join(holder.stderr.read().split())[-300:]
        raise HarnessError(
            f'device memory could not be held: the process that should ended with "{words or said.strip()}"'
        )
    return int(said)


def _end(holder: subprocess.Popen[str]) -> bool:
    """End the holder by the end of its input, or kill it; say whether it was still there."""
    was_there = holder.returncode is None
    for pipe in (holder.stdin, holder.stdout, holder.stderr):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
    try:
        holder.wait(END_LIMIT_S)
    except subprocess.TimeoutExpired:
        holder.kill()
        holder.wait(END_LIMIT_S)
    return was_there


def _shown(size_bytes: int | None) -> str:
    return "nobody knows how many" if size_bytes is None else f"{size_bytes:,} bytes"


def held_device_memory(*, device: int = 0, leave_bytes: int = LEAVE_BYTES) -> HeldDeviceMemory:
    """Hold all memory of a GPU but so many bytes while the new engine starts, and until the remedy.

    `device` counts as `nvidia-smi` does. Source: taxonomy row M06.
    """
    return HeldDeviceMemory(device=device, leave_bytes=leave_bytes)
