"""GPU samples against a made-up NVML: there, absent, broken, and half supported."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from harness.observe.gpu import GpuSample, NoGpu, sample_gpus


class NVMLError(Exception):
    pass


@pytest.fixture
def nvml(monkeypatch):
    """Two GPUs; every answer can be replaced by a test."""
    fake = ModuleType("pynvml")
    fake.shut_down = 0
    fake.NVMLError = NVMLError
    fake.NVML_CLOCK_SM = 1
    fake.NVML_TEMPERATURE_GPU = 0
    fake.nvmlInit = lambda: None
    fake.nvmlDeviceGetCount = lambda: 2
    fake.nvmlDeviceGetHandleByIndex = lambda index: index
    fake.nvmlDeviceGetName = lambda handle: b"NVIDIA H200"
    fake.nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(used=10 + handle, total=100)
    fake.nvmlDeviceGetUtilizationRates = lambda handle: SimpleNamespace(gpu=37, memory=1)
    fake.nvmlDeviceGetClockInfo = lambda handle, kind: 1980
    fake.nvmlDeviceGetTemperature = lambda handle, kind: 41
    fake.nvmlDeviceGetCurrentClocksThrottleReasons = lambda handle: 0x4 | 0x40 | 0x1

    def shut_down() -> None:
        fake.shut_down += 1

    fake.nvmlShutdown = shut_down
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def fails(*arguments: object) -> None:
    raise NVMLError("Driver Not Loaded")


def test_every_gpu_is_sampled_and_nvml_is_left_again(nvml) -> None:
    first, second = sample_gpus()
    assert first == GpuSample(
        index=0,
        name="NVIDIA H200",
        memory_used_bytes=10,
        memory_total_bytes=100,
        utilization_ratio=0.37,
        clock_mhz=1980,
        temperature_celsius=41,
        throttle=("power_cap", "hardware_thermal"),
    )
    assert second.memory_used_bytes == 11
    assert nvml.shut_down == 1


def test_what_a_gpu_does_not_tell_is_none(nvml) -> None:
    nvml.nvmlDeviceGetUtilizationRates = fails
    nvml.nvmlDeviceGetCurrentClocksThrottleReasons = fails
    sample, _ = sample_gpus()
    assert sample.utilization_ratio is None
    assert sample.throttle == ()
    assert sample.memory_used_bytes == 10


@pytest.mark.parametrize(
    ("name", "because"),
    [("nvmlInit", "does not start"), ("nvmlDeviceGetCount", "fails"), ("nvmlDeviceGetHandleByIndex", "fails")],
)
def test_a_broken_driver_is_no_gpu_and_says_why(nvml, name, because) -> None:
    setattr(nvml, name, fails)
    seen = sample_gpus()
    assert isinstance(seen, NoGpu)
    assert because in seen.because
    assert "Driver Not Loaded" in seen.because
    assert nvml.shut_down == (0 if name == "nvmlInit" else 1)


def test_a_driver_without_gpus_is_no_gpu(nvml) -> None:
    nvml.nvmlDeviceGetCount = lambda: 0
    assert sample_gpus() == NoGpu(because="NVML counts 0 GPUs")


def test_without_the_bindings_there_is_no_gpu(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    seen = sample_gpus()
    assert isinstance(seen, NoGpu)
    assert "cannot be imported" in seen.because


def test_this_machine_answers_one_way_or_the_other() -> None:
    seen = sample_gpus()
    assert (isinstance(seen, NoGpu) and seen.because) or all(isinstance(gpu, GpuSample) for gpu in seen)
