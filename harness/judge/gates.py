"""What must be so before a latency says anything about an engine: each gate names what was seen and its limit.

A gate that fails voids what was measured; it never makes an engine look bad or good.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import fmean, median
from typing import Any

import numpy as np

from harness.errors import UsageError
from harness.judge.records import Records
from harness.judge.windows import FUNCTIONALS, latencies
from harness.observe.history import Event, EventKind

RETIRED_GATES = ("lag_of_ttft_p99",)  # stored comparisons may hold a limit of theirs; lag_of_margin took its place
DRIFT_RHO = 0.65
DRIFT_P = 0.01
DRIFT_REQUESTS_MIN = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class GateLimits:
    """The largest value of each gate that still lets a comparison count."""

    lag_ms_p99: float = 5.0  # start of a request after its planned time
    lag_of_margin: float = 0.5  # by how much it moves a metric that decides, as a share of the margin
    lag_ms_max: float = 50.0
    loop_lag_ms_p99: float = 5.0  # how late a timer in the loader was
    unsent_ratio: float = 0.01  # of the planned arrivals
    dropped: float = 0.0  # beyond the in-flight limit, too late to be sent, or lost by a bug of ours
    loader_cpu_ratio: float = 0.5  # of one core, on average
    loader_cpu_ratio_max: float = 0.8  # in any second
    events_per_s: float = 5000.0  # planned, per loader
    steal_ratio: float = 0.02  # of the processor time, taken by other guests of this machine's host
    pressure_cpu: float = 60.0  # percent of the time in which something waited for a processor, 10 s average
    pressure_io: float = 20.0
    pressure_memory: float = 5.0
    clock_difference: float = 0.02  # median GPU clock of B against that of A
    throttle_difference: float = 0.1  # share of the samples with one throttle reason, B against A
    drifting_ratio: float = 0.2  # of the blocks, in which latency rises or falls steadily
    wrong_answers: float = 0.0  # canaries that other weights answered than the side was given

    def with_changes(self, changes: Mapping[str, float]) -> GateLimits:
        """Return the same limits with some of them changed.

        Raises: UsageError naming the one that is unknown or no number from zero on.
        """
        known = [field.name for field in fields(self)]
        for name, value in changes.items():
            if name not in known:
                raise UsageError(f'gate "{name}" is unknown; gates: {", ".join(known)}')
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise UsageError(f"limit of gate {name} is {value!r}: it must be a number from 0 on")
        return replace(self, **changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """One condition: what was seen and the most that is allowed."""

    name: str
    seen: float
    limit: float
    where: str

    @property
    def passed(self) -> bool:
        """Say whether it holds; what is no number does not."""
        return self.seen <= self.limit

    def sentence(self) -> str:
        """Say what was seen, where, and the limit."""
        return f"{self.name} is {self.seen:.4g} in {self.where}, limit {self.limit:g}"


def lag_of_margin(users: Records, metrics: Sequence[str], margin: float) -> float:
    """Return by how much late dispatch slows the worst of these metrics, as a share of the margin (0.1: a tenth of it).

    `users` are the users' requests in the measured window. Latency counts from the planned start, so the lag of the loaders
    is in it. While it moves no metric by half of the margin, it cannot make an equal side slower, nor hide one that is
    slower by a little over one and a half margins.
    """
    seen = latencies(users)
    without = latencies(replace(users, planned_ns=np.where(users.is_ok, users.dispatched_ns, users.planned_ns)))
    times = [(FUNCTIONALS[name](seen), FUNCTIONALS[name](without)) for name in metrics]
    shifts = [late / prompt - 1 for late, prompt in times if prompt > 0]  # 0: all tokens came in one read
    return max((shift for shift in shifts if math.isfinite(shift)), default=0.0) / margin


def block_gates(
    records: Records,
    events: Sequence[Event],
    report: Mapping[str, Any],
    *,
    lag_of_margin: float,
    limits: GateLimits,
    where: str,
) -> tuple[Gate, ...]:
    """Return the gates of one block: its load, its loaders and the machine while it ran.

    `records` are those of the whole block, warm-up and canaries included. What a kernel does not tell has no gate.
    Raises: KeyError, ValueError or TypeError when the report of the load lacks a figure.
    """
    host = [event.data for event in events if event.kind is EventKind.HOST]
    load_events = report["planned_events_per_s"]
    users = records.of_users()
    seen: dict[str, float | None] = {
        "lag_ms_p99": float(report["lag_ms_p99"]),
        "lag_of_margin": lag_of_margin,
        "lag_ms_max": float(report["lag_ms_max"]),
        "loop_lag_ms_p99": float(report["loop_lag_ms_p99"]),
        "unsent_ratio": 1 - float(report["achieved_ratio"]),
        "dropped": float(len(records) - len(users) - int(records.is_canary.sum())),
        "loader_cpu_ratio": float(report["cpu_ratio"]),
        "loader_cpu_ratio_max": float(report["cpu_ratio_max"]),
        "events_per_s": float(load_events) / max(int(report["loaders"]), 1),
        "steal_ratio": _mean(host, "steal_ratio"),
        "pressure_cpu": _mean(host, "pressure_cpu_avg10"),
        "pressure_io": _mean(host, "pressure_io_avg10"),
        "pressure_memory": _mean(host, "pressure_memory_avg10"),
    }
    return tuple(
        Gate(name=name, seen=value, limit=getattr(limits, name), where=where)
        for name, value in seen.items()
        if value is not None
    )


def gpu_gates(old: Sequence[Event], new: Sequence[Event], limits: GateLimits) -> tuple[Gate, ...]:
    """Compare clocks and throttle reasons of every GPU between the blocks of A and of B; no gate without a GPU."""
    gates: list[Gate] = []
    samples = [[event.data for event in events if event.kind is EventKind.GPU] for events in (old, new)]
    for index in sorted({data["index"] for part in samples for data in part}):
        of_arm = [[data for data in part if data["index"] == index] for part in samples]
        where = f"GPU {index}, B against A"
        clocks = [[data["clock_mhz"] for data in part if data.get("clock_mhz")] for part in of_arm]
        if all(clocks):
            difference = abs(median(clocks[1]) / median(clocks[0]) - 1)
            gates.append(Gate(name="clock_difference", seen=difference, limit=limits.clock_difference, where=where))
        if not all(of_arm):
            gates.append(Gate(name="clock_difference", seen=math.inf, limit=limits.clock_difference, where=where))
            continue
        for reason in sorted({reason for part in of_arm for data in part for reason in data.get("throttle") or ()}):
            shares = [fmean(reason in (data.get("throttle") or ()) for data in part) for part in of_arm]
            gates.append(
                Gate(
                    name="throttle_difference",
                    seen=abs(shares[1] - shares[0]),
                    limit=limits.throttle_difference,
                    where=f"{where}, {reason}",
                )
            )
    return tuple(gates)


def is_drifting(records: Records) -> bool:
    """Say whether the time to first token follows the time of day within a block, by Spearman's rank correlation."""
    from scipy.stats import spearmanr  # type: ignore[import-untyped,unused-ignore]

    ttft_s = latencies(records).ttft_s
    answered = np.isfinite(ttft_s)
    if answered.sum() < DRIFT_REQUESTS_MIN or np.ptp(ttft_s[answered]) == 0:
        return False
    found = spearmanr(records.planned_ns[answered], ttft_s[answered])
    return bool(abs(found.statistic) > DRIFT_RHO and found.pvalue < DRIFT_P)


def _mean(samples: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [float(sample[name]) for sample in samples if sample.get(name) is not None]
    return fmean(values) if values else None
