"""How much a loader can do is found by raising the rate until it cannot."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from harness.errors import HarnessError
from harness.load import calibration
from harness.load.calibration import Climb, Step, calibrate_main, highest_kept, per_processor_s, token_server
from harness.load.capacity import FILE_NAME, capacity_here
from harness.observe.history import Request, RequestResult

MS = 1_000_000


def step(per_s: float, fault: str = "", *, cpu_ratio: float = 0.95) -> Step:
    return Step(per_s=per_s, lag_ms_p99=1.0, cpu_ratio=cpu_ratio, fault=fault)


def answered(
    planned_ns: int, *, lag_ms: int = 1, span_ms: int = 480, result: RequestResult = RequestResult.OK
) -> Request:
    return Request(
        id="load-1",
        kind="load",
        planned_ns=planned_ns,
        dispatched_ns=planned_ns + lag_ms * MS,
        sent_ns=planned_ns + lag_ms * MS,
        first_token_ns=planned_ns + 5 * MS,
        token_ns=(planned_ns + 5 * MS, planned_ns + (5 + span_ms) * MS),
        ended_ns=planned_ns + 600 * MS,
        endpoint="",
        incarnation="",
        result=result,
    )


def test_the_highest_step_below_the_first_that_was_not_kept_counts() -> None:
    assert highest_kept([step(100), step(200), step(300, "late"), step(400)]) == 200
    assert highest_kept([step(100, "late"), step(200)]) == 0
    assert highest_kept([step(100), step(200)]) == 200


@pytest.mark.parametrize(
    ("inside", "fault"),
    [
        ([answered(10 * MS)], ""),
        ([answered(10 * MS, lag_ms=51)], "dispatch lag p99 above 50 ms"),
        ([answered(10 * MS, result=RequestResult.RESET)], "1 of 1 requests failed (reset)"),
        ([answered(10 * MS, span_ms=900)], "the server took 1.88 times its planned time"),
        ([answered(1000 * MS)], "no request was planned"),
    ],
)
def test_a_step_is_kept_only_in_time_in_full_and_by_a_server_that_kept_its_pace(
    inside: list[Request], fault: str
) -> None:
    seen = calibration._judged(inside, [(5 * MS, 0.4), (500 * MS, 0.9)], span_ns=(0, 100 * MS), tokens=25)

    assert seen.fault == fault
    assert seen.cpu_ratio == 0.4
    assert seen.per_s == (0 if "no request" in fault else 250)


def test_events_are_counted_per_second_of_processor_time() -> None:
    second = 1_000_000_000
    requests = [answered(n * second) for n in range(10)]  # each ends 0.6 s later, with 2 events

    assert per_processor_s(requests, [(1 * second, 0.9), (3 * second, 0.5), (4 * second, 1.0)]) == 3 * 2 / (
        2 * 0.5 + 1.0
    )
    assert per_processor_s(requests, [(1 * second, 0.9)]) == 0.0


def test_a_real_loader_climbs_and_what_it_did_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibration, "EVENTS_STEPS", (250, 500))
    monkeypatch.setattr(calibration, "REQUESTS_STEPS", (10, 20))
    monkeypatch.setattr(calibration, "LAG_LIMIT_MS", 1e6)  # a machine that others use may be late; here it is not asked

    assert calibrate_main(["--into", str(tmp_path)]) == 0
    kept = json.loads((tmp_path / FILE_NAME).read_text())
    output = capsys.readouterr().out

    assert kept["events_per_s"] > 100
    assert kept["requests_per_s"] > 4
    assert kept["cores"] == len(os.sched_getaffinity(0))
    assert capacity_here(tmp_path).events_per_s == kept["events_per_s"] / 2
    assert output.count("dispatch lag p99") == 4
    assert str(tmp_path / FILE_NAME) in output


def test_a_loader_that_keeps_nothing_is_said_so_and_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        calibration, "climb", lambda *_, **__: Climb(steps=(step(3000, "late"),), events_per_processor_s=0.0)
    )

    assert calibrate_main(["--into", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "harness: a loader does not keep 3,000 events per second here: late\n"
    assert not list(tmp_path.iterdir())


def test_a_loader_that_others_kept_from_its_core_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = (step(3000), step(4500, "late", cpu_ratio=0.2), step(6750, "late", cpu_ratio=0.0))
    monkeypatch.setattr(calibration, "climb", lambda *_, **__: Climb(steps=steps, events_per_processor_s=0.0))

    assert calibrate_main(["--into", str(tmp_path)]) == 2
    assert "late at 4,500 events per second although it used only 20% of a core" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_server_that_does_not_start_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration.sys, "executable", "/bin/false")

    with pytest.raises(HarnessError, match="the server that loaders are measured against ended with 1"), token_server():
        pass
