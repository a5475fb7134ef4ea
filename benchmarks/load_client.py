"""Measure the loaders against a stub that knows when it sent each token.

Run: python benchmarks/load_client.py [--streams 40] [--events-rps 50] [--duration-s 20] [--loaders 1]
     python benchmarks/load_client.py --climb
Prints the error of the first token and of every token (client's stamp minus stub's send), how well the plan was kept,
and the processor time used. With `--climb` one loader is put on a staircase of rates until it is late, against a server
that does nothing but send: the highest step kept is what one core sustains.
Targets: first token <= 0.3 ms (median) and <= 3 ms (p99); >= 10,000 events/s on one core.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
from load_stub import run_own_load, running_stub

from harness.load.calibration import TOKENS_PER_STREAM, climb, highest_kept, token_server
from harness.load.report import LoadReport
from harness.load.shape import steady
from harness.observe.history import RequestResult

STREAM_S = 1.0  # how long one answer takes
CLIMB = (6_000, 8_000, 10_000, 12_000, 14_000, 16_000, 18_000, 20_000, 24_000)  # events per second


def main() -> None:
    """Run the load and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=40, help="answers under way on average")
    parser.add_argument("--events-rps", type=int, default=50, help="tokens per second of each")
    parser.add_argument("--duration-s", type=float, default=20.0)
    parser.add_argument("--loaders", type=int, default=None)
    parser.add_argument("--keep-alive-ratio", type=float, default=0.0)
    parser.add_argument("--climb", action="store_true", help="find the events per second that one loader sustains")
    options = parser.parse_args()
    if options.climb:
        print_climb()
        return
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


def print_climb() -> None:
    """Print each step of a staircase of events per second, and the highest that was kept."""
    with token_server() as endpoint:
        climbed = climb(endpoint, CLIMB, tokens=TOKENS_PER_STREAM, step_s=3.0)
    steps = climbed.steps
    for step in steps:
        kept = f"not kept: {step.fault}" if step.fault else "kept"
        print(
            f"{step.per_s:8,.0f} events/s   dispatch lag p99 {step.lag_ms_p99:8.1f} ms   {step.cpu_ratio:4.0%} of a core   {kept}"
        )
    print(f"sustained             {highest_kept(steps):,.0f} events/s, one loader on one core")
    print(f"per processor second  {climbed.events_per_processor_s:,.0f} events, the whole staircase")
    busy = max((step for step in steps if step.cpu_ratio), key=lambda step: step.cpu_ratio, default=None)
    if busy is not None:
        print(f"most used of the core {busy.cpu_ratio:.0%}; below 70 % it was others who kept the loader from more")


def print_figures(report: LoadReport, errors_ns: Sequence[np.ndarray], duration_s: float) -> None:
    """Print one figure a line."""
    events = sum(map(len, errors_ns))
    for name, errors in (("first token", [row[0] for row in errors_ns]), ("every token", np.concatenate(errors_ns))):
        p50, p99, worst = np.percentile(errors, [50, 99, 100]) / 1e6
        print(f"{name} error     p50 {p50:.3f} ms   p99 {p99:.3f} ms   max {worst:.3f} ms   n {len(errors):,}")
    cores = report.cpu_ratio * report.loaders
    print(f"events per second     {events / duration_s:,.0f}, {report.loaders} loader(s) using {cores:.2f} of a core")
    print(f"processor time        {cores * duration_s / events * 1e6:.0f} us per event (everything included)")
    print(
        f"dispatch lag          p50 {report.lag_ms_p50:.2f} ms   p99 {report.lag_ms_p99:.2f} ms   max {report.lag_ms_max:.2f} ms"
    )
    print(f"loop lag              p99 {report.loop_lag_ms_p99:.2f} ms   max {report.loop_lag_ms_max:.2f} ms")
    print(
        f"planned, recorded     {report.planned:,}, {report.recorded:,}; dropped {report.dropped}; achieved {report.achieved_ratio:.3f}"
    )


if __name__ == "__main__":
    main()
