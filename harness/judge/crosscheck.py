"""Does the server's own clock agree? Its Prometheus histograms against what the loader saw; notes, never a verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from harness.clock import NS_PER_S
from harness.guards.canary import PROMPTS_PER_PASS
from harness.judge.records import Floats, Records
from harness.judge.windows import latencies
from harness.observe.metrics import HistogramSample

FASTER_MS = 1.0  # a client that sees a token before its server does has a wrong clock, beyond this
SLOWER_MS = 20.0
SLOWER_RATIO = 0.2
COUNT_RATIO = 0.02

Histograms = Mapping[str, HistogramSample]


def cross_check(records: Records, before: Histograms, after: Histograms) -> tuple[str, ...]:
    """Return a sentence for each figure in which client and server disagree; give the records of what was sent in between.

    A server's times begin when the request has arrived and end before the network, so the client's mean is expected to
    be the larger one, by little: what lies between them is the network, the client, or a queue that the server does not
    count.
    """
    seen = latencies(records.of_users())
    asked_s = _canaries_s(records)
    count = len(records.of_users()) + len(asked_s)
    pairs = (
        ("ttft", "time to first token", np.concatenate([seen.ttft_sent_s, asked_s])),
        ("gap", "gap between tokens", seen.gap_s),
        ("e2e", "end to end", np.concatenate([seen.e2e_sent_s, asked_s])),
    )
    notes = []
    for name, words, values in pairs:
        if name not in after:
            continue
        delta = after[name].since(before.get(name))
        if delta.count <= 0:
            notes.append(f"{words}: the server counted nothing (restarted in between?)")
            continue
        finite = values[np.isfinite(values)]
        if not finite.size:
            continue
        if name == "ttft" and abs(delta.count - count) > max(1.0, COUNT_RATIO * count):
            notes.append(f"{words}: the server counted {delta.count:.0f} requests, the loader {count}")
            continue
        client_ms, server_ms = 1e3 * float(finite.mean()), 1e3 * delta.sum / delta.count
        difference_ms = client_ms - server_ms
        if difference_ms < -FASTER_MS or difference_ms > max(SLOWER_MS, SLOWER_RATIO * server_ms):
            share = difference_ms / server_ms if server_ms else math.inf
            notes.append(
                f"{words}: {client_ms:.1f} ms on average by the loader, {server_ms:.1f} ms by the server ({share:+.0%})"
            )
    return tuple(notes)


def _canaries_s(records: Records) -> Floats:
    """Return how long each prompt of the answered canaries took; a server counts every prompt as a request of one token."""
    asked = records.select(records.is_canary & records.is_ok)
    took_s: Floats = (asked.ended_ns - asked.sent_ns) / NS_PER_S
    return np.repeat(took_s, PROMPTS_PER_PASS)
