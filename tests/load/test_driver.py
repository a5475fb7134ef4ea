"""The load process keeps its plan, tells the truth about it, and never outlives its parent."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Unpack
from urllib.error import HTTPError
from urllib.request import urlopen

import psutil
import pytest
from stub import Stub, logprob

from harness.clock import NS_PER_S, Deadline, poll_until, seconds_between
from harness.errors import LoadBroken, ScenarioInvalid, UsageError
from harness.load.driver import LoadDriver
from harness.load.plan import LoadPlan, make_plan
from harness.load.report import Heartbeat
from harness.load.shape import RequestLimits, ShapeOptions, constant, steady
from harness.observe.history import Request, RequestResult

KEY = "key-that-must-not-leak"
CANARIES = ((5, 6, 7), (8, 9))
LIMITS = RequestLimits(connect_s=2.0, first_token_s=5.0, gap_s=5.0, total_s=10.0)


def plan_of(*, rate_rps: float = 20.0, **options: Unpack[ShapeOptions]) -> LoadPlan:
    defaults: ShapeOptions = {"canary_ratio": 0.5, "output_tokens": 4, "limits": LIMITS}
    shape = steady(rate_rps=rate_rps, **{**defaults, **options})
    return make_plan(shape, seed=3, horizon_s=60.0, vocabulary_size=64, canary_prompts=CANARIES)


class Running:
    """A driver with what it delivered."""

    def __init__(
        self,
        directory: Path,
        plan: LoadPlan,
        on_request: Callable[[Request], None] | None = None,
        *,
        web_ui: bool = False,
    ) -> None:
        self.requests: list[Request] = []
        self.heartbeats: list[Heartbeat] = []
        self.directory = directory
        self.driver = LoadDriver(
            plan,
            directory=directory,
            api_key=KEY,
            model="m",
            on_request=on_request or self.requests.append,
            on_heartbeat=self.heartbeats.append,
            run_label="test-run",
            web_ui=web_ui,
        )

    @property
    def processes(self) -> list[psutil.Process]:
        marker = str(self.directory)
        return [child for child in psutil.Process().children() if marker in " ".join(child.cmdline())]

    @property
    def process(self) -> psutil.Process:
        (process,) = self.processes
        return process

    def wait_for(self, count: int, wanted: Callable[[Request], bool] = lambda _: True) -> None:
        poll_until(
            lambda: True if sum(map(wanted, self.requests)) >= count else None,
            what=f"{count} records",
            limit_s=30.0,
            every_s=0.02,
        )


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    with ExitStack() as stack:

        def started(
            plan: LoadPlan | None = None,
            on_request: Callable[[Request], None] | None = None,
            *,
            web_ui: bool = False,
        ) -> Running:
            running = Running(tmp_path / "load", plan or plan_of(), on_request, web_ui=web_ui)
            stack.callback(running.driver.close)
            running.driver.start()
            return running

        yield started


def ended_as(requests: list[Request], *results: RequestResult) -> list[Request]:
    return [request for request in requests if request.result in results]


def test_every_arrival_is_recorded_and_the_stamps_are_true(start: Callable[..., Running]) -> None:
    with Stub(pace_s=0.005) as stub:
        running = start()
        running.driver.admit(stub.endpoint, "old-1")
        running.wait_for(40, lambda request: request.result is RequestResult.OK)
        command, environment = running.process.cmdline(), running.process.environ()
        report = running.driver.stop()
        served = {tuple(one.body["prompt"]): one for one in stub.served if not one.is_canary}
    requests = running.requests
    prompts = {arrival.id: arrival.prompt for arrival in running.driver.plan.arrivals}

    assert report.planned == report.recorded == len(requests) == len({request.id for request in requests})
    assert (report.exit_code, report.dropped, report.late, report.loaders) == (0, 0, 0, 1)
    assert 0 <= report.lag_ms_p50 <= report.lag_ms_p99 <= report.lag_ms_max
    assert 0 < report.cpu_ratio < 2
    assert 0 <= report.loop_lag_ms_p99 <= report.loop_lag_ms_max
    assert 0.5 < report.achieved_ratio <= 1
    assert {request.result for request in requests} <= {RequestResult.OK, RequestResult.NO_ENDPOINT}
    ok = ended_as(requests, RequestResult.OK)
    assert {request.kind for request in ok} == {"load", "canary"}
    for request in ok:
        assert (request.endpoint, request.incarnation) == (stub.endpoint, "old-1")
        assert request.sent_ns is not None
        assert request.dispatched_ns is not None
        assert request.planned_ns <= request.dispatched_ns <= request.sent_ns <= request.ended_ns
        assert request.connection == "fresh"
        if request.is_canary:
            assert request.prompt_logprobs == tuple(tuple(map(logprob, row[1:])) for row in CANARIES)
            assert request.first_token_ns is None
            assert request.rotation == 0  # both prompts fit into one pass: the number of a pass, not of the canary
        else:
            sent_ns = served[prompts[request.id]].sent_ns
            assert len(sent_ns) == len(request.token_ns) == request.output_tokens == 4
            errors_s = [(seen - sent) / NS_PER_S for seen, sent in zip(request.token_ns, sent_ns, strict=True)]
            assert all(0 <= error_s < 1 for error_s in errors_s)
    # The file has the history's own layout, and the key is nowhere.
    lines = (running.directory / "requests-0.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [json.loads(json.dumps(asdict(request))) for request in requests]
    assert "<html" in (running.directory / "locust-0.html").read_text()
    assert KEY not in " ".join(command)
    assert environment["ROLLOUT_HARNESS_RUN"] == "test-run"
    for path in running.directory.iterdir():
        assert KEY not in path.read_text(), path
    assert running.driver.stop() == report


def test_arrivals_go_where_they_were_sent_last(start: Callable[..., Running]) -> None:
    with Stub() as old, Stub() as new:
        running = start()
        running.wait_for(5)
        running.driver.admit(old.endpoint, "old-1")
        running.wait_for(5, lambda request: request.incarnation == "old-1")
        running.driver.admit(new.endpoint, "new-2")
        seen_by_old = len(old.served)
        running.wait_for(5, lambda request: request.incarnation == "new-2")
        running.driver.stop()
        assert len(old.served) <= seen_by_old + 1  # at most one was on its way
        assert len(new.served) == len([request for request in running.requests if request.incarnation == "new-2"])
    order = [request.incarnation for request in sorted(running.requests, key=lambda request: request.planned_ns)]

    assert order == sorted(order, key=["", "old-1", "new-2"].index)
    nowhere = ended_as(running.requests, RequestResult.NO_ENDPOINT)
    assert len(nowhere) >= 5
    for request in nowhere:
        assert (request.endpoint, request.incarnation, request.sent_ns) == ("", "", None)


def test_several_loaders_share_one_plan_and_one_start(start: Callable[..., Running]) -> None:
    with Stub() as stub:
        running = start(plan_of(loaders=3))
        start_ns = running.driver._start_ns
        running.driver.admit(stub.endpoint, "old-1")
        running.wait_for(40, lambda request: request.result is RequestResult.OK)
        poll_until(
            lambda: {0, 1, 2} <= {beat.loader for beat in running.heartbeats} or None, what="heartbeats", limit_s=20.0
        )
        assert len(running.processes) == 3
        report = running.driver.stop()
    planned = {arrival.id: arrival.planned_ns(start_ns) for arrival in running.driver.plan.arrivals}

    assert start_ns is not None
    assert report.loaders == 3
    assert report.planned == report.recorded == len(running.requests) == len({one.id for one in running.requests})
    assert len(stub.served) == len(ended_as(running.requests, RequestResult.OK))
    for loader in range(3):
        shard = {arrival.id for arrival in running.driver.plan.shard(loader, 3)}
        assert {request.id for request in running.requests if request.loader == loader} <= shard
        assert (running.directory / f"locust-{loader}.html").exists()
    assert all(request.planned_ns == planned[request.id] for request in running.requests)


def test_heartbeats_come_every_second_and_count_what_happened(start: Callable[..., Running]) -> None:
    with Stub(pace_s=0.1) as stub:
        running = start()
        running.driver.admit(stub.endpoint, "old-1")
        poll_until(lambda: len(running.heartbeats) >= 3 or None, what="3 heartbeats", limit_s=30.0)
        running.driver.stop()
    beats = running.heartbeats

    assert all(1.0 <= seconds_between(a.at_ns, b.at_ns) < 5.0 for a, b in pairwise(beats))
    assert 0 < sum(beat.dispatched for beat in beats) <= len(running.requests)
    assert sum(beat.ended for beat in beats) <= len(running.requests)
    assert max(beat.in_flight for beat in beats) > 0
    assert all(0 <= beat.loop_lag_ms_p99 <= beat.loop_lag_ms_max for beat in beats)
    assert all(0 < beat.cpu_ratio < 2 for beat in beats)
    lines = (running.directory / "heartbeats-0.jsonl").read_text().splitlines()
    assert [Heartbeat(**json.loads(line)) for line in lines] == beats


def test_kept_connections_are_a_stratum_of_their_own(start: Callable[..., Running]) -> None:
    with Stub() as stub:
        running = start(plan_of(keep_alive_ratio=0.5, canary_ratio=0.0))
        running.driver.admit(stub.endpoint, "old-1")
        running.wait_for(40, lambda request: request.result is RequestResult.OK)
        report = running.driver.stop()
    kept = {arrival.id for arrival in running.driver.plan.arrivals if arrival.keep_alive}
    ok = ended_as(running.requests, RequestResult.OK)

    assert {one.connection for one in ok if one.id in kept} == {"new", "reused"}
    assert {one.connection for one in ok if one.id not in kept} == {"fresh"}
    assert stub.connections < len(stub.served)
    assert report.closed_while_idle == 0


def test_a_loader_that_was_held_up_says_that_it_was_late(start: Callable[..., Running]) -> None:
    with Stub() as stub:
        running = start(plan_of(late_s=0.5))
        running.driver.admit(stub.endpoint, "old-1")
        running.wait_for(3, lambda request: request.result is RequestResult.OK)
        running.process.suspend()
        suspended = Deadline.after(1.5)
        poll_until(lambda: suspended.is_expired() or None, what="1.5 s", limit_s=10.0)
        running.process.resume()
        running.wait_for(1, lambda request: request.result is RequestResult.LATE)
        report = running.driver.stop()
    late = ended_as(running.requests, RequestResult.LATE)

    assert report.late == len(late) > 5
    assert report.lag_ms_max > 1000
    assert report.loop_lag_ms_max > 1000
    assert report.achieved_ratio < 1
    for request in late:
        assert request.is_ours
        assert request.sent_ns is None
        assert request.dispatched_ns is not None
        assert request.dispatched_ns - request.planned_ns > 0.5 * NS_PER_S
    assert report.planned == report.recorded


def test_the_page_of_locust_can_be_looked_at_and_nothing_more(start: Callable[..., Running]) -> None:
    running = start(web_ui=True)
    running.wait_for(3)
    (url,) = running.driver.web_ui_urls

    assert url.startswith("http://127.0.0.1:")
    assert b"<title>Locust" in urlopen(url, timeout=10).read()
    assert json.loads(urlopen(f"{url}/stats/requests", timeout=10).read())["stats"]
    for path in ("swarm", "stop", "stats/reset"):
        with pytest.raises(HTTPError, match="405"):
            urlopen(f"{url}/{path}", data=b"user_count=9&spawn_rate=9", timeout=10)
    assert running.driver.stop().recorded == len(running.requests)


def test_a_server_that_has_gone_refuses(start: Callable[..., Running]) -> None:
    running = start()
    with Stub() as stub:
        running.driver.admit(stub.endpoint, "old-1")
        running.wait_for(3, lambda request: request.result is RequestResult.OK)
    running.wait_for(3, lambda request: request.result is RequestResult.REFUSED)
    running.driver.stop()

    assert {request.endpoint for request in ended_as(running.requests, RequestResult.REFUSED)} == {stub.endpoint}
    with pytest.raises(UsageError, match="is not http://HOST:PORT"):
        running.driver.admit("https://example.org", "x")


def test_a_freeze_shows_in_latencies_from_the_planned_start(start: Callable[..., Running]) -> None:
    with Stub() as stub:
        running = start()
        running.driver.admit(stub.endpoint, "old-1")
        running.wait_for(10, lambda request: request.result is RequestResult.OK)
        freeze_ns = max(request.ended_ns for request in running.requests) + round(0.3 * NS_PER_S)
        thaw_ns = freeze_ns + 2 * NS_PER_S
        stub.freeze(freeze_ns, thaw_ns)
        running.wait_for(20, lambda request: request.planned_ns > thaw_ns)
        report = running.driver.stop()
        served = {tuple(one.body["prompt"]): one for one in stub.served if not one.is_canary}
    due = [arrival for arrival in running.driver.plan.arrivals if arrival.kind == "load"]
    prompts = {arrival.id: arrival.prompt for arrival in due}
    caught = [one for one in running.requests if not one.is_canary and freeze_ns < one.planned_ns < thaw_ns]

    # Open loop: the stall did not slow the arrivals down.
    start_ns = min(one.planned_ns - round(a.at_s * NS_PER_S) for one in caught for a in due if a.id == one.id)
    assert len(caught) == sum(freeze_ns < arrival.planned_ns(start_ns) < thaw_ns for arrival in due) >= 15
    assert sum(one.sent_ns is not None and one.sent_ns < thaw_ns for one in caught) > 0.8 * len(caught)
    assert report.planned == report.recorded
    for request in caught:
        waited_s = (thaw_ns - request.planned_ns) / NS_PER_S
        truth_s = (served[prompts[request.id]].sent_ns[0] - request.planned_ns) / NS_PER_S
        assert request.first_token_s is not None
        assert request.first_token_s >= truth_s >= waited_s
        assert request.first_token_s - truth_s < 0.5


def test_requests_under_way_at_the_stop_are_waited_for(start: Callable[..., Running]) -> None:
    with Stub(pace_s=0.3) as stub:
        running = start()
        running.driver.admit(stub.endpoint, "old-1")
        poll_until(lambda: len(stub.served) >= 8 or None, what="8 requests", limit_s=20.0)
        report = running.driver.stop()

    assert report.planned == len(running.requests)
    assert len(ended_as(running.requests, RequestResult.OK)) == len(stub.served)


def test_arrivals_beyond_the_limit_are_dropped_and_not_delayed(start: Callable[..., Running]) -> None:
    limits = RequestLimits(connect_s=1.0, first_token_s=1.0, gap_s=1.0, total_s=1.0)
    with Stub(lambda _: "silence") as stub:
        running = start(plan_of(limits=limits, in_flight_max=2))
        running.driver.admit(stub.endpoint, "old-1")
        running.wait_for(10, lambda request: request.result is RequestResult.DROPPED)
        report = running.driver.stop()
    dropped = ended_as(running.requests, RequestResult.DROPPED)

    assert report.dropped == len(dropped) >= 10
    assert report.achieved_ratio < 1
    assert all(request.is_ours and request.sent_ns is None for request in dropped)


def death_of(driver: LoadDriver) -> str | None:
    try:
        driver.require_running()
    except LoadBroken as broken:
        return str(broken)
    return None


def test_a_killed_load_process_is_noticed_by_name(start: Callable[..., Running]) -> None:
    with Stub() as stub:
        running = start()
        running.driver.admit(stub.endpoint, "old-1")
        running.wait_for(5)
        running.driver.require_running()
        os.kill(running.process.pid, signal.SIGKILL)
        said = poll_until(lambda: death_of(running.driver), what="the driver notices", limit_s=10.0)
        assert re.search(r"loader 0 died .*exit code -9.*loader-0\.log", said)
        with pytest.raises(LoadBroken, match=r"loader 0 died .*exit code -9.*loader-0\.log"):
            running.driver.stop()
    with pytest.raises(LoadBroken):
        running.driver.admit(stub.endpoint, "old-2")


def test_a_lost_record_is_noticed(start: Callable[..., Running]) -> None:
    running = start()
    running.wait_for(10)
    os.truncate((running.directory / "requests-0.jsonl"), 0)  # what is written next lies before what was read
    poll_until(lambda: (running.directory / "requests-0.jsonl").stat().st_size or None, what="a record", limit_s=20.0)
    with pytest.raises(LoadBroken, match=r"(arrivals were due|could not be handed on).*; \d+ records of"):
        running.driver.stop()


def test_a_callback_that_fails_breaks_the_load(start: Callable[..., Running]) -> None:
    def fail(request: Request) -> None:
        raise RuntimeError(f"cannot take {request.id}")

    running = start(on_request=fail)
    poll_until(lambda: (running.directory / "requests-0.jsonl").stat().st_size or None, what="a record", limit_s=20.0)
    with pytest.raises(LoadBroken, match="a record could not be handed on: cannot take"):
        running.driver.stop()


def test_a_load_process_that_cannot_start_says_why_and_is_gone(tmp_path: Path) -> None:
    driver = LoadDriver(
        plan_of(), directory=tmp_path, api_key=KEY, model="m", cpus=(4095,), on_request=print, run_label="r"
    )
    with pytest.raises(
        LoadBroken, match=r"died before it could say \"ready\"; exit code 1.*last line of its log: \"OSError"
    ):
        driver.start()
    with pytest.raises(LoadBroken, match="was never started"):
        driver.stop()
    driver.close()

    assert not [child for child in psutil.Process().children() if str(tmp_path) in " ".join(child.cmdline())]


def test_a_plan_that_cannot_be_kept_is_refused_before_anything_starts(tmp_path: Path) -> None:
    shape = constant(rate_rps=400.0, output_tokens=50, canary_ratio=0.0)
    plan = make_plan(shape, seed=1, horizon_s=10.0, vocabulary_size=64, canary_prompts=())
    with pytest.raises(ScenarioInvalid, match="the plan cannot be kept"):
        LoadDriver(plan, directory=tmp_path / "d", api_key=KEY, model="m", cpus=(0,), on_request=print, run_label="r")

    assert not (tmp_path / "d").exists()


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    driver = LoadDriver(plan_of(), directory=tmp_path / "file", api_key=KEY, model="m", on_request=print, run_label="r")
    with pytest.raises(LoadBroken, match=r"cannot be started in .*/file"):
        driver.start()


PARENT = """
import sys
from pathlib import Path
from harness.load.driver import LoadDriver
from harness.load.plan import LoadPlan
directory = Path(sys.argv[1])
plan = LoadPlan.load(directory / "made.json")
driver = LoadDriver(plan, directory=directory, api_key="k", model="m", on_request=lambda _: None, run_label="r")
driver.start()
print(driver._children[0]._process.pid, flush=True)
sys.stdin.read()
"""


def test_the_load_process_does_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    plan_of().save(tmp_path / "made.json")
    command = [sys.executable, "-c", PARENT, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        load = psutil.Process(int(parent.stdout.readline()))
        assert load.is_running()
        parent.kill()
        parent.wait(10)
        poll_until(lambda: (not _is_alive(load)) or None, what="end of the load process", limit_s=10.0)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_the_driver_brings_neither_locust_nor_gevent_into_this_process() -> None:
    code = "import sys, harness.load, harness.load.driver; print({'locust', 'gevent'} & set(sys.modules))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)

    assert output.stdout.strip() == "set()"
