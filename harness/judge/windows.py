"""What users saw in one window of time, from its records: latencies, goodput, availability, spike.

A request that failed is infinitely slow: leaving it out would make an engine that drops its slowest requests look fast.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from harness.clock import NS_PER_S
from harness.judge.records import Floats, Mask, Records
from harness.judge.slo import Slo

BIN_S = 1.0
GOOD_BINS_IN_A_ROW = 5  # that many seconds without a failure, and service is back
PEAK_WINDOW_S = 2.0
SPIKE_FACTOR = 1.3
COALESCED_BELOW = 0.95  # fewer events than this share of the tokens: a gap between events is not one between tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Latencies:
    """Seconds, one per arrival; infinite where the request failed.

    `tpot_s` and `max_gap_s` leave out answers of fewer than two tokens, for which there is no such time. `gap_s` has one
    value per pair of tokens of the answered requests: nobody knows how many gaps a failed one would have had.
    """

    ttft_s: Floats  # from the planned start to the first token
    ttft_sent_s: Floats  # from the send
    e2e_s: Floats  # from the planned start to the last token
    e2e_sent_s: Floats
    tpot_s: Floats
    max_gap_s: Floats
    gap_s: Floats


def latencies(records: Records) -> Latencies:
    """Return the latencies of users' requests; give `records.of_users()`."""
    ok = records.is_ok
    last_ns = records.last_token_ns
    several = ok & (records.token_counts > 1) & (records.output_tokens > 1)
    spans_s = (last_ns - records.first_token_ns) / NS_PER_S
    with np.errstate(divide="ignore", invalid="ignore"):
        tpot_s = spans_s / (records.output_tokens - 1)
    gap_ns, max_gap_s = _gaps(records)
    judged = several | ~ok
    return Latencies(
        ttft_s=_since(records.planned_ns, records.first_token_ns, ok),
        ttft_sent_s=_since(records.sent_ns, records.first_token_ns, ok),
        e2e_s=_since(records.planned_ns, last_ns, ok),
        e2e_sent_s=_since(records.sent_ns, last_ns, ok),
        tpot_s=np.where(ok, tpot_s, math.inf)[judged],
        max_gap_s=np.where(ok, max_gap_s, math.inf)[judged],
        gap_s=gap_ns,
    )


def quantile(values: Floats, q: float) -> float:
    """Return the smallest value that at least the share `q` of the values does not exceed; not a number without any.

    One of the values themselves, so infinite ones never mix with finite ones.
    """
    if not len(values):
        return math.nan
    # Rounded first: 0.95 * 100 is a hair above 95 in binary, which would skip one value.
    rank = min(max(math.ceil(round(q * len(values), 9)) - 1, 0), len(values) - 1)
    return float(np.partition(values, rank)[rank])


# What blocks are compared by: each a single positive number of milliseconds.
FUNCTIONALS: dict[str, Callable[[Latencies], float]] = {
    "ttft_ms_p50": lambda seen: 1e3 * quantile(seen.ttft_s, 0.5),
    "tpot_ms_p50": lambda seen: 1e3 * quantile(seen.tpot_s, 0.5),
    "ttft_ms_p95": lambda seen: 1e3 * quantile(seen.ttft_s, 0.95),
    "e2e_ms_p95": lambda seen: 1e3 * quantile(seen.e2e_s, 0.95),
    "e2e_ms_p50": lambda seen: 1e3 * quantile(seen.e2e_s, 0.5),
    "ttft_sent_ms_p50": lambda seen: 1e3 * quantile(seen.ttft_sent_s, 0.5),
    "e2e_sent_ms_p50": lambda seen: 1e3 * quantile(seen.e2e_sent_s, 0.5),
    "gap_ms_p50": lambda seen: 1e3 * quantile(seen.gap_s, 0.5),
    "gap_ms_p99": lambda seen: 1e3 * quantile(seen.gap_s, 0.99),
    "max_gap_ms_p95": lambda seen: 1e3 * quantile(seen.max_gap_s, 0.95),
    "ttft_ms_p99": lambda seen: 1e3 * quantile(seen.ttft_s, 0.99),
    "e2e_ms_p99": lambda seen: 1e3 * quantile(seen.e2e_s, 0.99),
}


def is_coalesced(records: Records) -> bool:
    """Say whether several tokens came in one event: then gaps between tokens mean little, time per token still does."""
    tokens = int(records.output_tokens[records.is_ok].sum())
    return tokens > 0 and int(records.token_counts[records.is_ok].sum()) < COALESCED_BELOW * tokens


def goodput_ratio(records: Records, slo: Slo) -> float:
    """Return the share of the planned arrivals that were answered in full within every limit."""
    if not len(records):
        return math.nan
    good: Mask = records.is_ok.copy()
    last_ns = records.last_token_ns
    if slo.ttft_ms is not None:
        good &= (records.first_token_ns - records.planned_ns) <= slo.ttft_ms * 1e6
    if slo.e2e_ms is not None:
        good &= (last_ns - records.planned_ns) <= slo.e2e_ms * 1e6
    if slo.tpot_ms is not None:
        steps = np.maximum(records.output_tokens - 1, 1)
        good &= (last_ns - records.first_token_ns) <= slo.tpot_ms * 1e6 * steps
    return float(good.mean())


@dataclass(frozen=True, slots=True, kw_only=True)
class Availability:
    """How long service was away, in bins of one second by planned start; bins without arrivals say nothing."""

    good_bins_ratio: float  # bins in which every request was answered
    longest_outage_s: float  # from the first to the last of the bins in a row in which none was
    recovered_after_s: float | None  # from the first bin with a failure to the first of five good ones; None: never
    failed_bins: int


def availability(records: Records) -> Availability:
    """Say when users' requests were answered; give `records.of_users()`."""
    if not len(records):
        return Availability(good_bins_ratio=math.nan, longest_outage_s=0.0, recovered_after_s=None, failed_bins=0)
    bins = ((records.planned_ns - records.planned_ns[0]) // round(BIN_S * NS_PER_S)).astype(np.int64)
    present, inverse = np.unique(bins, return_inverse=True)
    planned = np.bincount(inverse)
    answered = np.bincount(inverse, weights=records.is_ok)
    good, none = answered == planned, answered == 0
    longest_s, began = 0.0, None
    for number, is_out in zip(present, none, strict=True):
        began = (number if began is None else began) if is_out else None
        if began is not None:
            longest_s = max(longest_s, (number - began + 1) * BIN_S)
    return Availability(
        good_bins_ratio=float(good.mean()),
        longest_outage_s=float(longest_s),
        recovered_after_s=_recovered_after_s(present, good),
        failed_bins=int((~good).sum()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Spike:
    """How much slower a transition was than the time before it, by the time to first token."""

    baseline_ms: float  # median before
    peak_ratio: float  # highest median of 2 s, as a multiple of the baseline; infinite when most of them failed
    slow_s: float  # seconds whose median is above 1.3 times the baseline
    debt_s: float  # seconds that answered users waited beyond 1.3 times the baseline, summed
    failed: int  # requests that were not answered: they are in no sum of seconds


def spike(before: Records, during: Records) -> Spike | None:
    """Compare a transition with the time before it; None when one of them has no requests or was not answered at all."""
    baseline_s = quantile(latencies(before).ttft_s, 0.5)
    if not len(during) or not math.isfinite(baseline_s) or baseline_s <= 0:
        return None
    ttft_s = latencies(during).ttft_s
    since_s = (during.planned_ns - during.planned_ns[0]) / NS_PER_S
    peaks = [quantile(part, 0.5) for part in _bins(since_s, ttft_s, PEAK_WINDOW_S)]
    limit_s = SPIKE_FACTOR * baseline_s
    slow = [quantile(part, 0.5) > limit_s for part in _bins(since_s, ttft_s, BIN_S)]
    answered = ttft_s[np.isfinite(ttft_s)]
    return Spike(
        baseline_ms=1e3 * baseline_s,
        peak_ratio=max(peaks) / baseline_s,
        slow_s=sum(slow) * BIN_S,
        debt_s=float(np.maximum(answered - limit_s, 0).sum()),
        failed=int((~during.is_ok).sum()),
    )


def _since(start_ns: np.ndarray, end_ns: np.ndarray, ok: Mask) -> Floats:
    return np.where(ok, (end_ns - start_ns) / NS_PER_S, math.inf)


def _gaps(records: Records) -> tuple[Floats, Floats]:
    """Return the gaps between tokens of answered requests, and the largest of every request; seconds."""
    counts = records.token_counts
    largest = np.zeros(len(records))
    if len(records.token_ns) < 2:
        return np.empty(0), largest
    gaps = np.diff(records.token_ns)
    starts = np.cumsum(counts) - counts
    is_inside = np.ones(len(gaps), np.bool_)
    first = starts[(counts > 0) & (starts > 0)]
    is_inside[first - 1] = False  # from the last token of one request to the first of the next
    several = counts > 1
    inside = gaps[is_inside]
    owned = counts[several] - 1
    largest[several] = np.maximum.reduceat(inside, np.cumsum(owned) - owned) / NS_PER_S if owned.size else 0
    answered = np.repeat(records.is_ok[several], owned)
    return inside[answered] / NS_PER_S, largest


def _bins(since_s: Floats, values: Floats, width_s: float) -> list[Floats]:
    numbers = (since_s // width_s).astype(np.int64)
    edges = np.flatnonzero(np.diff(numbers)) + 1
    return np.split(values, edges)


def _recovered_after_s(present: np.ndarray, good: Mask) -> float | None:
    if good.all():
        return 0.0
    first = int(np.argmin(good))
    in_a_row = 0
    for number in range(first, len(present)):
        in_a_row = in_a_row + 1 if good[number] else 0
        if in_a_row == GOOD_BINS_IN_A_ROW:
            return float(present[number - GOOD_BINS_IN_A_ROW + 1] - present[first]) * BIN_S
    return None
