"""Measure what our load says of a server that freezes, against what the server itself knows.

Run: python benchmarks/load_freeze.py [--rate-rps 20] [--freeze-s 2] [--duration-s 10]
A stub freezes in the middle of the run. The truth of a request is when the stub sent its first token, counted from when
the request was planned. Target: p95 within 5 % of the truth. The p95 counted from the send is printed too: that is what
tools report which count from there.
"""

from __future__ import annotations

import argparse

import numpy as np
from load_stub import run_own_load, running_stub

from harness.load.shape import constant

FIRST_S = 0.05


def main() -> None:
    """Run the load and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate-rps", type=float, default=20.0)
    parser.add_argument("--freeze-s", type=float, default=2.0)
    parser.add_argument("--duration-s", type=float, default=10.0)
    options = parser.parse_args()
    count = round(options.rate_rps * options.duration_s)
    shape = constant(rate_rps=options.rate_rps, canary_ratio=0.0, output_tokens=4)
    freeze = ("--freeze-at-request", str(count * 2 // 5), "--freeze-s", str(options.freeze_s))
    with running_stub("--first-s", str(FIRST_S), *freeze) as stub:
        own = run_own_load(stub, shape, duration_s=options.duration_s, exactly=count)
    known = [(r, sent) for r, sent in own.truths(stub.served) if r.first_token_ns is not None and r.sent_ns is not None]
    truth = np.array([sent[0] - r.planned_ns for r, sent in known]) / 1e9
    seen = np.array([r.first_token_s for r, _ in known])
    from_send = np.array([(r.first_token_ns or 0) - (r.sent_ns or 0) for r, _ in known]) / 1e9
    print(f"requests              {len(known)} of {count}, {int((truth > 0.2).sum())} caught by the freeze")
    for q in (50, 95, 99):
        true_s, seen_s, send_s = (float(np.percentile(values, q)) for values in (truth, seen, from_send))
        print(
            f"p{q} first token       truth {true_s * 1e3:,.1f} ms   seen {seen_s * 1e3:,.1f} ms   "
            f"error {seen_s / true_s - 1:+.2%}   from the send {send_s * 1e3:,.1f} ms"
        )
    print(f"dispatch lag          p99 {own.report.lag_ms_p99:.2f} ms   max {own.report.lag_ms_max:.2f} ms")


if __name__ == "__main__":
    main()
