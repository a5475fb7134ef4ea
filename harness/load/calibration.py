"""`harness calibrate`: how many events and requests per second one loader of this machine can do, measured.

A loader follows a staircase of rates against a server that only sends tokens. A step is kept when requests are dispatched
in time, all are answered, and the server itself kept its pace. The highest step below the first that is not counts.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path
from statistics import median

from harness.checkpoint.models import default_cache
from harness.clock import NS_PER_S, poll_until, wall_time
from harness.engine.process_child import processor_name
from harness.errors import EXIT_HELD, EXIT_UNKNOWN, HarnessError
from harness.guards.command import CommandParser
from harness.label import new_label
from harness.load.capacity import SHARE_OF_MEASURED, Capacity, Measured, cores_here
from harness.load.driver import LoadDriver
from harness.load.plan import make_plan
from harness.load.shape import RequestLimits, ramp
from harness.observe.history import Request, RequestResult

STEP_S = 1.5
SETTLING_S = 0.6  # of each step, until the streams of the step before have ended
LAG_LIMIT_MS = 50.0  # p99 of dispatch; beyond what a loader can do it grows without end
CPU_MIN = 0.7  # of a core; a loader that is late with less was kept from computing
SLOWER_SERVER = 1.25  # answers that take so many times their planned time: the server is what is slow
PACE_S = 0.02
EVENTS_STEPS = (3_000, 4_500, 6_750, 10_000, 15_000, 22_500)
REQUESTS_STEPS = (300, 450, 675, 1_000, 1_500, 2_250)
TOKENS_PER_STREAM = 25
UNLIMITED = Capacity(events_per_s=1e9, requests_per_s=1e9, because="calibration")
SERVER_LIMIT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One rate, and how a loader did at it; `fault` is empty when it was kept."""

    per_s: float  # seen: planned events or requests of the judged part of the step
    lag_ms_p99: float
    cpu_ratio: float  # of one core; 0 where no heartbeat fell into the step
    fault: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Climb:
    """A staircase: its steps, and what the loader took in per second of processor time, also where it was late."""

    steps: tuple[Step, ...]
    events_per_processor_s: float


@contextmanager
def token_server(pace_s: float = PACE_S) -> Iterator[str]:
    """Run the server in a process of its own and give its endpoint.

    Raises: HarnessError when it does not come up.
    """
    command = [sys.executable, "-P", "-m", "harness.load.token_server", str(pace_s)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            endpoint = process.stdout.readline().strip()
            if not endpoint:
                raise HarnessError(
                    f"the server that loaders are measured against ended with {process.wait(SERVER_LIMIT_S)}"
                )
            yield endpoint
        finally:
            process.stdin.close()
            try:
                process.wait(SERVER_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()


def climb(endpoint: str, steps: Sequence[float], *, tokens: int, step_s: float = STEP_S) -> Climb:
    """Put one loader on a staircase of so many events per second (of `tokens` each request) and say how each step went."""
    edges = [(number * step_s, rate / tokens) for number, rate in enumerate(steps)]
    points = [point for (at_s, rate) in edges for point in ((at_s, rate), (at_s + step_s, rate))]
    shape = ramp(
        points,
        canary_ratio=0.0,
        output_tokens=tokens,
        prompt_tokens=8,
        limits=RequestLimits(connect_s=20.0, first_token_s=20.0, gap_s=20.0, total_s=20.0),
        in_flight_max=1_000_000,
        late_s=60.0,
        loaders=1,
    )
    plan = make_plan(shape, seed=1, horizon_s=step_s * len(steps), vocabulary_size=30_000, canary_prompts=())
    requests: list[Request] = []
    cpu: list[tuple[int, float]] = []
    core = max(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="calibration-") as directory:
        driver = LoadDriver(
            plan,
            directory=Path(directory),
            api_key="",
            model="m",
            cpus=(core,),
            on_request=requests.append,
            on_heartbeat=lambda beat: cpu.append((beat.at_ns, beat.cpu_ratio)),
            run_label=str(new_label()),
            capacity=UNLIMITED,
        )
        try:
            start_ns = driver.start(endpoint, "calibration")
            poll_until(
                lambda: True if len(requests) >= len(plan.arrivals) else None,
                what="the end of the staircase",
                limit_s=step_s * len(steps) + 2 * shape.limits.total_s,
            )
            driver.stop()
        finally:
            driver.close()
    judged = tuple(
        _judged(
            requests,
            cpu,
            span_ns=(start_ns + round((at_s + SETTLING_S) * NS_PER_S), start_ns + round((at_s + step_s) * NS_PER_S)),
            tokens=tokens,
        )
        for at_s, _ in edges
    )
    return Climb(steps=judged, events_per_processor_s=per_processor_s(requests, cpu))


def per_processor_s(requests: Sequence[Request], cpu: Sequence[tuple[int, float]]) -> float:
    """Return the events that were taken in per second of processor time, between the first heartbeat and the last."""
    used_s = sum((at_ns - before_ns) / NS_PER_S * ratio for (before_ns, _), (at_ns, ratio) in pairwise(cpu))
    if used_s <= 0:
        return 0.0
    begin_ns, end_ns = cpu[0][0], cpu[-1][0]
    return sum(len(r.token_ns) for r in requests if begin_ns < r.ended_ns <= end_ns) / used_s


def highest_kept(steps: Sequence[Step]) -> float:
    """Return the highest rate below the first step that was not kept; 0 when not even the lowest was."""
    return max((step.per_s for step in takewhile(lambda step: not step.fault, steps)), default=0.0)


def measure(say: Callable[[str], None]) -> Measured:
    """Measure one loader of this machine.

    Raises: HarnessError when it does not even keep the lowest step, or was late because others used its core.
    """
    found: dict[str, float] = {}
    with token_server() as endpoint:
        for what, rates, tokens in (("events", EVENTS_STEPS, TOKENS_PER_STREAM), ("requests", REQUESTS_STEPS, 1)):
            steps = climb(endpoint, rates, tokens=tokens).steps
            for step in steps:
                say(
                    f"{step.per_s:8,.0f} {what}/s: dispatch lag p99 {step.lag_ms_p99:.1f} ms, {step.cpu_ratio:.0%} of a core"
                    f"{f'; not kept: {step.fault}' if step.fault else ''}"
                )
            found[what] = highest_kept(steps)
            late = [step for step in steps if step.fault]
            if late and (used := max(step.cpu_ratio for step in late)) < CPU_MIN:
                raise HarnessError(
                    f"a loader was late at {late[0].per_s:,.0f} {what} per second although it used only {used:.0%} of a core: "
                    "other processes had it; calibrate when the machine is quiet"
                )
            if not found[what]:
                raise HarnessError(f"a loader does not keep {rates[0]:,} {what} per second here: {steps[0].fault}")
    return Measured(
        processor=processor_name(),
        cores=cores_here(),
        events_per_s=round(found["events"]),
        requests_per_s=round(found["requests"]),
        measured_at=wall_time(),
    )


def calibrate_main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    parser = CommandParser(
        prog="harness calibrate",
        description="Measure what one loader of this machine can do, and keep it: plans beyond it are refused.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--into", type=Path, default=default_cache(), metavar="DIR", help="where the figures are kept")
    options = parser.parse_args(arguments)
    try:
        measured = measure(print)
    except HarnessError as error:
        print(f"harness: {error}", file=sys.stderr)
        return EXIT_UNKNOWN
    path = measured.save(options.into)
    print(
        f"one loader does {measured.events_per_s:,.0f} events or {measured.requests_per_s:,.0f} requests per second on "
        f'"{measured.processor}" and is given {SHARE_OF_MEASURED:.0%} of that; kept in "{path}"'
    )
    return EXIT_HELD


def _judged(
    requests: Sequence[Request], cpu: Sequence[tuple[int, float]], *, span_ns: tuple[int, int], tokens: int
) -> Step:
    begin_ns, end_ns = span_ns
    inside = [request for request in requests if begin_ns <= request.planned_ns < end_ns]
    lags_ms = sorted(((r.dispatched_ns or r.ended_ns) - r.planned_ns) / 1e6 for r in inside)
    lag_ms_p99 = lags_ms[int(0.99 * (len(lags_ms) - 1))] if lags_ms else 0.0
    failed = [request for request in inside if request.result is not RequestResult.OK]
    spans_s = [(r.token_ns[-1] - r.token_ns[0]) / NS_PER_S for r in inside if r.token_ns]
    planned_s = PACE_S * (tokens - 1)
    faults = [
        *([] if inside else ["no request was planned"]),
        *([f"{len(failed)} of {len(inside)} requests failed ({failed[0].result})"] if failed else []),
        *([f"dispatch lag p99 above {LAG_LIMIT_MS:g} ms"] if lag_ms_p99 > LAG_LIMIT_MS else []),
    ]
    if not faults and planned_s and spans_s and median(spans_s) > SLOWER_SERVER * planned_s:
        faults = [f"the server took {median(spans_s) / planned_s:.2f} times its planned time"]
    used = [ratio for at_ns, ratio in cpu if begin_ns <= at_ns < end_ns]
    return Step(
        per_s=tokens * len(inside) / ((end_ns - begin_ns) / NS_PER_S),
        lag_ms_p99=lag_ms_p99,
        cpu_ratio=max(used, default=0.0),
        fault="; ".join(faults),
    )
