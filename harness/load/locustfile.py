"""The load process: sends what a plan says, when it says so, and writes one record per arrival.

Started by `harness.load.driver`. It reads commands as JSON lines on its standard input, answers each on its standard
output, and ends at once when the input ends, which it does when the parent dies.
"""

from __future__ import annotations

from gevent import monkey

monkey.patch_all()  # before anything else is imported: a late patch breaks ssl

import argparse  # noqa: E402
import gc  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
import traceback  # noqa: E402
from array import array  # noqa: E402
from collections.abc import Mapping  # noqa: E402
from dataclasses import asdict  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any, ClassVar  # noqa: E402

import gevent  # noqa: E402
from gevent.event import Event  # noqa: E402
from gevent.fileobject import FileObject  # noqa: E402
from gevent.pool import Group  # noqa: E402
from locust import User, task  # noqa: E402
from locust.env import Environment  # noqa: E402
from locust.exception import StopUser  # noqa: E402
from locust.html import get_html_report  # noqa: E402
from locust.stats import stats_history  # noqa: E402

from harness.clock import NS_PER_S, now_ns  # noqa: E402
from harness.guards.canary import of_pass, request_body  # noqa: E402
from harness.load.client import Outcome, send_canary, send_completion  # noqa: E402
from harness.load.plan import Arrival, LoadPlan  # noqa: E402
from harness.load.sse import completion_body  # noqa: E402
from harness.observe.history import Request, RequestResult  # noqa: E402

EXIT_PARENT_GONE = 70
HEARTBEAT_S = 0.005
TIMER_STEP_S = 0.0012  # gevent's timers are late by up to 1 ms: the last bit is waited for by yielding


class Loader:
    """Follows the plan: one greenlet per arrival, never later than planned because of an earlier one."""

    def __init__(self, plan: LoadPlan, *, model: str, api_key: str, directory: Path, environment: Environment) -> None:
        self.plan = plan
        self.finished = Event()
        self.recorded = 0
        self.dropped = 0
        self._model = model
        self._api_key = api_key
        self._environment = environment
        self._records = (directory / "requests.jsonl").open("a", encoding="utf-8")
        self._target: tuple[str, str] | None = None
        self._in_flight = Group()
        self._begun = Event()
        self._stopping = Event()
        self._start_ns = 0
        self._stop_ns: int | None = None
        self._dispatched = 0
        self._on_time = 0
        self._lag_ms = array("d")
        self._loop_lag_ms = array("d")
        self._cpu_s = 0.0

    def begin(self, start_ns: int) -> None:
        """Set the time that arrivals count from."""
        self._start_ns = start_ns
        self._cpu_s = time.process_time()
        gevent.spawn(self._beat)
        self._begun.set()

    def admit(self, endpoint: str, incarnation: str) -> None:
        """Send arrivals from now on to this endpoint."""
        self._target = (endpoint, incarnation)

    def withdraw(self) -> None:
        """Send arrivals from now on nowhere."""
        self._target = None

    def stop(self) -> int:
        """Take no arrival after now, and return that time; those under way go on."""
        if self._stop_ns is None:
            self._on_time = self._dispatched
            self._stop_ns = now_ns()
            self._stopping.set()
        return self._stop_ns

    def follow_plan(self) -> None:
        """Dispatch every arrival at its time, then wait for the last to end."""
        self._begun.wait()
        for arrival in self.plan.arrivals:
            planned_ns = arrival.planned_ns(self._start_ns)
            while self._stop_ns is None and (remaining_s := (planned_ns - now_ns()) / NS_PER_S) > 0:
                if remaining_s > TIMER_STEP_S:
                    self._stopping.wait(remaining_s - TIMER_STEP_S)
                else:
                    gevent.sleep(0)
            if self._stop_ns is not None and planned_ns > self._stop_ns:
                break
            self._dispatch(arrival, planned_ns)
        self._stopping.wait()
        self._in_flight.join()
        self._records.close()
        self.finished.set()

    def report(self) -> dict[str, Any]:
        """Say how well the plan was kept."""
        stop_ns = self._stop_ns or now_ns()
        planned = self.plan.due(self._start_ns, stop_ns)
        lags = sorted(self._lag_ms)
        return {
            "recorded": self.recorded,
            "dropped": self.dropped,
            "lag_ms_p50": _quantile(lags, 0.5),
            "lag_ms_p99": _quantile(lags, 0.99),
            "lag_ms_max": _quantile(lags, 1.0),
            "loop_lag_ms_p99": _quantile(sorted(self._loop_lag_ms), 0.99),
            "cpu_ratio": (time.process_time() - self._cpu_s) / max((now_ns() - self._start_ns) / NS_PER_S, 1e-9),
            "achieved_ratio": (self._on_time - self.dropped) / planned if planned else 1.0,
        }

    def _dispatch(self, arrival: Arrival, planned_ns: int) -> None:
        self._dispatched += 1
        target = self._target
        if target is None or len(self._in_flight) >= self.plan.shape.in_flight_limit:
            result = RequestResult.NO_ENDPOINT if target is None else RequestResult.DROPPED
            self._lag_ms.append((now_ns() - planned_ns) / 1e6)
            self._record(arrival, planned_ns, target, Outcome(result=result, error="", sent_ns=None, ended_ns=now_ns()))
        else:
            # An arrival without a record would be a hole in the evidence: rather no load than that.
            self._in_flight.spawn(self._send, arrival, planned_ns, target).link_exception(_die)

    def _send(self, arrival: Arrival, planned_ns: int, target: tuple[str, str]) -> None:
        self._lag_ms.append((now_ns() - planned_ns) / 1e6)
        try:
            outcome = self._outcome(arrival, target[0])
        except Exception as error:
            because = f"{type(error).__name__}: {error}".replace(self._api_key or "\0", "***")[:300]
            outcome = Outcome(result=RequestResult.HARNESS_BUG, error=because, sent_ns=None, ended_ns=now_ns())
        self._record(arrival, planned_ns, target, outcome)

    def _outcome(self, arrival: Arrival, endpoint: str) -> Outcome:
        limits = self.plan.shape.limits
        if arrival.kind == "canary":
            prompts = of_pass(self.plan.canary_prompts, _rotation(arrival))
            body = request_body(self._model, prompts, max_tokens=arrival.max_tokens)
            return send_canary(endpoint, body, prompts=prompts, limits=limits, api_key=self._api_key)
        body = completion_body(self._model, arrival.prompt, arrival.max_tokens)
        return send_completion(endpoint, body, max_tokens=arrival.max_tokens, limits=limits, api_key=self._api_key)

    def _record(self, arrival: Arrival, planned_ns: int, target: tuple[str, str] | None, outcome: Outcome) -> None:
        endpoint, incarnation = target or ("", "")
        request = Request(
            id=arrival.id,
            kind=arrival.kind,
            planned_ns=planned_ns,
            sent_ns=outcome.sent_ns,
            first_token_ns=outcome.first_token_ns,
            token_ns=outcome.token_ns,
            ended_ns=outcome.ended_ns,
            endpoint=endpoint,
            incarnation=incarnation,
            result=outcome.result,
            status=outcome.status,
            error=outcome.error,
            output_sha256=outcome.output_sha256,
            output_tokens=outcome.output_tokens,
            prompt_logprobs=outcome.prompt_logprobs,
            rotation=_rotation(arrival),
        )
        self._records.write(json.dumps(asdict(request)) + "\n")
        self._records.flush()
        self.recorded += 1
        self.dropped += outcome.result is RequestResult.DROPPED
        # For locust's own statistics, which are for people; it wants milliseconds.
        self._environment.events.request.fire(  # type: ignore[no-untyped-call]
            request_type="POST",
            name=arrival.kind,
            response_time=(outcome.ended_ns - planned_ns) / 1e6,
            response_length=outcome.received_bytes,
            exception=None if outcome.result is RequestResult.OK else _Failed(outcome.result),
            context={"id": arrival.id},
        )

    def _beat(self) -> None:
        while not self.finished.is_set():
            expected_ns = now_ns() + round(HEARTBEAT_S * NS_PER_S)
            gevent.sleep(HEARTBEAT_S)
            self._loop_lag_ms.append((now_ns() - expected_ns) / 1e6)


class _Failed(Exception):
    """Tells locust's statistics that a request failed, and how."""


class PlannedArrivals(User):
    """The one locust user: the dispatcher."""

    fixed_count = 1
    loader: ClassVar[Loader]

    @task
    def follow(self) -> None:
        """Follow the plan to its end."""
        try:
            self.loader.follow_plan()
        except Exception:
            # Locust would call the task again, and so send the plan twice.
            traceback.print_exc()
            os._exit(1)
        raise StopUser


class Commands:
    """Obeys the parent."""

    def __init__(self, loader: Loader, answers_fd: int) -> None:
        self._loader = loader
        self._answers_fd = answers_fd

    def say(self, **message: Any) -> None:
        """Tell the parent something."""
        os.write(self._answers_fd, (json.dumps(message) + "\n").encode())

    def obey(self) -> None:
        """Do what the parent says until it goes away, then end this process at once."""
        with FileObject(sys.stdin.fileno(), "rb", close=False) as lines:
            for line in lines:
                command = json.loads(line)
                self.say(ack=command["number"], **self._do(command))
        os._exit(EXIT_PARENT_GONE)

    def _do(self, command: Mapping[str, Any]) -> dict[str, Any]:
        match command["do"]:
            case "start":
                self._loader.begin(command["start_ns"])
            case "admit":
                self._loader.admit(command["endpoint"], command["incarnation"])
            case "withdraw":
                self._loader.withdraw()
            case "stop":
                return {"stop_ns": self._loader.stop()}
        return {"at_ns": now_ns()}


def main() -> None:
    """Run the plan that the parent wrote into the directory."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--cpus", default="")
    options = parser.parse_args()
    answers_fd = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints must not look like an answer
    if options.cpus:
        os.sched_setaffinity(0, {int(cpu) for cpu in options.cpus.split(",")})
    environment = Environment(user_classes=[PlannedArrivals])
    runner = environment.create_local_runner()
    loader = Loader(
        LoadPlan.load(options.directory / "plan.json"),
        model=options.model,
        api_key=os.environ.pop("VLLM_API_KEY", ""),
        directory=options.directory,
        environment=environment,
    )
    PlannedArrivals.loader = loader
    gevent.spawn(stats_history, runner)
    commands = Commands(loader, answers_fd)
    listener = gevent.spawn(commands.obey)
    listener.link_exception(_die)
    runner.start(1, spawn_rate=1)
    gc.collect()
    gc.freeze()  # a collection that walks locust's modules takes longer than a token gap
    commands.say(ready=True)
    loader.finished.wait()
    report = loader.report()
    runner.quit()
    page: str = get_html_report(environment)  # type: ignore[no-untyped-call]
    (options.directory / "locust.html").write_text(page, encoding="utf-8")
    commands.say(ended=report)


def _rotation(arrival: Arrival) -> int | None:
    """Return which pass of the canary prompts an arrival asks: canaries are numbered, and take turns."""
    return int(arrival.id.rpartition("-")[2]) if arrival.kind == "canary" else None


def _die(_: object) -> None:
    os._exit(1)


def _quantile(ordered: list[float], q: float) -> float:
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else 0.0


if __name__ == "__main__":
    main()
