"""Requests, records and blocks made by hand, with latencies in milliseconds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from harness.judge.blocks import KEY_FIELDS, Arm, Block, Declaration
from harness.judge.gates import Gate
from harness.judge.records import Records
from harness.judge.windows import FUNCTIONALS, Availability
from harness.observe.history import Request, RequestResult

MS = 1_000_000
S = 1_000_000_000
# What a good block's load report says, and a quiet machine.
GOOD: dict[str, Any] = {
    "planned_events_per_s": 500.0,
    "lag_ms_p99": 0.4,
    "lag_ms_max": 3.0,
    "loop_lag_ms_p99": 0.6,
    "achieved_ratio": 1.0,
    "cpu_ratio": 0.2,
    "cpu_ratio_max": 0.3,
    "loaders": 1,
}
QUIET = {"steal_ratio": 0.0, "pressure_cpu_avg10": 5.0, "pressure_io_avg10": 0.0, "pressure_memory_avg10": 0.0}


def request(
    at_s: float,
    *,
    ttft_ms: float = 50.0,
    gap_ms: float = 10.0,
    tokens: int = 5,
    late_ms: float = 0.0,
    result: str = "ok",
    kind: str = "load",
    number: int = 0,
) -> Request:
    """Return an answered request; one that failed has neither tokens nor a first one."""
    planned = round(at_s * S)
    first = planned + round((late_ms + ttft_ms) * MS)
    times = tuple(first + round(n * gap_ms * MS) for n in range(tokens)) if result == "ok" else ()
    return Request(
        id=f"{kind}-{number}",
        kind=kind,
        planned_ns=planned,
        dispatched_ns=planned + round(late_ms * MS),
        sent_ns=None if result in ("dropped", "late") else planned + round(late_ms * MS),
        first_token_ns=times[0] if times else None,
        token_ns=times,
        ended_ns=times[-1] if times else planned + round(ttft_ms * MS),
        endpoint="http://127.0.0.1:1",
        incarnation="old-1",
        result=RequestResult(result),
        output_tokens=len(times),
    )


def records(*requests: Request) -> Records:
    """Return the records of these."""
    return Records.of(requests)


def steady(ttft_ms: Sequence[float], *, every_s: float = 0.1, start_s: float = 0.0, **fields: Any) -> Records:
    """Return evenly spaced requests with these times to first token."""
    return Records.of(
        request(start_s + number * every_s, ttft_ms=value, number=number, **fields)
        for number, value in enumerate(ttft_ms)
    )


def declaration(**changes: Any) -> Declaration:
    """Return a declaration of a comparison on a made-up engine."""
    key = {name: f"this {name}" for name in KEY_FIELDS}
    fields: dict[str, Any] = {
        "name": "made-up",
        "profile": "nightly",
        "gating": ("ttft_ms_p50", "tpot_ms_p50"),
        "arms": tuple(Arm(name=name, key=key) for name in ("old", "new", "null")),
        "schedule_sha256": "schedule",
        "fresh": False,
        "started_at": "2026-01-01T00:00:00+00:00",
        **changes,
    }
    return Declaration(**fields)


def block(number: int, arm: str, pair: int, factor: float = 1.0, **changes: Any) -> Block:
    """Return a block of 300 answered requests in which every latency is 100 ms times a factor."""
    fields: dict[str, Any] = {
        "number": number,
        "arm": arm,
        "pair": pair,
        "is_null": False,
        "values": dict.fromkeys(FUNCTIONALS, 100.0 * factor),
        "counts": {RequestResult.OK: 300},
        "gates": (),
        "events": (),
        "is_drifting": False,
        "is_coalesced": False,
        "availability": Availability(good_bins_ratio=1.0, longest_outage_s=0.0, recovered_after_s=0.0, failed_bins=0),
        "goodput": None,
        "peak_ratio": 1.1,
        "canaries": None,
        "schedule_sha256": "schedule",
        "notes": (),
        **changes,
    }
    return Block(**fields)


def blocks(factors: Sequence[float], *, is_null: bool = False, first: int = 0, **changes: Any) -> list[Block]:
    """Return pairs of blocks in which B is slower than A by these factors, in ABBA order."""
    other = "null" if is_null else "new"
    made = []
    for pair, factor in enumerate(factors):
        arms = (("old", 1.0), (other, factor))
        for position, (arm, slower) in enumerate(arms if pair % 2 == 0 else arms[::-1]):
            made.append(block(first + 2 * pair + position, arm, pair, slower, is_null=is_null, **changes))
    return made


def failing_gate() -> Gate:
    """Return a gate that was not passed."""
    return Gate(name="lag_ms_p99", seen=9.0, limit=5.0, where="block 000-old")


def with_failures(made: Sequence[Block], arm: str, **counts: int) -> list[Block]:
    """Return the blocks with these failures in every block of one arm."""
    failed = {RequestResult(name): count for name, count in counts.items()}
    whole = {RequestResult.OK: 300 - sum(failed.values()), **failed}
    return [replace(each, counts=whole) if each.arm == arm else each for each in made]


def noisy(effect: float, pairs: int, *, sd: float = 0.02, seed: int = 1) -> list[float]:
    """Return factors by which B is slower, one per pair, with noise of a standard deviation on the logarithm."""
    noise = np.random.default_rng(seed).normal(0, sd, pairs)
    return [math.exp(math.log1p(effect) + float(each)) for each in noise]
