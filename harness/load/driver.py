"""Starts the loaders, tells them where to send, and hands on every record as it is written.

The load runs in processes of its own, because locust patches the standard library on import, and because one Python
process can only follow so many streams. All of them count from the same start; each sends its own share of the plan.
"""

from __future__ import annotations

import json
import os
import threading
from array import array
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.clock import NS_PER_S, now_ns
from harness.errors import LoadBroken
from harness.load.child import END_LIMIT_S, LoaderChild
from harness.load.plan import LoadPlan, choose_loaders
from harness.load.sse import endpoint_address
from harness.observe.history import Request, RequestResult, request_from_json

START_LIMIT_S = 60.0
TAIL_EVERY_S = 0.02
LEAD_S = 0.1  # between the start command and the common start, for each loader


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """What one loader says of itself once per second; everything counts since the heartbeat before."""

    loader: int
    at_ns: int
    dispatched: int
    ended: int
    in_flight: int  # now
    lag_ms_max: float  # dispatch minus planned start
    loop_lag_ms_p99: float  # how late a timer of 5 ms was
    loop_lag_ms_max: float
    cpu_ratio: float  # of one core


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """How well the loaders kept the plan; latencies say nothing unless they did. Of several loaders the worst counts."""

    planned: int  # arrivals due until the stop
    recorded: int
    dropped: int  # beyond the in-flight limit
    late: int  # taken up too late to be sent
    lag_ms_p50: float  # dispatch minus planned start
    lag_ms_p99: float
    lag_ms_max: float
    loop_lag_ms_p99: float  # how late a timer of 5 ms was
    loop_lag_ms_max: float
    cpu_ratio: float  # of one core
    cpu_ratio_max: float  # in any second
    achieved_ratio: float  # sent by the stop, of those due
    closed_while_idle: int  # kept connections that the engine closed before they were used again: no failure
    loaders: int
    exit_code: int


class LoadDriver:
    """The loaders of one run.

    `on_request` is called on a thread of the driver, once per arrival, in order of their ends as far as several loaders
    have one; `on_heartbeat` on the same thread, once per second and loader.
    Raises: ScenarioInvalid when the plan is more than its loaders can keep.
    """

    def __init__(
        self,
        plan: LoadPlan,
        *,
        directory: Path,
        api_key: str,
        model: str,
        cpus: tuple[int, ...] = (),
        on_request: Callable[[Request], None],
        on_heartbeat: Callable[[Heartbeat], None] = lambda _: None,
        run_label: str,
        web_ui: bool = False,
    ) -> None:
        self.plan = plan
        self.loaders = choose_loaders(plan, cores=len(cpus) or os.cpu_count() or 1)
        self.web_ui_urls: tuple[str, ...] = ()  # of locust's own pages, one per loader; for people
        self._directory = directory
        self._api_key = api_key
        self._model = model
        self._cpus = cpus
        self._on_request = on_request
        self._on_heartbeat = on_heartbeat
        self._run_label = run_label
        self._web_ui = web_ui
        self._children: list[LoaderChild] = []
        self._tailer: threading.Thread | None = None
        self._all_written = threading.Event()
        self._lock = threading.Lock()
        self._delivered = 0
        self._lag_ms = array("d")
        self._cpu_ratio_max = 0.0
        self._callback_error: Exception | None = None
        self._start_ns: int | None = None
        self._report: LoadReport | None = None

    def spawn(self) -> None:
        """Start the loaders, which need a moment for their imports, without waiting for them.

        Raises: LoadBroken when they were started before or cannot be.
        """
        if self._children:
            raise LoadBroken("the load was started already")
        try:
            self._spawn()
        except OSError as error:
            self.close()
            raise LoadBroken(f'the load process cannot be started in "{self._directory}": {error}') from error

    def start(self, endpoint: str = "", incarnation: str = "") -> int:
        """Start the arrivals, and the loaders where that was not done; return the time that arrivals count from.

        The first arrivals go to `endpoint`; without one they end in `no_endpoint`.

        Raises: LoadBroken when they do not come up within their limit; nothing is left behind then.
        """
        if self._start_ns is not None:
            raise LoadBroken("the load was started already")
        if not self._children:
            self.spawn()
        try:
            ready = [child.news("ready", limit_s=START_LIMIT_S) for child in self._children]
            self.web_ui_urls = tuple(url for url in ready if url)
            if endpoint:
                self.admit(endpoint, incarnation)
            start_ns = now_ns() + round(LEAD_S * self.loaders * NS_PER_S)
            self._ask("start", start_ns=start_ns)
        except BaseException:
            self.close()
            raise
        self._start_ns = start_ns
        return start_ns

    def admit(self, endpoint: str, incarnation: str) -> None:
        """Send arrivals from now on to `endpoint`; those under way stay where they are.

        Raises: UsageError when it is not `http://HOST:PORT`, LoadBroken when a loader has died.
        """
        endpoint_address(endpoint)
        self._ask("admit", endpoint=endpoint, incarnation=incarnation)

    def stop(self, limit_s: float = 15.0) -> LoadReport:
        """Plan no more arrivals, wait for those under way, and return once every record was delivered.

        A request under way may take up to its own total limit; `limit_s` comes on top.
        Raises: LoadBroken when a loader died, records are missing, or `on_request` failed.
        """
        if self._report is not None:
            return self._report
        if self._start_ns is None:
            raise LoadBroken("the load was never started")
        stops_ns = [int(answer["stop_ns"]) for answer in self._ask("stop")]
        end_limit_s = self.plan.shape.limits.total_s + limit_s
        ended: list[dict[str, Any]] = [child.news("ended", limit_s=end_limit_s) for child in self._children]
        codes = [child.wait(limit_s) for child in self._children]
        self._all_written.set()
        if self._tailer is not None:
            self._tailer.join(limit_s)
        planned = [
            self.plan.due(self._start_ns, stop_ns, loader=child.number, loaders=self.loaders)
            for child, stop_ns in zip(self._children, stops_ns, strict=True)
        ]
        if self._callback_error is not None:
            raise self._broken(f"a record could not be handed on: {self._callback_error}") from self._callback_error
        recorded = [int(each["recorded"]) for each in ended]
        if any(codes) or planned != recorded or sum(planned) != self._delivered:
            raise self._broken(
                f"{sum(planned)} arrivals were due, the loaders recorded {sum(recorded)}, exit codes {codes}"
            )
        self.close()
        self._report = self._summary(planned=sum(planned), ended=ended)
        return self._report

    def close(self) -> None:
        """End the loaders and everything in their groups. Idempotent."""
        with ExitStack() as stack:
            for child in self._children:
                stack.callback(child.kill)
        self._all_written.set()
        if self._tailer is not None and self._tailer is not threading.current_thread():
            self._tailer.join(END_LIMIT_S)

    def _spawn(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        self.plan.save(self._directory / "plan.json")
        for number in range(self.loaders):
            # A core each, where there is one for each.
            own = self._cpus[number : number + 1] if 1 < self.loaders <= len(self._cpus) else self._cpus
            self._children.append(
                LoaderChild(
                    number,
                    loaders=self.loaders,
                    directory=self._directory,
                    model=self._model,
                    api_key=self._api_key,
                    cpus=own,
                    run_label=self._run_label,
                    web_ui=self._web_ui,
                )
            )
        self._tailer = threading.Thread(target=self._tail, name="load-tail", daemon=True)
        self._tailer.start()

    def _ask(self, do: str, **fields: Any) -> list[dict[str, Any]]:
        """Send one command to every loader and return their acknowledgements."""
        with self._lock:
            if not self._children:
                raise LoadBroken(f'the load is not running: it cannot be told to "{do}"')
            for child in self._children:
                child.tell(do, **fields)
            try:
                return [child.answer() for child in self._children]
            except LoadBroken as error:
                raise self._broken(str(error)) from error

    def _tail(self) -> None:
        """Hand on every whole line of the record files and heartbeats, until all are written and read."""
        with ExitStack() as stack:
            tails = [
                (stack.enter_context(path.open("rb")), deliver, bytearray())
                for child in self._children
                for path, deliver in (
                    (child.heartbeats_path, self._deliver_heartbeat),
                    (child.records_path, self._deliver),
                )
            ]
            while True:
                is_last = self._all_written.is_set()
                seen = 0
                for file, deliver, rest in tails:
                    *lines, tail = (bytes(rest) + file.read()).split(b"\n")
                    rest[:] = tail
                    for line in lines:
                        self._hand_on(deliver, line)
                    seen += len(lines)
                if is_last:
                    return
                if not seen:
                    self._all_written.wait(TAIL_EVERY_S)

    def _hand_on(self, deliver: Callable[[Any], None], line: bytes) -> None:
        try:
            deliver(json.loads(line))
        except Exception as error:  # raised again by stop(): a record that nobody saw must not go unnoticed
            self._callback_error = self._callback_error or error

    def _deliver(self, fields: Any) -> None:
        request = request_from_json(fields)
        if request.dispatched_ns is not None:
            self._lag_ms.append((request.dispatched_ns - request.planned_ns) / 1e6)
        self._on_request(request)
        self._delivered += 1

    def _deliver_heartbeat(self, fields: Any) -> None:
        heartbeat = Heartbeat(**fields)
        self._cpu_ratio_max = max(self._cpu_ratio_max, heartbeat.cpu_ratio)
        self._on_heartbeat(heartbeat)

    def _summary(self, *, planned: int, ended: list[dict[str, Any]]) -> LoadReport:
        lags = sorted(self._lag_ms)

        def lag(q: float) -> float:
            return lags[min(len(lags) - 1, int(q * len(lags)))] if lags else 0.0

        def total(name: str) -> int:
            return sum(int(each[name]) for each in ended)

        def worst(name: str) -> float:
            return max(float(each[name]) for each in ended)

        return LoadReport(
            planned=planned,
            recorded=total("recorded"),
            dropped=total(RequestResult.DROPPED),
            late=total(RequestResult.LATE),
            lag_ms_p50=lag(0.5),
            lag_ms_p99=lag(0.99),
            lag_ms_max=lag(1.0),
            loop_lag_ms_p99=worst("loop_lag_ms_p99"),
            loop_lag_ms_max=worst("loop_lag_ms_max"),
            cpu_ratio=worst("cpu_ratio"),
            cpu_ratio_max=max(self._cpu_ratio_max, worst("cpu_ratio")),
            achieved_ratio=total("on_time") / planned if planned else 1.0,
            closed_while_idle=total("closed_while_idle"),
            loaders=self.loaders,
            exit_code=0,
        )

    def _broken(self, because: str) -> LoadBroken:
        due = 0 if self._start_ns is None else self.plan.due(self._start_ns, now_ns())
        return LoadBroken(
            f"{because}; {self._delivered} records of {due} arrivals due by now ({len(self.plan.arrivals)} planned); "
            f"directory: {self._directory}"
        )
