"""Samples of NVIDIA GPUs through NVML; a machine without any is a value of its own, not an error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_THROTTLE_REASONS = {
    0x0000000000000004: "power_cap",
    0x0000000000000008: "hardware_slowdown",
    0x0000000000000020: "software_thermal",
    0x0000000000000040: "hardware_thermal",
    0x0000000000000080: "power_brake",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSample:
    """One GPU at one time; None is what its driver does not tell."""

    index: int
    name: str
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    utilization_ratio: float | None
    clock_mhz: int | None
    temperature_celsius: int | None
    throttle: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NoGpu:
    """There is no GPU that could be asked, and why."""

    because: str


def sample_gpus() -> tuple[GpuSample, ...] | NoGpu:
    """Ask NVML about every GPU of this machine; never raises for a GPU, driver or library that is absent or broken."""
    try:
        import pynvml  # type: ignore[import-untyped,unused-ignore]
    except ImportError as error:
        return NoGpu(because=f"the NVML bindings cannot be imported: {error}")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return NoGpu(because=f"NVML does not start: {error}")
    try:
        count = int(pynvml.nvmlDeviceGetCount())
        if count == 0:
            return NoGpu(because="NVML counts 0 GPUs")
        return tuple(_sample(pynvml, index) for index in range(count))
    except pynvml.NVMLError as error:
        return NoGpu(because=f"NVML fails: {error}")
    finally:
        pynvml.nvmlShutdown()


def driver_version() -> str:
    """Return the version of the NVIDIA driver, empty where there is none."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no bindings, no library, no driver: all of them mean that there is none
        return ""
    try:
        version = pynvml.nvmlSystemGetDriverVersion()
    except pynvml.NVMLError:
        return ""
    finally:
        pynvml.nvmlShutdown()
    return version.decode("utf-8", "replace") if isinstance(version, bytes) else str(version)


def _sample(nvml: Any, index: int) -> GpuSample:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = _ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    use = _ask(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
    name = _ask(nvml, nvml.nvmlDeviceGetName, handle)
    reasons = _ask(nvml, nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
    return GpuSample(
        index=index,
        name=name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name or ""),
        memory_used_bytes=None if memory is None else int(memory.used),
        memory_total_bytes=None if memory is None else int(memory.total),
        utilization_ratio=None if use is None else use.gpu / 100,
        clock_mhz=_ask(nvml, nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
        temperature_celsius=_ask(nvml, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        throttle=tuple(name for bit, name in _THROTTLE_REASONS.items() if reasons & bit),
    )


def _ask(nvml: Any, question: Any, *arguments: Any) -> Any:
    """Return the answer, or None where this GPU does not support the question (a MIG slice has no utilisation)."""
    try:
        return question(*arguments)
    except nvml.NVMLError:
        return None
