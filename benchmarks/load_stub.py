"""The stub of the load tests in a process of its own, and our own load on it; what the load benchmarks share."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.clock import Deadline, poll_until
from harness.load.driver import LoadDriver
from harness.load.plan import LoadPlan, make_plan
from harness.load.report import LoadReport
from harness.load.shape import LoadShape
from harness.observe.history import Request

STUB = Path(__file__).parent.parent / "tests" / "load" / "stub.py"


@dataclass
class RunningStub:
    """A stub in another process; `served` is filled once it has ended: what it read and sent, and when."""

    endpoint: str
    served: list[dict[str, Any]] = field(default_factory=list)


@contextmanager
def running_stub(*options: str) -> Iterator[RunningStub]:
    """Run a stub with these options of its command line; it is ended at the end of the block."""
    with subprocess.Popen(
        [sys.executable, str(STUB), *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stub = RunningStub(process.stdout.readline().strip())
        try:
            yield stub
        finally:
            process.stdin.close()
            stub.served = [json.loads(line) for line in process.stdout]


@dataclass(frozen=True, slots=True)
class OwnRun:
    """What our own load saw."""

    plan: LoadPlan
    requests: list[Request]
    report: LoadReport

    def truths(self, served: list[dict[str, Any]]) -> list[tuple[Request, list[int]]]:
        """Return each request that the stub answered, with when the stub sent its tokens."""
        prompts = {arrival.id: arrival.prompt for arrival in self.plan.arrivals}
        sent = {tuple(one["prompt"]): one["sent_ns"] for one in served}
        found = ((request, sent.get(prompts[request.id], [])) for request in self.requests)
        return [(request, tokens) for request, tokens in found if tokens]


def run_own_load(
    stub: RunningStub, shape: LoadShape, *, duration_s: float, exactly: int | None = None, cpus: tuple[int, ...] = ()
) -> OwnRun:
    """Put our own load on the stub for some seconds, or until `exactly` so many requests were answered within them."""
    plan = make_plan(
        shape,
        seed=1,
        horizon_s=duration_s if exactly else duration_s + 60,
        vocabulary_size=1000,
        canary_prompts=(),
        exactly=exactly,
    )
    requests: list[Request] = []
    with tempfile.TemporaryDirectory() as directory:
        driver = LoadDriver(
            plan,
            directory=Path(directory),
            api_key="",
            model="m",
            cpus=cpus,
            on_request=requests.append,
            run_label="benchmark",
        )
        try:
            driver.start(stub.endpoint, "stub")
            until = Deadline.after(duration_s)
            poll_until(
                lambda: True if until.is_expired() and (exactly is None or len(requests) >= exactly) else None,
                what="the end of the load",
                limit_s=duration_s + shape.limits.total_s,
            )
            report = driver.stop()
        finally:
            driver.close()
    return OwnRun(plan, requests, report)
