"""A comparison on disk, as `harness compare` leaves it, with latencies that are made up."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from harness.judge.blocks import block_name
from harness.judge.records import Records, joined
from harness.observe.history import EventKind, Recorder
from tests.judge.measured import GOOD, QUIET, S, declaration, records, request

WARM_S = 1.0


def store_comparison(
    run: Path,
    *,
    factor: float,
    pairs: int,
    failing: Mapping[str, str] | None = None,
    requests: int = 120,
    spread: float = 0.1,
    late_ms: float = 0.0,
    **declared: Any,
) -> None:
    """Write a comparison in which the new arm is slower by a factor, with noise between blocks and, by `spread`, requests."""
    random = np.random.default_rng(7)
    begin_s = 1e4 * (1 + zlib.crc32(str(run).encode()) % 9999)  # no two comparisons were at the same time
    run.mkdir(parents=True, exist_ok=True)
    made = declaration(**{"failure_budget": 0.02, **declared})
    (run / "comparison.json").write_text(json.dumps(made.as_json()))
    for pair in range(pairs):
        arms = ("old", "new") if pair % 2 == 0 else ("new", "old")
        for position, arm in enumerate(arms):
            number = 2 * pair + position
            slower = (factor if arm == "new" else 1.0) * float(np.exp(random.normal(0, 0.01)))
            times = 100 * slower * np.exp(random.normal(0, spread, requests))
            rows = Records.of(
                request(
                    begin_s + 100.0 * number + n * 0.1, ttft_ms=float(ms), gap_ms=10 * slower, late_ms=late_ms, number=n
                )
                for n, ms in enumerate(times)
            )
            if failing and arm in failing:
                rows = joined([rows, records(request(begin_s + 100.0 * number + requests * 0.1, result=failing[arm]))])
            store_block(run / "blocks" / block_name(number, arm), rows, number=number, arm=arm, pair=pair)


def store_block(folder: Path, rows: Records, *, number: int, arm: str, pair: int, **changes: Any) -> None:
    """Write one block as a comparison leaves it, with other fields of its `block.json` on demand."""
    folder.mkdir(parents=True, exist_ok=True)
    rows.save(folder / "records.npz")
    recorder = Recorder(folder / "history.jsonl")
    recorder.event("host", EventKind.HOST, **QUIET)
    recorder.close()
    start_ns = int(rows.planned_ns[0])
    block = {
        "number": number,
        "arm": arm,
        "pair": pair,
        "is_null": False,
        "window_ns": [start_ns + round(WARM_S * S), start_ns + 1000 * S],
        "schedule_sha256": "schedule",
        "notes": [],
        "report": GOOD,
        **changes,
    }
    (folder / "block.json").write_text(json.dumps(block))
