"""Counters, gauges and histograms in the Prometheus text format, under vLLM's names and with its buckets."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterator, Sequence

_FIRST_TOKEN_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
_TOKEN_BUCKETS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_REQUEST_BUCKETS_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
_ITERATION_BUCKETS_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Histogram:
    """Counts of observations per upper bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(float(bound) for bound in bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str, labels: str) -> Iterator[str]:
        """Yield the samples: one per bound, cumulative, then count and sum."""
        total = 0
        for bound, count in zip((*(str(bound) for bound in self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{{labels},le="{bound}"}} {float(total)}'
        yield f"{name}_count{{{labels}}} {float(total)}"
        yield f"{name}_sum{{{labels}}} {self._sum}"


class Metrics:
    """What one server counts; safe to use from several threads."""

    def __init__(self, model_name: str) -> None:
        quoted = model_name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        self._labels = f'engine="0",model_name="{quoted}"'
        self._lock = threading.Lock()
        self._running = 0
        self._waiting = 0
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._finished = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self._first_token = Histogram(_FIRST_TOKEN_BUCKETS_S)
        self._between_tokens = Histogram(_TOKEN_BUCKETS_S)
        self._request = Histogram(_REQUEST_BUCKETS_S)
        self._iteration = Histogram(_ITERATION_BUCKETS_TOKENS)

    def set_queue(self, *, running: int, waiting: int) -> None:
        """Record how many requests run and wait now."""
        with self._lock:
            self._running, self._waiting = running, waiting

    def count_iteration(self, *, prompt_tokens: int, generation_tokens: int) -> None:
        """Count the tokens of one pass over the running requests."""
        with self._lock:
            self._prompt_tokens += prompt_tokens
            self._generation_tokens += generation_tokens
            self._iteration.observe(prompt_tokens + generation_tokens)

    def observe_token(self, took_s: float, *, is_first: bool) -> None:
        """Count the time to a token: since the request arrived for the first, else since the one before."""
        with self._lock:
            (self._first_token if is_first else self._between_tokens).observe(took_s)

    def finish(self, reason: str, took_s: float) -> None:
        """Count a request that ended as `stop`, `length`, `abort` or `error`."""
        with self._lock:
            self._finished[reason] += 1
            self._request.observe(took_s)

    def exposition(self) -> str:
        """Return everything in the text format, version 0.0.4."""
        with self._lock:
            lines: list[str] = []
            simple = (
                ("num_requests_running", "gauge", self._running),
                ("num_requests_waiting", "gauge", self._waiting),
                ("prompt_tokens_total", "counter", self._prompt_tokens),
                ("generation_tokens_total", "counter", self._generation_tokens),
            )
            for name, kind, value in simple:
                lines += [f"# TYPE vllm:{name} {kind}", f"vllm:{name}{{{self._labels}}} {float(value)}"]
            lines.append("# TYPE vllm:request_success_total counter")
            for reason, count in self._finished.items():
                labels = f'{self._labels},finished_reason="{reason}"'
                lines.append(f"vllm:request_success_total{{{labels}}} {float(count)}")
            histograms = (
                ("iteration_tokens_total", self._iteration),
                ("time_to_first_token_seconds", self._first_token),
                ("inter_token_latency_seconds", self._between_tokens),
                ("e2e_request_latency_seconds", self._request),
            )
            for name, histogram in histograms:
                lines.append(f"# TYPE vllm:{name} histogram")
                lines.extend(histogram.lines(f"vllm:{name}", self._labels))
        return "\n".join(lines) + "\n"
