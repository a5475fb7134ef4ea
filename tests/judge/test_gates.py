"""Each gate fails on what it is there for, and says what was seen and what is allowed."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from harness.errors import UsageError
from harness.judge.failures import judge_failures
from harness.judge.gates import GateLimits, block_gates, gpu_gates, is_drifting, lag_of_margin
from harness.judge.paired import Slower
from harness.judge.records import joined
from harness.judge.spike import judge_spikes, rollout_spike
from harness.observe.history import Event, EventKind, RequestResult
from tests.judge.histories import event, history
from tests.judge.measured import GOOD, QUIET, noisy, records, request, steady

MARGIN = 0.05


def failed(report: dict[str, Any], host: dict[str, float | None], rows: Any = None) -> list[str]:
    events: list[Event] = [event(1.0, EventKind.HOST, **host), event(2.0, EventKind.HOST, **host)]
    rows = steady([50.0] * 30) if rows is None else rows
    share = lag_of_margin(rows.of_users(), ("ttft_ms_p50", "tpot_ms_p50"), MARGIN)
    gates = block_gates(
        rows, events, {**GOOD, **report}, lag_of_margin=share, limits=GateLimits(), where="block 003-new"
    )
    return [gate.sentence() for gate in gates if not gate.passed]


@pytest.mark.parametrize(
    ("report", "host", "said"),
    [
        ({"lag_ms_p99": 6.0}, {}, "lag_ms_p99 is 6 in block 003-new, limit 5"),
        ({"lag_ms_max": 51.0}, {}, "lag_ms_max is 51"),
        ({"loop_lag_ms_p99": 8.0}, {}, "loop_lag_ms_p99 is 8"),
        ({"achieved_ratio": 0.98}, {}, "unsent_ratio is 0.02"),
        ({"cpu_ratio": 0.55}, {}, "loader_cpu_ratio is 0.55"),
        ({"cpu_ratio_max": 0.9}, {}, "loader_cpu_ratio_max is 0.9"),
        ({"planned_events_per_s": 12_000.0, "loaders": 2}, {}, "events_per_s is 6000"),
        ({"lag_ms_p99": math.nan}, {}, "lag_ms_p99 is nan"),
        ({}, {"steal_ratio": 0.1}, "steal_ratio is 0.1"),
        ({}, {"pressure_cpu_avg10": 80.0}, "pressure_cpu is 80"),
        ({}, {"pressure_io_avg10": 30.0}, "pressure_io is 30"),
        ({}, {"pressure_memory_avg10": 9.0}, "pressure_memory is 9"),
    ],
)
def test_each_gate_fails_alone(report: dict[str, Any], host: dict[str, float], said: str) -> None:
    sentences = failed(report, {**QUIET, **host})
    assert [sentence.startswith(said) for sentence in sentences] == [True], sentences


def test_lag_that_moves_what_decides_by_more_than_half_the_margin_fails() -> None:
    assert failed({}, QUIET, steady([50.0] * 30, late_ms=1.2)) == []
    assert failed({}, QUIET, steady([50.0] * 30, late_ms=1.3)) == ["lag_of_margin is 0.52 in block 003-new, limit 0.5"]


def test_lag_is_seen_where_it_decides() -> None:
    """The latest tenth of the requests moves a p95 and no median; what fails has no latency to be moved."""
    mostly = joined([steady([50.0] * 27), steady([50.0] * 3, start_s=9.0, late_ms=10.0)])
    assert lag_of_margin(mostly, ("ttft_ms_p50", "tpot_ms_p50"), MARGIN) == 0.0
    assert lag_of_margin(mostly, ("ttft_ms_p50", "ttft_ms_p95"), MARGIN) == pytest.approx(0.2 / MARGIN)
    assert lag_of_margin(mostly, ("ttft_ms_p50", "e2e_ms_p95"), MARGIN) == pytest.approx(10 / 90 / MARGIN)
    assert lag_of_margin(steady([50.0] * 3, result="deadline"), ("ttft_ms_p50",), MARGIN) == 0.0
    assert lag_of_margin(records(), ("ttft_ms_p50",), MARGIN) == 0.0
    sent_later = replace(mostly, sent_ns=mostly.sent_ns + 5_000_000)  # what is sent slowly is not lag
    assert lag_of_margin(sent_later, ("ttft_ms_p50",), MARGIN) == 0.0
    in_one_read = steady([50.0] * 3, gap_ms=0.0, late_ms=1.0)
    assert lag_of_margin(in_one_read, ("ttft_ms_p50", "tpot_ms_p50"), MARGIN) == pytest.approx(0.02 / MARGIN)


def test_nothing_wrong_passes_every_gate_also_where_the_kernel_tells_nothing() -> None:
    assert failed({}, QUIET) == []
    assert failed({}, dict.fromkeys(QUIET)) == []


@pytest.mark.parametrize("result", ["dropped", "late", "harness_bug"])
def test_one_arrival_of_ours_is_too_many(result: str) -> None:
    rows = joined([steady([50.0] * 30), records(request(9.0, result=result), request(9.1, kind="canary"))])
    assert failed({}, QUIET, rows) == ["dropped is 1 in block 003-new, limit 0"]


def gpu(clock_mhz: int | None, *throttle: str, index: int = 0) -> Event:
    return event(1.0, EventKind.GPU, index=index, clock_mhz=clock_mhz, throttle=list(throttle))


def test_clocks_and_throttle_reasons_are_equal_in_both_arms() -> None:
    limits = GateLimits()

    def wrong(old: list[Event], new: list[Event]) -> list[str]:
        return [gate.sentence() for gate in gpu_gates(old, new, limits) if not gate.passed]

    assert wrong([gpu(1980)] * 4, [gpu(1970)] * 4) == []
    assert wrong([], []) == []
    assert wrong([gpu(None)] * 4, [gpu(None)] * 4) == []
    assert wrong([gpu(1980)] * 4, [gpu(1500)] * 4) == ["clock_difference is 0.2424 in GPU 0, B against A, limit 0.02"]
    hot = wrong([gpu(1980)] * 4, [*[gpu(1980)] * 2, *[gpu(1980, "hardware_thermal")] * 2])
    assert hot == ["throttle_difference is 0.5 in GPU 0, B against A, hardware_thermal, limit 0.1"]
    assert wrong([gpu(1980, "power_cap")] * 4, [gpu(1980, "power_cap")] * 4) == []
    assert wrong([gpu(1980)] * 4, []) == ["clock_difference is inf in GPU 0, B against A, limit 0.02"]


def test_limits_are_changed_by_name() -> None:
    assert GateLimits().with_changes({"lag_ms_p99": 20.0}).lag_ms_p99 == 20.0
    with pytest.raises(UsageError, match='gate "lag" is unknown; gates: lag_ms_p99'):
        GateLimits().with_changes({"lag": 1.0})
    with pytest.raises(UsageError, match="limit of gate lag_ms_p99 is nan"):
        GateLimits().with_changes({"lag_ms_p99": math.nan})


def test_block_that_warms_up_drifts() -> None:
    noise = np.random.default_rng(1).normal(0, 1, 100)
    assert is_drifting(steady((100 - 0.2 * np.arange(100) + noise).tolist()))
    assert not is_drifting(steady((100 + noise).tolist()))
    assert not is_drifting(steady([100.0] * 100))
    assert not is_drifting(steady([1.0, 2.0, 3.0]))
    assert not is_drifting(steady([1.0] * 50, result="refused"))


OK, RESET, INBAND = RequestResult.OK, RequestResult.RESET, RequestResult.INBAND_ERROR


@pytest.mark.parametrize(
    ("old", "new", "answer", "said"),
    [
        ({OK: 1000}, {OK: 1000}, Slower.NO, "0 of 1000 requests to B failed, 0 of 1000 to A: at most 0.30%"),
        ({OK: 1000}, {OK: 999, INBAND: 1}, Slower.YES, "what must never happen did: (1 inband_error) from B"),
        ({OK: 999, INBAND: 1}, {OK: 1000}, Slower.NO, "1 of 1000 to A"),
        (
            {OK: 1000},
            {OK: 980, RESET: 20},
            Slower.YES,
            "20 of 1000 requests to B failed (20 reset), 0 of 1000 to A: more",
        ),
        ({OK: 980, RESET: 20}, {OK: 980, RESET: 20}, Slower.INCONCLUSIVE, "could be up to"),
        ({OK: 100}, {OK: 100}, Slower.INCONCLUSIVE, "could be up to 2.95%"),
        ({OK: 100}, {RESET: 100}, Slower.YES, "100 of 100"),
    ],
)
def test_failures_of_both_arms(
    old: dict[RequestResult, int], new: dict[RequestResult, int], answer: Slower, said: str
) -> None:
    seen = judge_failures(old, new, level=0.0025)
    assert seen.answer is answer
    assert said in seen.because.replace(":  (", ": (")


@pytest.mark.parametrize(
    ("peaks", "answer", "said"),
    [
        (noisy(0.8, 6, sd=0.05), Slower.YES, "budget 1.3; highest"),
        (noisy(0.05, 6, sd=0.05), Slower.NO, "6 rollouts"),
        (noisy(0.3, 6, sd=0.05), Slower.INCONCLUSIVE, "times the median before it"),
        ([1.1, 1.2, 1.1], Slower.INVALID, "3 rollouts are there, at least 4 are needed; highest 1.20"),
        ([], Slower.INVALID, "0 rollouts are there"),
        ([math.inf] * 3 + [1.1], Slower.YES, "in 3 of 4 rollouts most requests failed"),
        ([math.inf] + [1.1] * 4, Slower.INCONCLUSIVE, "in 1 of 5 rollouts"),
    ],
)
def test_spike_of_rollouts_apart_from_what_stays(peaks: list[float], answer: Slower, said: str) -> None:
    seen = judge_spikes(peaks)
    assert seen.answer is answer
    assert said in seen.because


def test_spike_is_read_from_a_history() -> None:
    def told(during_ms: float) -> Any:
        requests = [request(n / 10, ttft_ms=100 if n < 100 else during_ms, number=n) for n in range(200)]
        return history(
            *requests,
            event(0.0, EventKind.LOAD_STARTED),
            event(10.0, EventKind.ROLLOUT_STARTED, how="restart"),
            event(15.0, EventKind.REMEDY_STARTED),
            event(20.0, EventKind.LOAD_ENDED),
        )

    seen = rollout_spike(told(250.0))
    assert seen is not None
    assert seen.peak_ratio == pytest.approx(2.5)
    assert seen.slow_s == 5.0  # until the remedy
    calm = rollout_spike(told(101.0))
    assert calm is not None
    assert calm.slow_s == 0
    assert rollout_spike(history(request(1.0))) is None
