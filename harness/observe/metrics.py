"""Read an engine's Prometheus metrics: the few that say whether it works, under short names."""

from __future__ import annotations

import http.client
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from harness.clock import Deadline

BODY_BYTES_MAX = 8 * 1024**2
_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?$")
_LABEL = re.compile(r'\s*([A-Za-z_]\w*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(?:,|$)')
_ESCAPES = {"n": "\n", "\\": "\\", '"': '"'}

# Exposed name to short name. Counters end in `_total` since 0.8; histograms count engine steps in `_count`.
_WANTED = {
    "vllm:num_requests_running": "num_requests_running",
    "vllm:num_requests_waiting": "num_requests_waiting",
    "vllm:iteration_tokens_total_count": "engine_steps",
    "vllm:iteration_tokens_total_sum": "iteration_tokens_total",
    "vllm:generation_tokens_total": "generation_tokens_total",
    "vllm:kv_cache_usage_perc": "kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc": "kv_cache_usage_perc",  # until 0.10
    "vllm:prefix_cache_queries_total": "prefix_cache_queries",
    "vllm:prefix_cache_queries": "prefix_cache_queries",
    "vllm:prefix_cache_hits_total": "prefix_cache_hits",
    "vllm:prefix_cache_hits": "prefix_cache_hits",
    "vllm:corrupted_requests_total": "corrupted_requests",
    "vllm:corrupted_requests": "corrupted_requests",
    "vllm:request_success_total": "request_success",
    "process_start_time_seconds": "process_start_time_seconds",  # another process on the same port shows here
}
_BY_LABEL = {"vllm:request_success_total": "finished_reason"}

# Histograms of latencies; the later name of two replaces the earlier one where both are there.
_HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": "ttft",
    "vllm:time_per_output_token_seconds": "gap",  # until 0.10
    "vllm:inter_token_latency_seconds": "gap",
    "vllm:e2e_request_latency_seconds": "e2e",
    "vllm:request_queue_time_seconds": "queue",
    "vllm:request_prefill_time_seconds": "prefill",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One line of the text format."""

    name: str
    labels: dict[str, str]
    value: float


def parse(text: str) -> Iterator[Sample]:
    """Yield the samples of a page in the Prometheus text format; lines that are none are left out."""
    for line in text.split("\n"):
        found = _SAMPLE.match(line.strip())
        if found is None:
            continue
        name, labels, value = found.groups()
        try:
            number = float(value)
        except ValueError:
            continue
        yield Sample(name=name, labels=_labels(labels or ""), value=number)


def pick(text: str) -> dict[str, float]:
    """Return vLLM's figures under short names, summed over engines; not finite and absent ones are left out.

    `request_success` is the sum; each reason is also there as `request_success_<reason>`.
    """
    values: dict[str, float] = {}
    for sample in parse(text):
        short = _WANTED.get(sample.name)
        if short is None or not math.isfinite(sample.value):
            continue
        values[short] = values.get(short, 0.0) + sample.value
        reason = sample.labels.get(_BY_LABEL.get(sample.name, ""), "")
        if re.fullmatch(r"[a-z_]{1,30}", reason):
            values[f"{short}_{reason}"] = values.get(f"{short}_{reason}", 0.0) + sample.value
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class HistogramSample:
    """A latency histogram at one time: how many observations, and their sum in seconds."""

    count: float
    sum: float

    def since(self, before: HistogramSample | None) -> HistogramSample:
        """Return what was observed since an earlier sample."""
        if before is None:
            return self
        return HistogramSample(count=self.count - before.count, sum=self.sum - before.sum)


def pick_histograms(text: str) -> dict[str, HistogramSample]:
    """Return vLLM's latency histograms under short names (ttft, gap, e2e, queue, prefill), summed over engines."""
    sums: dict[tuple[str, str], float] = {}
    for sample in parse(text):
        base, _, part = sample.name.rpartition("_")
        if base in _HISTOGRAMS and part in ("count", "sum") and math.isfinite(sample.value):
            sums[base, part] = sums.get((base, part), 0.0) + sample.value
    return {
        short: HistogramSample(count=sums[name, "count"], sum=sums[name, "sum"])
        for name, short in _HISTOGRAMS.items()
        if (name, "count") in sums and (name, "sum") in sums
    }


def scrape(endpoint: str, *, api_key: str | None = None, limit_s: float = 2.0) -> dict[str, float]:
    """Ask an engine for `/metrics` once, without retries, and return what `pick` finds.

    Raises: OSError for transport faults and timeouts, ValueError for anything but a 200 of bearable size.
    """
    return pick(read_page(endpoint, api_key=api_key, limit_s=limit_s))


def read_page(endpoint: str, *, api_key: str | None = None, limit_s: float = 2.0) -> str:
    """Ask an engine for `/metrics` once, without retries, and return the page.

    Raises: OSError for transport faults and timeouts, ValueError for anything but a 200 of bearable size.
    """
    parts = urlsplit(endpoint)
    connection_type = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = connection_type(parts.hostname or "", parts.port, timeout=limit_s)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    deadline = Deadline.after(limit_s)
    try:
        connection.request("GET", f"{parts.path.rstrip('/')}/metrics", headers=headers)
        response = connection.getresponse()
        body = _read(response, deadline)
    except http.client.HTTPException as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
    finally:
        connection.close()
    if response.status != 200:
        raise ValueError(f"/metrics answered HTTP {response.status}, expected 200")
    return body.decode("utf-8", "replace")


def _read(response: http.client.HTTPResponse, deadline: Deadline) -> bytes:
    """Read a body; the socket's own limit is per packet, so a server that drips would never run into it."""
    body = b""
    while chunk := response.read1(65_536):
        body += chunk
        if len(body) > BODY_BYTES_MAX:
            raise ValueError(f"/metrics is longer than {BODY_BYTES_MAX:,} bytes")
        if deadline.is_expired():
            raise TimeoutError(f"/metrics was not read within {deadline.limit_s:g} s ({len(body):,} bytes came)")
    return body


def _labels(text: str) -> dict[str, str]:
    return {
        name: re.sub(r"\\(.)", lambda found: _ESCAPES.get(found.group(1), found.group(0)), value)
        for name, value in _LABEL.findall(text)
    }
