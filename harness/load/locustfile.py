"""A loader: sends its share of a plan, when the plan says so, and writes one record per arrival.

Started by `harness.load.driver`. It reads commands as JSON lines on its standard input, answers each on its standard
output, and ends at once when the input ends, which it does when the parent dies.
"""

from __future__ import annotations

from gevent import monkey

monkey.patch_all()  # before anything else is imported: a late patch breaks ssl

import argparse  # noqa: E402
import gc  # noqa: E402
import json  # noqa: E402
import math  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
import traceback  # noqa: E402
from array import array  # noqa: E402
from collections import Counter  # noqa: E402
from collections.abc import Mapping  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any, ClassVar  # noqa: E402

import flask  # noqa: E402
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
from harness.load.connections import IdleConnections  # noqa: E402
from harness.load.plan import Arrival, LoadPlan  # noqa: E402
from harness.load.sse import completion_body  # noqa: E402
from harness.observe.history import Request, RequestResult  # noqa: E402

EXIT_PARENT_GONE = 70
TICK_S = 0.005  # how late this timer is says how late everything is that happens in this process
HEARTBEAT_S = 1.0
TIMER_STEP_S = 0.0012  # gevent's timers are late by up to 1 ms: the last bit is waited for by yielding


class Loader:
    """Follows its share of the plan: one greenlet per arrival, never later than planned because of an earlier one."""

    def __init__(
        self,
        plan: LoadPlan,
        *,
        number: int,
        loaders: int,
        model: str,
        api_key: str,
        directory: Path,
        environment: Environment,
    ) -> None:
        self.finished = Event()
        self._number = number
        self._arrivals = plan.shard(number, loaders)
        self._canary_prompts = plan.canary_prompts
        self._limits = plan.shape.limits
        self._late_ns = round(plan.shape.late_s * NS_PER_S)
        self._in_flight_limit = math.ceil(plan.shape.in_flight_limit / loaders)
        self._model = model
        self._api_key = api_key
        self._environment = environment
        self._records = (directory / f"requests-{number}.jsonl").open("a", encoding="utf-8")
        self._heartbeats = (directory / f"heartbeats-{number}.jsonl").open("a", encoding="utf-8")
        self._target: tuple[str, str] | None = None
        self._idle = IdleConnections()
        self._in_flight = Group()
        self._begun = Event()
        self._stopping = Event()
        self._start_ns = 0
        self._stop_ns: int | None = None
        self._dispatched = 0
        self._on_time = 0
        self._results: Counter[RequestResult] = Counter()
        self._lag_ms_max = 0.0  # since the last heartbeat
        self._loop_lag_ms = array("d")
        self._cpu_s = 0.0

    def begin(self, start_ns: int) -> None:
        """Set the time that arrivals count from."""
        self._start_ns = start_ns
        self._cpu_s = time.process_time()
        gevent.spawn(self._tick).link_exception(_die)
        self._begun.set()

    def admit(self, endpoint: str, incarnation: str) -> None:
        """Send arrivals from now on to this endpoint."""
        self._idle.close()
        self._target = (endpoint, incarnation)

    def stop(self) -> int:
        """Take no arrival after now, and return that time; those under way go on."""
        if self._stop_ns is None:
            self._on_time = self._dispatched - self._results[RequestResult.DROPPED] - self._results[RequestResult.LATE]
            self._stop_ns = now_ns()
            self._stopping.set()
        return self._stop_ns

    def follow_plan(self) -> None:
        """Dispatch every arrival at its time, then wait for the last to end."""
        self._begun.wait()
        for arrival in self._arrivals:
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
        self._idle.close()
        self._records.close()
        self.finished.set()

    def report(self) -> dict[str, Any]:
        """Say how well the plan was kept."""
        elapsed_s = (now_ns() - self._start_ns) / NS_PER_S
        loop_lags = sorted(self._loop_lag_ms)
        return {
            "recorded": self._results.total(),
            "dropped": self._results[RequestResult.DROPPED],
            "late": self._results[RequestResult.LATE],
            "on_time": self._on_time,
            "loop_lag_ms_p99": _quantile(loop_lags, 0.99),
            "loop_lag_ms_max": _quantile(loop_lags, 1.0),
            "cpu_ratio": (time.process_time() - self._cpu_s) / max(elapsed_s, 1e-9),
            "closed_while_idle": self._idle.closed_while_idle,
        }

    def _dispatch(self, arrival: Arrival, planned_ns: int) -> None:
        self._dispatched += 1
        target = self._target
        at_ns = now_ns()
        ours = None
        if at_ns - planned_ns > self._late_ns:
            ours = RequestResult.LATE
        elif target is None:
            ours = RequestResult.NO_ENDPOINT
        elif len(self._in_flight) >= self._in_flight_limit:
            ours = RequestResult.DROPPED
        if ours is not None or target is None:
            result = ours or RequestResult.NO_ENDPOINT
            outcome = Outcome(result=result, error="", sent_ns=None, ended_ns=at_ns)
            self._record(arrival, planned_ns, at_ns, target, outcome)
        else:
            # An arrival without a record would be a hole in the evidence: rather no load than that.
            self._in_flight.spawn(self._send, arrival, planned_ns, target).link_exception(_die)

    def _send(self, arrival: Arrival, planned_ns: int, target: tuple[str, str]) -> None:
        dispatched_ns = now_ns()
        try:
            outcome = self._outcome(arrival, target[0])
        except Exception as error:
            because = f"{type(error).__name__}: {error}".replace(self._api_key or "\0", "***")[:300]
            outcome = Outcome(result=RequestResult.HARNESS_BUG, error=because, sent_ns=None, ended_ns=now_ns())
        self._record(arrival, planned_ns, dispatched_ns, target, outcome)

    def _outcome(self, arrival: Arrival, endpoint: str) -> Outcome:
        limits, key, idle = self._limits, self._api_key, self._idle if arrival.keep_alive else None
        if arrival.kind == "canary":
            prompts = of_pass(self._canary_prompts, _rotation(arrival))
            body = request_body(self._model, prompts, max_tokens=arrival.max_tokens)
            return send_canary(endpoint, body, prompts=prompts, limits=limits, api_key=key, idle=idle)
        body = completion_body(self._model, arrival.prompt, arrival.max_tokens)
        return send_completion(endpoint, body, max_tokens=arrival.max_tokens, limits=limits, api_key=key, idle=idle)

    def _record(
        self, arrival: Arrival, planned_ns: int, dispatched_ns: int, target: tuple[str, str] | None, outcome: Outcome
    ) -> None:
        endpoint, incarnation = target or ("", "")
        request = Request(
            id=arrival.id,
            kind=arrival.kind,
            planned_ns=planned_ns,
            dispatched_ns=dispatched_ns,
            connected_ns=outcome.connected_ns,
            sent_ns=outcome.sent_ns,
            headers_ns=outcome.headers_ns,
            first_token_ns=outcome.first_token_ns,
            token_ns=outcome.token_ns,
            ended_ns=outcome.ended_ns,
            endpoint=endpoint,
            incarnation=incarnation,
            connection=outcome.connection,
            loader=self._number,
            result=outcome.result,
            status=outcome.status,
            error=outcome.error,
            output_sha256=outcome.output_sha256,
            output_tokens=outcome.output_tokens,
            prompt_logprobs=outcome.prompt_logprobs,
            rotation=_rotation(arrival),
        )
        self._records.write(json.dumps({name: getattr(request, name) for name in Request.__slots__}) + "\n")
        self._records.flush()
        self._results[outcome.result] += 1
        self._lag_ms_max = max(self._lag_ms_max, (dispatched_ns - planned_ns) / 1e6)
        # For locust's own statistics, which are for people; it wants milliseconds.
        self._environment.events.request.fire(  # type: ignore[no-untyped-call]
            request_type="POST",
            name=arrival.kind,
            response_time=(outcome.ended_ns - planned_ns) / 1e6,
            response_length=outcome.received_bytes,
            exception=None if outcome.result is RequestResult.OK else _Failed(outcome.result),
            context={"id": arrival.id},
        )

    def _tick(self) -> None:
        """Measure how late timers are, and write a heartbeat every second."""
        last_ns, last_cpu_s, last = now_ns(), time.process_time(), (0, 0, 0)
        with self._heartbeats:
            while not self.finished.is_set():
                expected_ns = now_ns() + round(TICK_S * NS_PER_S)
                gevent.sleep(TICK_S)
                at_ns = now_ns()
                self._loop_lag_ms.append((at_ns - expected_ns) / 1e6)
                passed_s = (at_ns - last_ns) / NS_PER_S
                if passed_s < HEARTBEAT_S:
                    continue
                cpu_s, counts = time.process_time(), (self._dispatched, self._results.total(), len(self._loop_lag_ms))
                loop_lags = sorted(self._loop_lag_ms[last[2] :])
                heartbeat = {
                    "loader": self._number,
                    "at_ns": at_ns,
                    "dispatched": counts[0] - last[0],
                    "ended": counts[1] - last[1],
                    "in_flight": len(self._in_flight),
                    "lag_ms_max": self._lag_ms_max,
                    "loop_lag_ms_p99": _quantile(loop_lags, 0.99),
                    "loop_lag_ms_max": _quantile(loop_lags, 1.0),
                    "cpu_ratio": (cpu_s - last_cpu_s) / passed_s,
                }
                self._heartbeats.write(json.dumps(heartbeat) + "\n")
                self._heartbeats.flush()
                self._lag_ms_max = 0.0
                last_ns, last_cpu_s, last = at_ns, cpu_s, counts


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
            case "stop":
                return {"stop_ns": self._loader.stop()}
        return {"at_ns": now_ns()}


def main() -> None:
    """Run the plan that the parent wrote into the directory."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--cpus", default="")
    parser.add_argument("--loader", type=int, required=True)
    parser.add_argument("--loaders", type=int, required=True)
    parser.add_argument("--web-ui", action="store_true")
    options = parser.parse_args()
    del sys.argv[1:]  # locust's page reads them as its own
    answers_fd = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints must not look like an answer
    if options.cpus:
        os.sched_setaffinity(0, {int(cpu) for cpu in options.cpus.split(",")})
    environment = Environment(user_classes=[PlannedArrivals])
    runner = environment.create_local_runner()
    loader = Loader(
        LoadPlan.load(options.directory / "plan.json"),
        number=options.loader,
        loaders=options.loaders,
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
    url = serve_web_ui(environment) if options.web_ui else ""
    gc.collect()
    gc.freeze()  # a collection that walks locust's modules takes longer than a token gap
    commands.say(ready=url)
    loader.finished.wait()
    report = loader.report()
    runner.quit()
    page: str = get_html_report(environment)  # type: ignore[no-untyped-call]
    (options.directory / f"locust-{options.loader}.html").write_text(page, encoding="utf-8")
    commands.say(ended=report)


def serve_web_ui(environment: Environment) -> str:
    """Serve locust's own page on a free port of the loopback device and return its address.

    It can only be looked at: whoever could start or stop a test there would change what is measured.
    """
    web_ui = environment.create_web_ui(host="127.0.0.1", port=0, delayed_start=True)
    assert web_ui.app is not None
    web_ui.app.before_request(_refuse_changes)
    web_ui.start()  # type: ignore[no-untyped-call]
    while web_ui.server is None or not web_ui.server.started:
        gevent.sleep(0.01)
    return f"http://127.0.0.1:{web_ui.server.server_port}"


def _refuse_changes() -> tuple[str, int] | None:
    return None if flask.request.method in ("GET", "HEAD") else ("this page is for looking only", 405)


def _rotation(arrival: Arrival) -> int | None:
    """Return which pass of the canary prompts an arrival asks: canaries are numbered, and take turns."""
    return int(arrival.id.rpartition("-")[2]) if arrival.kind == "canary" else None


def _die(_: object) -> None:
    os._exit(1)


def _quantile(ordered: list[float], q: float) -> float:
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else 0.0


if __name__ == "__main__":
    main()
