"""Starts the loaders, tells them where to send, and hands on every record as it is written.

The load runs in processes of its own, because locust patches the standard library on import, and because one Python
process can only follow so many streams. All of them count from the same start; each sends its own share of the plan.
"""

from __future__ import annotations

import os
import threading
from array import array
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from harness.clock import NS_PER_S, now_ns
from harness.errors import LoadBroken
from harness.load.capacity import Capacity, capacity_here
from harness.load.child import END_LIMIT_S, LoaderChild
from harness.load.loaders import choose_loaders
from harness.load.plan import LoadPlan
from harness.load.report import Heartbeat, LoadReport, summary
from harness.load.sse import endpoint_address
from harness.load.tail import Tail
from harness.observe.history import Request, request_from_json

START_LIMIT_S = 60.0
LEAD_S = 0.1  # between the start command and the common start, for each loader


class LoadDriver:
    """The loaders of one run.

    `on_request` is called on a thread of the driver, once per arrival, in order of their ends as far as several loaders
    have one; `on_heartbeat` on the same thread, once per second and loader.
    `capacity` is what one loader is given at most; None: what was measured here, else fixed figures.
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
        capacity: Capacity | None = None,
    ) -> None:
        self.plan = plan
        cores = len(cpus) or os.cpu_count() or 1
        self.loaders = choose_loaders(plan, cores=cores, capacity=capacity or capacity_here())
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
        self._tail: Tail | None = None
        self._lock = threading.Lock()
        self._delivered = 0
        self._lag_ms = array("d")
        self._cpu_ratio_max = 0.0
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

    def require_running(self) -> None:
        """Return if every loader is at work and every record so far was handed on.

        Raises: LoadBroken when one has died: nothing that is waited for will come any more.
        """
        if self._report is not None:
            return
        if self._tail is not None and self._tail.error is not None:
            raise self._broken(f"a record could not be handed on: {self._tail.error}") from self._tail.error
        for child in self._children:
            if child.has_ended:
                raise self._broken(str(child.broken("died while load ran")))

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
        if self._tail is not None:
            self._tail.finish(limit_s)
        planned = [
            self.plan.due(self._start_ns, stop_ns, loader=child.number, loaders=self.loaders)
            for child, stop_ns in zip(self._children, stops_ns, strict=True)
        ]
        if self._tail is not None and self._tail.error is not None:
            raise self._broken(f"a record could not be handed on: {self._tail.error}") from self._tail.error
        recorded = [int(each["recorded"]) for each in ended]
        if any(codes) or planned != recorded or sum(planned) != self._delivered:
            raise self._broken(
                f"{sum(planned)} arrivals were due, the loaders recorded {sum(recorded)}, exit codes {codes}"
            )
        self.close()
        self._report = summary(ended, planned=sum(planned), lag_ms=self._lag_ms, cpu_ratio_max=self._cpu_ratio_max)
        return self._report

    def close(self) -> None:
        """End the loaders and everything in their groups. Idempotent."""
        with ExitStack() as stack:
            for child in self._children:
                stack.callback(child.kill)
        if self._tail is not None:
            self._tail.finish(END_LIMIT_S)

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
        files = [(child.heartbeats_path, self._deliver_heartbeat) for child in self._children]
        self._tail = Tail([*files, *((child.records_path, self._deliver) for child in self._children)])

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

    def _broken(self, because: str) -> LoadBroken:
        due = 0 if self._start_ns is None else self.plan.due(self._start_ns, now_ns())
        return LoadBroken(
            f"{because}; {self._delivered} records of {due} arrivals due by now ({len(self.plan.arrivals)} planned); "
            f"directory: {self._directory}"
        )
