"""Runs made by hand: a rollout whose weights are silently wrong until a canary notices, and its guarded twin."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from harness.guards.canary import Answer
from harness.judge.verdict import Finding, Verdict
from harness.observe.history import Event, EventKind, History, Request, RequestResult
from harness.report.store import RunRecord, ScenarioRecord

ORIGIN_NS = 5_000_000_000_000
ABOUT = """A tensor of the new checkpoint is 32 columns wider than its config says.

Must hold: nobody is answered from it.
Source: incident write-up, "expected [4096, 12288], got [4096, 12320]"."""


class Story:
    """Write events and requests by seconds since the load started."""

    def __init__(self, seed: int = 1) -> None:
        self.random = Random(seed)
        self.events: list[Event] = []
        self.requests: list[Request] = []

    def event(self, at_s: float, kind: EventKind, **data: Any) -> str:
        event_id = f"e{len(self.events)}"
        at_ns = ORIGIN_NS + int(at_s * 1e9)
        self.events.append(Event(id=event_id, at_ns=at_ns, source="test", kind=kind, data=data))
        return event_id

    def request(
        self,
        at_s: float,
        latency_s: float,
        incarnation: str,
        result: RequestResult = RequestResult.OK,
        answer: Answer | None = None,
        error: str = "",
    ) -> str:
        request_id = f"r{len(self.requests)}"
        planned_ns = ORIGIN_NS + int(at_s * 1e9)
        is_ok = result is RequestResult.OK
        self.requests.append(
            Request(
                id=request_id,
                kind="load" if answer is None else "canary",
                planned_ns=planned_ns,
                sent_ns=planned_ns + 1_000_000,
                first_token_ns=planned_ns + int(latency_s * 4e8) if is_ok else None,
                ended_ns=planned_ns + int(latency_s * 1e9),
                endpoint="http://127.0.0.1:1",
                incarnation=incarnation,
                result=result,
                status=200 if is_ok else None,
                error=error,
                answer=answer,
            )
        )
        return request_id

    def traffic(
        self,
        start_s: float,
        end_s: float,
        incarnation: str,
        *,
        rate_rps: float = 4.0,
        median_s: float = 0.12,
        result: RequestResult = RequestResult.OK,
        answer: Answer | None = None,
    ) -> None:
        at_s = start_s
        while (at_s := at_s + self.random.expovariate(rate_rps)) < end_s:
            latency_s = median_s * self.random.lognormvariate(0.0, 0.35)
            self.request(at_s, latency_s, incarnation, result, answer)

    def history(self) -> History:
        return History(
            requests=tuple(sorted(self.requests, key=lambda request: request.planned_ns)),
            events=tuple(sorted(self.events, key=lambda event: event.at_ns)),
        )


def unguarded_story(rate_rps: float = 6.0, *, stretch: float = 1.0) -> Story:
    story = Story()

    def t(seconds: float) -> float:
        return seconds * stretch

    story.event(-6.0, EventKind.ENGINE_STARTING, incarnation="old-1", expects="old", launch={})
    story.event(-1.0, EventKind.ENGINE_READY, incarnation="old-1", took_s=5.0)
    story.event(-0.5, EventKind.TRAFFIC_ADMITTED, incarnation="old-1", endpoint="http://127.0.0.1:1", expects="old")
    story.event(
        -0.2,
        EventKind.FAULT_INJECTED,
        fault="widen_tensor",
        fault_id="D08",
        proved=True,
        because='"model.layers.1.mlp.down_proj.weight" is [128, 288], was [128, 256]',
        before={"shape": [128, 256], "bytes": 65536},
        after={"shape": [128, 288], "bytes": 73728},
    )
    story.event(0.0, EventKind.LOAD_STARTED, plan_sha256="0" * 64, arrivals=300, rate_rps=rate_rps, seed=1)
    story.event(0.1, EventKind.HEALTH, incarnation="old-1", status=200, took_ms=2.0)
    story.event(t(8.0), EventKind.PUBLISH_STARTED, version="new", how="overwrite")
    story.event(t(8.4), EventKind.PUBLISH_ENDED, version="new", how="overwrite", weights_id="abc")
    story.event(t(8.5), EventKind.ROLLOUT_STARTED, how="restart")
    story.event(t(9.0), EventKind.ENGINE_STOPPED, incarnation="old-1", exit_code=0, how="SIGTERM")
    story.event(t(9.1), EventKind.ENGINE_STARTING, incarnation="new-2", expects="new", launch={})
    story.event(t(15.2), EventKind.ENGINE_READY, incarnation="new-2", took_s=6.1)
    story.event(t(15.3), EventKind.TRAFFIC_ADMITTED, incarnation="new-2", endpoint="http://127.0.0.1:2", expects="new")
    story.event(t(15.3), EventKind.HEALTH, incarnation="new-2", status=200, took_ms=2.0)
    story.event(t(15.4), EventKind.ROLLOUT_ENDED, how="restart", completed=True, because="ready")
    story.event(t(19.0), EventKind.DETECTION_SEEN, layer="canary", because="a canary was answered by neither")
    story.event(t(19.2), EventKind.REMEDY_STARTED, what="publish old, restart")
    story.event(t(19.5), EventKind.ENGINE_DIED, incarnation="new-2", exit_code=-9)
    story.event(t(19.6), EventKind.ENGINE_STARTING, incarnation="old-3", expects="old", launch={})
    story.event(t(25.0), EventKind.ENGINE_READY, incarnation="old-3", took_s=5.4)
    story.event(t(25.1), EventKind.CANARY_CHECKED, incarnation="old-3", answer="old")
    story.event(t(25.2), EventKind.TRAFFIC_ADMITTED, incarnation="old-3", endpoint="http://127.0.0.1:3", expects="old")
    story.event(t(25.3), EventKind.HEALTH, incarnation="old-3", status=200, took_ms=2.0)
    story.event(t(25.3), EventKind.REMEDY_ENDED, what="publish old, restart", completed=True, because="ready")
    story.event(t(27.0), EventKind.RECOVERY_SEEN, because="3 canaries right in a row")
    story.event(t(36.0), EventKind.PHASE_ENDED, phase="prepare", took_s=0.42)
    story.event(t(36.0), EventKind.PHASE_ENDED, phase="engine", took_s=17.2)
    story.event(t(36.0), EventKind.PHASE_ENDED, phase="load", took_s=36.0)
    story.event(t(36.0), EventKind.PHASE_ENDED, phase="judge", took_s=0.11)
    story.event(t(36.0), EventKind.LOAD_ENDED, planned=300, recorded=300, dropped=0, lag_ms_p99=1.2, exit_code=0)
    story.event(t(36.5), EventKind.ENGINE_STOPPED, incarnation="old-3", exit_code=0, how="SIGTERM")
    story.traffic(t(0.0), t(8.5), "old-1", rate_rps=rate_rps)
    story.traffic(t(8.5), t(9.2), "old-1", rate_rps=rate_rps, median_s=0.05, result=RequestResult.RESET_MID_STREAM)
    story.traffic(t(9.2), t(15.3), "", rate_rps=rate_rps, median_s=0.004, result=RequestResult.NO_ENDPOINT)
    story.traffic(t(15.3), t(15.9), "new-2", rate_rps=rate_rps, median_s=0.9)
    story.traffic(t(15.9), t(19.2), "new-2", rate_rps=rate_rps, median_s=0.16)
    story.traffic(t(19.2), t(19.6), "new-2", rate_rps=rate_rps * 2, median_s=0.05, result=RequestResult.HTTP_5XX)
    story.traffic(t(19.6), t(25.2), "", rate_rps=rate_rps, median_s=0.004, result=RequestResult.NO_ENDPOINT)
    story.traffic(t(25.2), t(36.0), "old-3", rate_rps=rate_rps, median_s=0.13)
    for step in range(7):
        story.request(t(0.5 + 1.1 * step), 0.2, "old-1", answer=Answer.OLD)
    for step in range(4):
        story.request(t(15.6 + 0.8 * step), 0.25, "new-2", answer=Answer.NEITHER)
    for step in range(10):
        story.request(t(25.5 + 1.0 * step), 0.22, "old-3", answer=Answer.OLD)
    return story


def guarded_story() -> Story:
    story = Story(seed=2)
    story.event(-6.0, EventKind.ENGINE_STARTING, incarnation="old-1", expects="old", launch={})
    story.event(-1.0, EventKind.ENGINE_READY, incarnation="old-1", took_s=5.0)
    story.event(-0.5, EventKind.TRAFFIC_ADMITTED, incarnation="old-1", endpoint="http://127.0.0.1:1", expects="old")
    story.event(0.0, EventKind.LOAD_STARTED, plan_sha256="0" * 64, arrivals=60, rate_rps=4.0, seed=1)
    story.event(3.0, EventKind.ROLLOUT_STARTED, how="restart")
    story.event(
        3.1, EventKind.GUARD_REFUSED, guard="preflight", findings=[{"id": "shape_differs", "seen": "[128, 288]"}]
    )
    story.event(3.2, EventKind.REMEDY_STARTED, what="keep serving old")
    story.event(3.3, EventKind.REMEDY_ENDED, what="keep serving old", completed=True, because="nothing was changed")
    story.event(12.0, EventKind.LOAD_ENDED, planned=60, recorded=60, dropped=0, exit_code=0)
    story.traffic(0.0, 12.0, "old-1")
    for step in range(11):
        story.request(0.4 + step, 0.2, "old-1", answer=Answer.OLD)
    return story


def scenario(directory: Path, story: Story, **changes: Any) -> ScenarioRecord:
    fields: dict[str, Any] = {
        "name": "widened_tensor_on_restart",
        "mode": "unguarded",
        "directory": directory,
        "declaration": {"name": "widened_tensor_on_restart", "about": ABOUT, "faults": []},
        "history": story.history(),
        "findings": (
            Finding(claim="layer_as_expected", verdict=Verdict.HELD, because="noticed by canary", evidence=("e17",)),
            Finding(
                claim="recovered(within_s=90)", verdict=Verdict.BROKEN, because="not seen within 90 s", evidence=("r0",)
            ),
        ),
        "verdict": Verdict.BROKEN,
        "layer": "canary",
        "measured": {
            "detected_after_s": 10.99,
            "exposed_answers_lower": 9,
            "exposed_answers_upper": 21,
            "recovered_after_s": 7.8,
            "requests": 214,
            "availability_ratio": 0.6412,
            "latency_ms_p50_before": 121.4,
            "latency_ms_p50_after": 131.0,
            "engine_starts": 3,
            "harness_own_s": 0.53,
        },
    }
    return ScenarioRecord(**{**fields, **changes})


def run_of(directory: Path, *scenarios: ScenarioRecord, **changes: Any) -> RunRecord:
    fields: dict[str, Any] = {
        "name": "2026-01-02-030405-abcd",
        "directory": directory,
        "engine_label": "vllm-cpu-0.32.0",
        "engine_kind": "container",
        "seed": 7,
        "command": "harness run --engine container --seed 7",
        "commit": "0123abc (uncommitted changes)",
        "started_at": "2026-01-02T03:04:05+00:00",
        "machine": {"cpu": "2 cores", "memory": "24 GiB", "gpu": "none"},
        "scenarios": scenarios,
        "is_complete": True,
    }
    return RunRecord(**{**fields, **changes})


@pytest.fixture
def unguarded() -> Callable[..., Story]:
    return unguarded_story


@pytest.fixture
def guarded() -> Callable[..., Story]:
    return guarded_story


@pytest.fixture
def make_scenario(tmp_path: Path) -> Callable[..., ScenarioRecord]:
    def make(story: Story, **changes: Any) -> ScenarioRecord:
        directory = tmp_path / "scenarios" / f"{len(list(tmp_path.rglob('*')))}"
        directory.mkdir(parents=True)
        return scenario(directory, story, **changes)

    return make


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., RunRecord]:
    def make(*scenarios: ScenarioRecord, **changes: Any) -> RunRecord:
        return run_of(tmp_path, *scenarios, **changes)

    return make
