"""What loaders say of themselves: a heartbeat every second, and a report at the end."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.observe.history import RequestResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """What one loader says of itself once per second; everything counts since the heartbeat before."""

    loader: int
    at_ns: int
    dispatched: int
    ended: int
    in_flight: int  # now
    lag_ms_max: float  # dispatch minus planned start
    loop_lag_ms_p99: float  # how late a timer of 5 ms was
    loop_lag_ms_max: float
    cpu_ratio: float  # of one core


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """How well the loaders kept the plan; latencies say nothing unless they did. Of several loaders the worst counts."""

    planned: int  # arrivals due until the stop
    recorded: int
    dropped: int  # beyond the in-flight limit
    late: int  # taken up too late to be sent
    lag_ms_p50: float  # dispatch minus planned start
    lag_ms_p99: float
    lag_ms_max: float
    loop_lag_ms_p99: float  # how late a timer of 5 ms was
    loop_lag_ms_max: float
    cpu_ratio: float  # of one core
    cpu_ratio_max: float  # in any second
    achieved_ratio: float  # sent by the stop, of those due
    closed_while_idle: int  # kept connections that the engine closed before they were used again: no failure
    loaders: int
    exit_code: int


def summary(
    ended: Sequence[Mapping[str, Any]], *, planned: int, lag_ms: array[float], cpu_ratio_max: float
) -> LoadReport:
    """Return the report of several loaders: `ended` is what each said at its end, `lag_ms` has one value per dispatch."""
    lags = sorted(lag_ms)

    def lag(q: float) -> float:
        return lags[min(len(lags) - 1, int(q * len(lags)))] if lags else 0.0

    def total(name: str) -> int:
        return sum(int(each[name]) for each in ended)

    def worst(name: str) -> float:
        return max(float(each[name]) for each in ended)

    return LoadReport(
        planned=planned,
        recorded=total("recorded"),
        dropped=total(RequestResult.DROPPED),
        late=total(RequestResult.LATE),
        lag_ms_p50=lag(0.5),
        lag_ms_p99=lag(0.99),
        lag_ms_max=lag(1.0),
        loop_lag_ms_p99=worst("loop_lag_ms_p99"),
        loop_lag_ms_max=worst("loop_lag_ms_max"),
        cpu_ratio=worst("cpu_ratio"),
        cpu_ratio_max=max(cpu_ratio_max, worst("cpu_ratio")),
        achieved_ratio=total("on_time") / planned if planned else 1.0,
        closed_while_idle=total("closed_while_idle"),
        loaders=len(ended),
        exit_code=0,
    )
