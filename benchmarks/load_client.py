"""Measure the load process against a stub that knows when it sent each token.

Run: python benchmarks/load_client.py [--streams 40] [--events-rps 50] [--duration-s 20]
Prints the error of the first token and of every token (client's stamp minus stub's send), how well the plan was kept,
and the events per second one core can take, from the processor time used.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from harness.clock import pause
from harness.load.driver import LoadDriver, LoadReport
from harness.load.plan import make_plan
from harness.load.shape import steady
from harness.observe.history import Request, RequestResult

STUB = Path(__file__).parent.parent / "tests" / "load" / "stub.py"
STREAM_S = 1.0  # how long one answer takes


def main() -> None:
    """Run the load and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=40, help="answers under way on average")
    parser.add_argument("--events-rps", type=int, default=50, help="tokens per second of each")
    parser.add_argument("--duration-s", type=float, default=20.0)
    options = parser.parse_args()
    shape = steady(
        rate_rps=options.streams / STREAM_S,
        canary_ratio=0.0,
        output_tokens=round(options.events_rps * STREAM_S),
    )
    plan = make_plan(shape, seed=1, horizon_s=options.duration_s + 60, vocabulary_size=1000, canary_prompts=())
    prompts = {arrival.id: arrival.prompt for arrival in plan.arrivals}
    command = [sys.executable, str(STUB), "--pace-s", str(1 / options.events_rps)]
    requests: list[Request] = []
    with (
        tempfile.TemporaryDirectory() as directory,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as stub,
    ):
        assert stub.stdin is not None
        assert stub.stdout is not None
        driver = LoadDriver(
            plan, directory=Path(directory), api_key="", model="m", on_request=requests.append, run_label="benchmark"
        )
        try:
            endpoint = stub.stdout.readline().strip()
            driver.start()
            driver.admit(endpoint, "stub")
            pause(options.duration_s)
            report = driver.stop()
        finally:
            driver.close()
            stub.stdin.close()
        served = [json.loads(line) for line in stub.stdout]
    truth = {tuple(one["prompt"]): one["sent_ns"] for one in served}
    answered = [request for request in requests if request.result is RequestResult.OK]
    errors_ns = [np.subtract(request.token_ns, truth[prompts[request.id]]) for request in answered]
    print_figures(report, errors_ns, options.duration_s)
    print(f"results               {sorted({request.result.value for request in requests})}")


def print_figures(report: LoadReport, errors_ns: Sequence[np.ndarray], duration_s: float) -> None:
    """Print one figure a line."""
    events = sum(map(len, errors_ns))
    for name, errors in (("first token", [row[0] for row in errors_ns]), ("every token", np.concatenate(errors_ns))):
        p50, p99, worst = np.percentile(errors, [50, 99, 100]) / 1e6
        print(f"{name} error     p50 {p50:.3f} ms   p99 {p99:.3f} ms   max {worst:.3f} ms   n {len(errors):,}")
    print(f"events per second     {events / duration_s:,.0f}, using {report.cpu_ratio:.2f} of a core")
    print(f"events/s/core         {events / duration_s / report.cpu_ratio:,.0f} (everything included)")
    print(
        f"dispatch lag          p50 {report.lag_ms_p50:.2f} ms   p99 {report.lag_ms_p99:.2f} ms   max {report.lag_ms_max:.2f} ms"
    )
    print(f"loop lag              p99 {report.loop_lag_ms_p99:.2f} ms")
    print(
        f"planned, recorded     {report.planned:,}, {report.recorded:,}; dropped {report.dropped}; achieved {report.achieved_ratio:.3f}"
    )


if __name__ == "__main__":
    main()
