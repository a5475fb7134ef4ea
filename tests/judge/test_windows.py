"""Metrics of a window: defined times, failures that stay in, and columns that survive the disk."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import HarnessError, ScenarioInvalid, UsageError
from harness.judge.records import CLASSES, Records, joined
from harness.judge.slo import Slo, parse_slo
from harness.judge.windows import FUNCTIONALS, availability, goodput_ratio, is_coalesced, latencies, quantile, spike
from harness.observe.history import RequestResult
from tests.judge.measured import records, request, steady


def test_latencies_count_from_plan_and_from_send() -> None:
    seen = latencies(records(request(1.0, ttft_ms=40, gap_ms=10, tokens=5, late_ms=7)))
    assert seen.ttft_s[0] == pytest.approx(0.047)
    assert seen.ttft_sent_s[0] == pytest.approx(0.040)
    assert seen.e2e_s[0] == pytest.approx(0.087)
    assert seen.e2e_sent_s[0] == pytest.approx(0.080)
    assert seen.tpot_s[0] == pytest.approx(0.010)
    assert seen.gap_s == pytest.approx([0.010] * 4)


def test_largest_gap_is_within_a_request_never_between_two() -> None:
    stalled = request(2.0, number=1)
    stalled = replace(stalled, token_ns=(*stalled.token_ns[:3], *(t + 900_000_000 for t in stalled.token_ns[3:])))
    rows = records(request(1.0), stalled, request(50.0, number=2), request(60.0, tokens=1, number=3))
    seen = latencies(rows)
    assert seen.max_gap_s == pytest.approx([0.01, 0.91, 0.01])  # one token has no gap
    assert len(seen.gap_s) == 12
    assert seen.gap_s.max() == pytest.approx(0.91)


def test_failed_requests_are_infinitely_slow() -> None:
    rows = steady([50.0] * 19 + [60.0])
    failed = joined([rows, records(request(9.0, result="reset"), request(9.1, result="stall", number=1))])
    assert FUNCTIONALS["ttft_ms_p95"](latencies(rows)) == pytest.approx(50)
    assert FUNCTIONALS["ttft_ms_p95"](latencies(failed)) == math.inf  # 2 of 22 are more than 5 %
    assert FUNCTIONALS["ttft_ms_p50"](latencies(failed)) == pytest.approx(50)
    seen = latencies(failed)
    for values in (seen.ttft_s, seen.ttft_sent_s, seen.e2e_s, seen.e2e_sent_s, seen.tpot_s, seen.max_gap_s):
        assert np.isinf(values).sum() == 2
    assert math.isnan(quantile(np.empty(0), 0.5))


def test_what_is_not_the_engines_is_left_out() -> None:
    rows = records(
        request(1.0), request(1.1, result="dropped"), request(1.2, result="late"), request(1.3, kind="canary")
    )
    assert len(rows.of_users()) == 1
    assert rows.counts()[RequestResult.DROPPED] == 1


@given(st.lists(st.floats(0.001, 100), min_size=1, max_size=60), st.integers(1, 30), st.sampled_from([0.5, 0.95, 0.99]))
def test_adding_failures_never_lowers_a_quantile(values: list[float], failures: int, q: float) -> None:
    few = np.array(values)
    more = np.append(few, [math.inf] * failures)
    assert quantile(more, q) >= quantile(few, q)


@given(
    st.lists(st.tuples(st.integers(1, 2000), st.integers(1, 200)), min_size=4, max_size=30),
    st.sampled_from([2, 3, 10]),
)
def test_scaling_all_latencies_scales_every_metric(rows: list[tuple[int, int]], c: int) -> None:
    def measured(factor: int) -> dict[str, float]:
        seen = latencies(
            Records.of(
                request(float(n), ttft_ms=factor * ttft, gap_ms=factor * gap, number=n)
                for n, (ttft, gap) in enumerate(rows)
            )
        )
        return {name: measure(seen) for name, measure in FUNCTIONALS.items()}

    once, scaled = measured(1), measured(c)
    for name, value in once.items():
        assert scaled[name] == pytest.approx(c * value), name


def test_goodput_counts_planned_arrivals() -> None:
    rows = records(
        request(1.0, ttft_ms=50, gap_ms=10),
        request(1.1, ttft_ms=250, gap_ms=10, number=1),
        request(1.2, ttft_ms=50, gap_ms=80, number=2),
        request(1.3, result="reset", number=3),
    )
    assert goodput_ratio(rows, Slo(ttft_ms=200)) == 0.5
    assert goodput_ratio(rows, Slo(ttft_ms=200, tpot_ms=40)) == 0.25
    assert goodput_ratio(rows, Slo(e2e_ms=1000)) == 0.75
    assert math.isnan(goodput_ratio(rows.between(0, 1), Slo(e2e_ms=1000)))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ttft=200", 'slo "ttft=200" has no unit: write ttft_ms=200'),
        ("ttft_s=1", 'slo "ttft_s=1" is unknown; limits: ttft_ms, tpot_ms, e2e_ms'),
        ("ttft_ms=soon", 'slo ttft_ms must be a number of milliseconds, got "soon"'),
        ("ttft_ms=0", "slo ttft_ms is 0.0: it must be a number of milliseconds above zero"),
        ("e2e_ms=nan", "slo e2e_ms is nan"),
    ],
)
def test_slo_that_cannot_be_used_is_named(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said.replace("(", r"\(")):
        parse_slo(text)


def test_slo_of_nothing_or_of_what_is_no_time_is_refused() -> None:
    with pytest.raises(ScenarioInvalid, match="sets no limit"):
        Slo()
    with pytest.raises(ScenarioInvalid, match="tpot_ms is -1"):
        Slo(tpot_ms=-1)
    assert parse_slo("ttft_ms=200, e2e_ms=2000") == Slo(ttft_ms=200, e2e_ms=2000)


def test_availability_in_bins_of_a_second() -> None:
    made = []
    for second in range(20):
        for part in range(4):
            fails = second in (4, 5, 6) or (second == 8 and part == 0)
            result = "refused" if fails else "ok"
            made.append(request(second + part / 4, result=result, number=4 * second + part))
    seen = availability(records(*made))
    assert seen.longest_outage_s == 3.0
    assert seen.failed_bins == 4
    assert seen.good_bins_ratio == pytest.approx(16 / 20)
    assert seen.recovered_after_s == 5.0  # from second 4 to second 9, the first of five good ones
    never = availability(records(*made[:40]))
    assert never.recovered_after_s is None
    assert availability(steady([50.0] * 40)).recovered_after_s == 0.0


def test_spike_has_a_peak_a_duration_and_a_debt() -> None:
    before = steady([100.0] * 50)
    during = steady([100.0] * 40 + [400.0] * 20 + [100.0] * 40, start_s=5.0)
    seen = spike(before, during)
    assert seen is not None
    assert seen.peak_ratio == pytest.approx(4.0)
    assert seen.slow_s == 2.0
    assert seen.debt_s == pytest.approx(20 * (0.4 - 0.13))
    away = spike(before, steady([100.0] * 40, start_s=5.0, result="refused"))
    assert away is not None
    assert (away.peak_ratio, away.failed) == (math.inf, 40)
    assert spike(before, before.between(0, 0)) is None
    assert spike(before.between(0, 0), during) is None


def test_several_tokens_in_one_event_are_seen() -> None:
    rows = steady([50.0] * 4)
    assert not is_coalesced(rows)
    assert is_coalesced(replace(rows, output_tokens=rows.output_tokens * 2))


def test_records_survive_the_disk(tmp_path: Path) -> None:
    rows = records(request(1.0), request(2.0, result="refused", number=1), request(3.0, kind="canary"))
    rows.save(tmp_path / "records.npz")
    again = Records.load(tmp_path / "records.npz")
    for name in Records.__slots__:
        assert np.array_equal(getattr(rows, name), getattr(again, name)), name
    assert again.counts() == rows.counts()
    assert [CLASSES[code] for code in again.result] == ["ok", "refused", "ok"]


NPY = b"\x93NUMPY\x01\x00v\x00{'descr': '<i8', 'fortran_order': False, 'shape': (1,), }".ljust(127) + b"\n" + bytes(8)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"no zip at all", NPY, None])
def test_file_that_holds_no_records_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "records.npz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(HarnessError, match=r'records.npz" does not hold records of requests'):
        Records.load(path)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("planned_ns", np.zeros(3, np.int64)),
        ("token_counts", np.array([99, 0])),
        ("token_counts", np.array([-5, 10])),
        ("sent_ns", np.array([1.5, 2.5])),
        ("result", np.array([250, 0], np.uint8)),
        ("classes", np.array(["ok", "unheard_of"])),
        ("ended_ns", np.array([{}, {}], dtype=object)),
    ],
)
def test_columns_that_do_not_fit_are_refused(tmp_path: Path, column: str, value: np.ndarray) -> None:
    records(request(1.0), request(2.0, number=1)).save(tmp_path / "good.npz")
    with np.load(tmp_path / "good.npz") as good:
        columns = {**good, column: value}
    np.savez(tmp_path / "bad.npz", **columns)
    with pytest.raises(HarnessError, match="does not hold records"):
        Records.load(tmp_path / "bad.npz")
