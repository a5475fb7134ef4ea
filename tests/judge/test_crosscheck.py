"""The server's histograms agree with the loader, or a note says where they do not."""

from __future__ import annotations

from harness.judge.crosscheck import cross_check
from harness.judge.records import joined
from harness.observe.metrics import HistogramSample, pick_histograms
from tests.judge.measured import records, request, steady

ROWS = steady([50.0] * 100)  # gaps of 10 ms, 5 tokens: 90 ms in all

PAGE = """
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.1"} 90.0
vllm:time_to_first_token_seconds_count{engine="0"} 60.0
vllm:time_to_first_token_seconds_sum{engine="0"} 3.0
vllm:time_to_first_token_seconds_count{engine="1"} 40.0
vllm:time_to_first_token_seconds_sum{engine="1"} 1.9
vllm:time_per_output_token_seconds_count 7.0
vllm:time_per_output_token_seconds_sum 7.0
vllm:inter_token_latency_seconds_count 400.0
vllm:inter_token_latency_seconds_sum 4.0
vllm:e2e_request_latency_seconds_count 100.0
vllm:e2e_request_latency_seconds_sum 8.9
vllm:request_queue_time_seconds_count 100.0
"""


def sample(count: float, mean_s: float) -> HistogramSample:
    return HistogramSample(count=count, sum=count * mean_s)


def test_histograms_are_read_under_short_names() -> None:
    seen = pick_histograms(PAGE)
    assert sorted(seen) == ["e2e", "gap", "ttft"]  # of the queue there is no sum
    assert seen["ttft"] == HistogramSample(count=100.0, sum=4.9)
    assert seen["gap"] == HistogramSample(count=400.0, sum=4.0)  # the newer name wins


def test_server_that_agrees_gives_no_note() -> None:
    assert cross_check(ROWS, {}, pick_histograms(PAGE)) == ()
    assert cross_check(ROWS, {}, {}) == ()


def test_each_disagreement_is_a_note() -> None:
    def notes(after: HistogramSample, before: HistogramSample | None = None) -> tuple[str, ...]:
        return cross_check(ROWS, {} if before is None else {"ttft": before}, {"ttft": after})

    assert notes(sample(100, 0.020)) == (
        "time to first token: 50.0 ms on average by the loader, 20.0 ms by the server (+150%)",
    )
    assert "60.0 ms by the server (-17%)" in notes(sample(100, 0.060))[0]
    assert notes(sample(130, 0.049)) == ("time to first token: the server counted 130 requests, the loader 100",)
    earlier = sample(1000, 0.5)
    after = HistogramSample(count=1100, sum=earlier.sum + 4.9)
    assert notes(after, earlier) == ()
    assert "counted nothing (restarted in between?)" in notes(sample(5, 0.05), earlier)[0]


def test_canaries_in_between_are_counted_as_a_server_counts_them() -> None:
    asked = records(*(request(20.0 + n, ttft_ms=30.0, tokens=1, kind="canary", number=n) for n in range(10)))
    rows = joined([ROWS, asked])
    server = {
        "ttft": HistogramSample(count=120, sum=100 * 0.049 + 20 * 0.029),  # two prompts each
        "e2e": HistogramSample(count=120, sum=100 * 0.089 + 20 * 0.029),
        "gap": sample(400, 0.010),
    }
    assert cross_check(rows, {}, server) == ()
    assert "the server counted 120 requests, the loader 100" in cross_check(ROWS, {}, server)[0]
