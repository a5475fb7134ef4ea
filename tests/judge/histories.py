"""Histories written by hand: a few requests and events with times in seconds."""

from __future__ import annotations

from typing import Any

from harness.guards.canary import Answer
from harness.observe.history import Event, EventKind, History, Request, RequestResult

S = 1_000_000_000


def event(at_s: float, kind: EventKind, **data: Any) -> Event:
    """Return an event; its id is its kind and time."""
    return Event(id=f"{kind}@{at_s:g}", at_ns=round(at_s * S), source="test", kind=kind, data=data)


def load(at_s: float, incarnation: str, *, took_s: float = 0.1, result: str = "ok", error: str = "") -> Request:
    """Return a user's request."""
    return Request(
        id=f"load@{at_s:g}",
        kind="load",
        planned_ns=round(at_s * S),
        sent_ns=round(at_s * S),
        first_token_ns=None,
        ended_ns=round((at_s + took_s) * S),
        endpoint="http://127.0.0.1:1",
        incarnation=incarnation,
        result=RequestResult(result),
        error=error,
    )


def canary(at_s: float, incarnation: str, answer: str | None, *, result: str = "ok", took_s: float = 0.1) -> Request:
    """Return a canary with its answer."""
    return Request(
        id=f"canary@{at_s:g}",
        kind="canary",
        planned_ns=round(at_s * S),
        sent_ns=round(at_s * S),
        first_token_ns=None,
        ended_ns=round((at_s + took_s) * S),
        endpoint="http://127.0.0.1:1",
        incarnation=incarnation,
        result=RequestResult(result),
        answer=None if answer is None else Answer(answer),
    )


def history(*things: Request | Event) -> History:
    """Return a history of these in time order."""
    requests = [thing for thing in things if isinstance(thing, Request)]
    events = [thing for thing in things if isinstance(thing, Event)]
    return History(
        requests=tuple(sorted(requests, key=lambda request: request.planned_ns)),
        events=tuple(sorted(events, key=lambda each: each.at_ns)),
    )


def before(seconds: float = 5.0) -> list[Request | Event]:
    """Return a healthy old engine under load from second 0 on."""
    things: list[Request | Event] = [
        event(-2, EventKind.ENGINE_STARTING, incarnation="old-1", expects="old"),
        event(-1, EventKind.ENGINE_READY, incarnation="old-1", took_s=1.0),
        event(0, EventKind.LOAD_STARTED, rate_rps=4),
    ]
    things += [load(at * 0.25, "old-1") for at in range(1, int(seconds * 4))]
    things += [canary(at * 0.5 + 0.1, "old-1", "old") for at in range(int(seconds * 2) - 1)]
    return things


def rollout(at_s: float = 5.0, incarnation: str = "new-1", ready_s: float = 6.0) -> list[Request | Event]:
    """Return publish and start of a new engine."""
    return [
        event(at_s, EventKind.PUBLISH_STARTED, version="new", how="atomic"),
        event(
            at_s + 0.05, EventKind.FAULT_INJECTED, fault="widen_tensor", fault_id="D08", proved=True, because="wider"
        ),
        event(at_s + 0.1, EventKind.ROLLOUT_STARTED, how="restart"),
        event(at_s + 0.2, EventKind.ENGINE_STARTING, incarnation=incarnation, expects="new"),
        event(ready_s, EventKind.ENGINE_READY, incarnation=incarnation, took_s=1.0),
    ]


def remedy(at_s: float = 9.0, incarnation: str = "new-2", ready_s: float = 10.0) -> list[Request | Event]:
    """Return a remedy whose engine answers rightly from `ready_s` on, until second 20."""
    things: list[Request | Event] = [
        event(at_s, EventKind.REMEDY_STARTED, what="repair"),
        event(at_s + 0.1, EventKind.ENGINE_STARTING, incarnation=incarnation, expects="new"),
        event(ready_s, EventKind.ENGINE_READY, incarnation=incarnation, took_s=1.0),
        event(20.5, EventKind.FAULT_UNDONE, fault="widen_tensor", proved=True, because="same weights", refused=[]),
    ]
    count = int((20 - ready_s) * 2)
    things += [canary(ready_s + 0.1 + at * 0.5, incarnation, "new") for at in range(count)]
    things += [load(ready_s + 0.2 + at * 0.25, incarnation) for at in range(count * 2)]
    return things


def ended(at_s: float = 20.0, **changes: Any) -> list[Request | Event]:
    """Return the end of load and of the scenario."""
    report = {"planned": 100, "recorded": 100, "dropped": 0, "lag_ms_p50": 0.1, "lag_ms_p99": 1.0, "lag_ms_max": 2.0}
    return [
        event(at_s, EventKind.LOAD_ENDED, **{**report, **changes}),
        event(at_s + 1, EventKind.NOTHING_LEFT, checked="containers"),
    ]
