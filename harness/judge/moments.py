"""The moments of a rollout, read from its history: when the fault acted, when it was remedied, when service was back.

Everything here is pure, so the runner can act on it while a scenario runs and a stored run can be judged anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

from harness.judge.reloads import Expected, expected_answers, is_right, is_wrong, reloads, sent_ns, suspects
from harness.observe.history import Event, EventKind, History, Request, RequestResult

RIGHT_IN_A_ROW = 3  # canaries that must be right, one after the other, before service counts as recovered


class Layer(StrEnum):
    """Who noticed, from the cheapest to the most expensive; `harmless`: there was nothing to notice."""

    HARMLESS = "harmless"
    PREFLIGHT = "preflight"
    STARTUP = "startup"
    EXIT = "exit"  # of an incident: the server ended with an exit code that a supervisor restarts
    HEALTH = "health"  # of an incident: `/health` no longer answered 200
    FIRST_REQUEST = "first_request"
    CANARY = "canary"
    CLIENT = "client"
    NEVER = "never"

    @property
    def rank(self) -> int:
        """Return the position from early (0) to never."""
        return list(Layer).index(self)


class Window(StrEnum):
    """The parts of a scenario that a claim can be about."""

    ALL = "all"
    BEFORE = "before"
    FAULTY = "faulty"
    RECOVERING = "recovering"
    AFTER = "after"


def fault_event(history: History) -> Event | None:
    """Return the event with which a fault began to act: the publish, the rollout or the incident that came first."""
    return history.first(EventKind.PUBLISH_STARTED, EventKind.ROLLOUT_STARTED, EventKind.INCIDENT_STARTED)


def fault_at_ns(history: History) -> int | None:
    """Return when the rollout that carries the fault began to touch what the engine reads."""
    event = fault_event(history)
    return None if event is None else event.at_ns


def struck_at_ns(history: History) -> dict[str, int]:
    """Return which incarnations an incident struck, and when."""
    return {event.data["incarnation"]: event.at_ns for event in history.of(EventKind.INCIDENT_STARTED)}


def service_changed(history: History) -> Event | None:
    """Return the event since which service has to come back: the remedy, or the rollout, or the incident, in this order."""
    return (
        history.first(EventKind.REMEDY_STARTED)
        or history.first(EventKind.ROLLOUT_STARTED)
        or history.first(EventKind.INCIDENT_STARTED)
    )


def remedy_at_ns(history: History) -> int | None:
    """Return when the remedy began."""
    event = history.first(EventKind.REMEDY_STARTED)
    return None if event is None else event.at_ns


def load_span(history: History) -> tuple[int, int] | None:
    """Return when load began and ended, in nanoseconds."""
    start, end = history.first(EventKind.LOAD_STARTED), history.last(EventKind.LOAD_ENDED)
    if start is None:
        return None
    if end is not None:
        return start.at_ns, end.at_ns
    return start.at_ns, max((request.ended_ns for request in history.requests), default=start.at_ns)


def window_span(history: History, window: Window) -> tuple[int, int] | None:
    """Return start and end of a window, or None when the scenario did not get there."""
    span = load_span(history)
    fault, remedy, recovered = fault_at_ns(history), remedy_at_ns(history), recovery_at_ns(history)
    if span is None:
        return None
    start, end = span
    if window is Window.ALL:
        return start, end
    if window is Window.BEFORE:
        return start, end if fault is None else fault
    if fault is None:
        return None
    if window is Window.FAULTY:
        return fault, next((at for at in (remedy, recovered) if at is not None), end)
    if window is Window.RECOVERING:
        return None if remedy is None else (remedy, end if recovered is None else recovered)
    return None if recovered is None else (recovered, end)


def requests_in(history: History, window: Window, *, canaries: bool) -> tuple[Request, ...]:
    """Return the canaries, or the other requests, whose planned start lies in the window."""
    span = window_span(history, window)
    if span is None:
        return ()
    start, end = span
    return tuple(r for r in history.requests if r.is_canary == canaries and start <= r.planned_ns < end)


def recovery_at_ns(history: History) -> int | None:
    """Return when service was back: the third right canary in a row, with no wrong answer and no failure after the first.

    Canaries ask the known prompts in turn. Each pass must be among the right ones, however many it takes: an engine that is
    wrong in one of them alone would else be back for as long as that is not asked.

    Counted from the remedy, or when nothing had to be remedied from the rollout or the incident. What goes wrong later, up
    to the end of the load, takes recovery back: it then counts from there. An engine whose log shows a load error since
    then has not recovered.
    """
    begun = service_changed(history)
    if begun is None:
        return None
    expected = expected_answers(history)
    errors = {
        event.data["incarnation"]
        for event in history.of(EventKind.LOG_LINE)
        if event.at_ns >= begun.at_ns and event.data.get("class") in ("load", "file")
    }
    # With no remedy the engine that was replaced goes on answering rightly: that is not what recovery is about.
    # One that got other weights while it ran counts from then on, if it says that it took them.
    refused = {each.incarnation for each in reloads(history) if not each.succeeded}
    started = {name: at_ns for name, at_ns in suspects(history, begun.at_ns, 2**63).items() if name not in refused}
    if begun.kind is EventKind.INCIDENT_STARTED:  # which the engine itself outlived
        started[begun.data["incarnation"]] = begun.at_ns
    since = [r for r in history.requests if r.planned_ns >= begun.at_ns and not r.is_ours]
    failed = [r.planned_ns for r in since if r.result is not RequestResult.OK or _is_wrong_canary(r, expected)]
    last_failed_ns = max(failed, default=begun.at_ns - 1)
    load = history.first(EventKind.LOAD_STARTED)
    passes = 1 if load is None else int(load.data.get("canary_passes", 1))  # older histories do not say
    run: list[Request] = []
    for canary in sorted((r for r in since if r.is_canary), key=lambda r: r.ended_ns):
        fits = (
            canary.planned_ns > last_failed_ns
            and is_right(canary, expected.get(canary.incarnation))
            and canary.incarnation not in errors
            and started.get(canary.incarnation, 2**63) <= sent_ns(canary)
        )
        if not fits or (run and run[-1].incarnation != canary.incarnation):
            run = []
        if fits:
            run.append(canary)
        if len(run) >= RIGHT_IN_A_ROW and _asks_every_pass(run, passes):
            return canary.ended_ns
    return None


def _asks_every_pass(canaries: Sequence[Request], passes: int) -> bool:
    asked = {canary.rotation for canary in canaries}
    return None in asked or len({number % passes for number in asked if number is not None and number >= 0}) == passes


def _is_wrong_canary(request: Request, expected: Mapping[str, Expected]) -> bool:
    return request.is_canary and is_wrong(request, expected.get(request.incarnation))
