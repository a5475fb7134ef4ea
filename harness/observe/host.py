"""How busy the machine is, from /proc: slow answers on a starved host say nothing about an engine."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
_PRESSURE = re.compile(r"^some avg10=([\d.]+)", re.MULTILINE)
_AVAILABLE = re.compile(r"^MemAvailable:\s+(\d+) kB", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuTimes:
    """Ticks since boot, summed over all CPUs."""

    busy: int
    stolen: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSample:
    """The machine at one time; None is what this kernel does not tell.

    Ratios are of the time since the previous sample. Pressure is the share of the last 10 s, in percent, in which
    something waited.
    """

    cpu_busy_ratio: float | None
    steal_ratio: float | None
    memory_available_bytes: int | None
    pressure_cpu_avg10: float | None
    pressure_io_avg10: float | None
    pressure_memory_avg10: float | None


class HostSampler:
    """Takes samples; the first has no ratios, since there is nothing to compare with."""

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self._last = _cpu_times(_read(proc / "stat"))

    def sample(self) -> HostSample:
        """Read /proc once; absent or odd files give None."""
        now, before = _cpu_times(_read(self._proc / "stat")), self._last
        self._last = now
        busy = stolen = None
        if now is not None and before is not None and now.total > before.total:
            elapsed = now.total - before.total
            busy = _ratio(now.busy - before.busy, elapsed)
            stolen = _ratio(now.stolen - before.stolen, elapsed)
        available = _AVAILABLE.search(_read(self._proc / "meminfo"))
        return HostSample(
            cpu_busy_ratio=busy,
            steal_ratio=stolen,
            memory_available_bytes=None if available is None else int(available.group(1)) * 1024,
            pressure_cpu_avg10=self._pressure("cpu"),
            pressure_io_avg10=self._pressure("io"),
            pressure_memory_avg10=self._pressure("memory"),
        )

    def _pressure(self, resource: str) -> float | None:
        found = _PRESSURE.search(_read(self._proc / "pressure" / resource))
        return None if found is None else float(found.group(1))


def _cpu_times(stat: str) -> CpuTimes | None:
    """Read the first line of /proc/stat: user nice system idle iowait irq softirq steal (guest times are in user)."""
    fields = stat.split("\n", 1)[0].split()
    if len(fields) < 9 or fields[0] != "cpu" or not all(field.isdigit() for field in fields[1:9]):
        return None
    ticks = [int(field) for field in fields[1:9]]
    total = sum(ticks)
    return CpuTimes(busy=total - ticks[3] - ticks[4], stolen=ticks[7], total=total)


def _ratio(part: int, whole: int) -> float:
    return round(min(1.0, max(0.0, part / whole)), 4)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
