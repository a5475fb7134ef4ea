"""Measure the loaders against a stub that knows when it sent each token.

Run: python benchmarks/load_client.py [--streams 40] [--events-rps 50] [--duration-s 20] [--loaders 1]
Prints the error of the first token and of every token (client's stamp minus stub's send), how well the plan was kept,
and the events per second one core can take, from the processor time used.
Targets: first token <= 0.3 ms (median) and <= 3 ms (p99); >= 10,000 events/s/core.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
from load_stub import run_own_load, running_stub

from harness.load.driver import LoadReport
from harness.load.shape import steady
from harness.observe.history import RequestResult

STREAM_S = 1.0  # how long one answer takes


def main() -> None:
    """Run the load and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=40, help="answers under way on average")
    parser.add_argument("--events-rps", type=int, default=50, help="tokens per second of each")
    parser.add_argument("--duration-s", type=float, default=20.0)
    parser.add_argument("--loaders", type=int, default=None)
    parser.add_argument("--keep-alive-ratio", type=float, default=0.0)
    options = parser.parse_args()
    shape = steady(
        rate_rps=options.streams / STREAM_S,
        canary_ratio=0.0,
        output_tokens=round(options.events_rps * STREAM_S),
        loaders=options.loaders,
        keep_alive_ratio=options.keep_alive_ratio,
    )
    with running_stub("--pace-s", str(1 / options.events_rps)) as stub:
        own = run_own_load(stub, shape, duration_s=options.duration_s)
    errors_ns = [
        np.subtract(request.token_ns, sent_ns)
        for request, sent_ns in own.truths(stub.served)
        if request.result is RequestResult.OK
    ]
    print_figures(own.report, errors_ns, options.duration_s)
    print(f"results               {sorted({request.result.value for request in own.requests})}")


def print_figures(report: LoadReport, errors_ns: Sequence[np.ndarray], duration_s: float) -> None:
    """Print one figure a line."""
    events = sum(map(len, errors_ns))
    for name, errors in (("first token", [row[0] for row in errors_ns]), ("every token", np.concatenate(errors_ns))):
        p50, p99, worst = np.percentile(errors, [50, 99, 100]) / 1e6
        print(f"{name} error     p50 {p50:.3f} ms   p99 {p99:.3f} ms   max {worst:.3f} ms   n {len(errors):,}")
    cores = report.cpu_ratio * report.loaders
    print(f"events per second     {events / duration_s:,.0f}, {report.loaders} loader(s) using {cores:.2f} of a core")
    print(f"events/s/core         {events / duration_s / cores:,.0f} (everything included)")
    print(
        f"dispatch lag          p50 {report.lag_ms_p50:.2f} ms   p99 {report.lag_ms_p99:.2f} ms   max {report.lag_ms_max:.2f} ms"
    )
    print(f"loop lag              p99 {report.loop_lag_ms_p99:.2f} ms   max {report.loop_lag_ms_max:.2f} ms")
    print(
        f"planned, recorded     {report.planned:,}, {report.recorded:,}; dropped {report.dropped}; achieved {report.achieved_ratio:.3f}"
    )


if __name__ == "__main__":
    main()
