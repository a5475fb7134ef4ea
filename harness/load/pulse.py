"""How well a loader keeps up: how late its timers are, and a heartbeat every second. Imported under gevent alone."""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import gevent
from gevent.event import Event

from harness.clock import NS_PER_S, now_ns

TICK_S = 0.005  # how late this timer is says how late everything is that happens in this process
HEARTBEAT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What a loader has done since it began, and its largest lag since it was asked last."""

    dispatched: int
    ended: int
    in_flight: int  # now
    lag_ms_max: float


class Pulse:
    """Measures one loader from `begin` on."""

    def __init__(self, path: Path, *, loader: int, counted: Callable[[], Counted]) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._loader = loader
        self._counted = counted
        self._loop_lag_ms = array("d")
        self._begun_ns = 0
        self._begun_cpu_s = 0.0

    def begin(self, finished: Event) -> gevent.Greenlet[..., None]:
        """Start to measure, until `finished`; return the greenlet that does it."""
        self._begun_ns, self._begun_cpu_s = now_ns(), time.process_time()
        return gevent.spawn(self._beat, finished)

    def report(self) -> dict[str, float]:
        """Return how late timers were and how much of a core was used, from the beginning on."""
        elapsed_s = (now_ns() - self._begun_ns) / NS_PER_S
        loop_lags = sorted(self._loop_lag_ms)
        return {
            "loop_lag_ms_p99": _quantile(loop_lags, 0.99),
            "loop_lag_ms_max": _quantile(loop_lags, 1.0),
            "cpu_ratio": (time.process_time() - self._begun_cpu_s) / max(elapsed_s, 1e-9),
        }

    def _beat(self, finished: Event) -> None:
        last_ns, last_cpu_s, first = now_ns(), time.process_time(), 0
        before = Counted(dispatched=0, ended=0, in_flight=0, lag_ms_max=0.0)
        with self._file:
            while not finished.is_set():
                expected_ns = now_ns() + round(TICK_S * NS_PER_S)
                gevent.sleep(TICK_S)
                at_ns = now_ns()
                self._loop_lag_ms.append((at_ns - expected_ns) / 1e6)
                passed_s = (at_ns - last_ns) / NS_PER_S
                if passed_s < HEARTBEAT_S:
                    continue
                cpu_s, counted = time.process_time(), self._counted()
                loop_lags = sorted(self._loop_lag_ms[first:])
                heartbeat = {
                    "loader": self._loader,
                    "at_ns": at_ns,
                    "dispatched": counted.dispatched - before.dispatched,
                    "ended": counted.ended - before.ended,
                    "in_flight": counted.in_flight,
                    "lag_ms_max": counted.lag_ms_max,
                    "loop_lag_ms_p99": _quantile(loop_lags, 0.99),
                    "loop_lag_ms_max": _quantile(loop_lags, 1.0),
                    "cpu_ratio": (cpu_s - last_cpu_s) / passed_s,
                }
                self._file.write(json.dumps(heartbeat) + "\n")
                self._file.flush()
                last_ns, last_cpu_s, first, before = at_ns, cpu_s, len(self._loop_lag_ms), counted


def _quantile(ordered: Sequence[float], q: float) -> float:
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else 0.0
