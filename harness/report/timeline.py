"""What a timeline picture shows, in seconds since the load started: windows, moments, lives of engines, steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from harness.clock import seconds_between
from harness.judge.detection import detection
from harness.judge.moments import Window, recovery_at_ns, window_span
from harness.observe.history import Event, EventKind, History

_STEPS = {
    EventKind.PUBLISH_STARTED: ("publish", EventKind.PUBLISH_ENDED),
    EventKind.ROLLOUT_STARTED: ("rollout", EventKind.ROLLOUT_ENDED),
    EventKind.REMEDY_STARTED: ("remedy", EventKind.REMEDY_ENDED),
}
_LIVES = {
    EventKind.ENGINE_STARTING: "starting",
    EventKind.ENGINE_READY: "ready",
    EventKind.TRAFFIC_ADMITTED: "serving",
    EventKind.ENGINE_NOT_READY: "dead",
    EventKind.ENGINE_DIED: "dead",
    EventKind.ENGINE_STOPPED: "stopped",
}
_GUARDS = (EventKind.GUARD_PASSED, EventKind.GUARD_REFUSED, EventKind.GUARD_ACTED, EventKind.CANARY_CHECKED)
_DEFINING = (
    EventKind.PUBLISH_STARTED,
    EventKind.ROLLOUT_ENDED,
    EventKind.DETECTION_SEEN,
    EventKind.REMEDY_STARTED,
    EventKind.REMEDY_ENDED,
    EventKind.RECOVERY_SEEN,
    EventKind.LOAD_ENDED,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Something that lasted; `kind` is a window, a step or a state of an engine."""

    kind: str
    start_s: float
    end_s: float
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Something that happened at one time."""

    kind: str
    at_s: float
    label: str
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One start of an engine: its states, what its health route said, and how it ended."""

    incarnation: str
    states: tuple[Span, ...]
    health: tuple[Span, ...]  # kind "healthy" or "unhealthy"
    end: Moment | None  # kind "dead" or "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Everything the picture draws besides requests."""

    origin_ns: int
    end_s: float
    is_cut: bool  # the load never ended: the run was stopped or died
    windows: tuple[Span, ...]
    moments: tuple[Moment, ...]
    lives: tuple[Life, ...]
    steps: tuple[Span, ...]
    guards: tuple[Moment, ...]

    def seconds(self, at_ns: int) -> float:
        """Return a monotonic time as seconds since the load started."""
        return seconds_between(self.origin_ns, at_ns)


def read_timeline(history: History) -> Timeline:
    """Read what happened when; a history cut at any point gives what is there."""
    origin_ns = load_origin_ns(history)
    end_s = _end_s(history, origin_ns)
    return Timeline(
        origin_ns=origin_ns,
        end_s=end_s,
        is_cut=history.first(EventKind.LOAD_ENDED) is None,
        windows=_windows(history, origin_ns, end_s),
        moments=_moments(history, origin_ns),
        lives=_lives(history, origin_ns, end_s),
        steps=_steps(history, origin_ns, end_s),
        guards=tuple(_guard(event, origin_ns) for event in history.of(*_GUARDS)),
    )


def load_origin_ns(history: History) -> int:
    """Return when the load started, or the first record where it never did: the zero of every time in a report."""
    started = history.first(EventKind.LOAD_STARTED)
    if started is not None:
        return started.at_ns
    starts = [request.planned_ns for request in history.requests[:1]] + [event.at_ns for event in history.events[:1]]
    return min(starts, default=0)


def _end_s(history: History, origin_ns: int) -> float:
    ends = [request.planned_ns for request in history.requests[-1:]]
    ends += [event.at_ns for event in history.of(*_DEFINING)]
    if history.first(EventKind.LOAD_ENDED) is None:
        ends += [event.at_ns for event in history.events[-1:]]
    return max(1.0, *(seconds_between(origin_ns, end) for end in ends)) if ends else 1.0


def _windows(history: History, origin_ns: int, end_s: float) -> tuple[Span, ...]:
    """Return the windows that claims speak of, so that the picture shows what was judged."""
    spans = ((window, window_span(history, window)) for window in Window if window is not Window.ALL)
    clipped = (
        Span(
            kind=window.value,
            start_s=max(0.0, seconds_between(origin_ns, span[0])),
            end_s=min(end_s, seconds_between(origin_ns, span[1])),
        )
        for window, span in spans
        if span is not None
    )
    return tuple(span for span in clipped if span.end_s > span.start_s)


def _moments(history: History, origin_ns: int) -> tuple[Moment, ...]:
    def moment(at_ns: int | None, kind: str, label: str, note: str = "") -> list[Moment]:
        if at_ns is None:
            return []
        return [Moment(kind=kind, at_s=seconds_between(origin_ns, at_ns), label=label, note=note)]

    published = history.first(EventKind.PUBLISH_STARTED)
    remedied = history.first(EventKind.REMEDY_STARTED)
    detected = detection(history)
    found = [
        *_faults(history, origin_ns),
        *moment(_at_ns(published), "publish", f"publish {_word(published, 'version')}".strip()),
        *moment(detected.at_ns, "detection", f"detected: {detected.layer}", detected.because),
        *moment(_at_ns(remedied), "remedy", "remedy", _word(remedied, "what")),
        *moment(recovery_at_ns(history), "recovery", "recovered"),
    ]
    return tuple(sorted(found, key=lambda moment: moment.at_s))


def _faults(history: History, origin_ns: int) -> list[Moment]:
    """Faults closer than a tenth of a second, and all that were there before the load, are one moment."""
    groups: dict[float, list[str]] = {}
    for event in history.of(EventKind.FAULT_INJECTED):
        at_s = seconds_between(origin_ns, event.at_ns)
        name = _word(event, "fault") + ("" if event.data.get("proved") else " (not proved)")
        groups.setdefault(-1.0 if at_s < 0 else round(at_s, 1), []).append(name)
    return [
        Moment(kind="fault", at_s=at_s, label=f"fault: {', '.join(names)}{', before load' if at_s < 0 else ''}")
        for at_s, names in groups.items()
    ]


def _lives(history: History, origin_ns: int, end_s: float) -> tuple[Life, ...]:
    by_incarnation: dict[str, list[Event]] = {}
    for event in history.of(*_LIVES, EventKind.HEALTH):
        by_incarnation.setdefault(_word(event, "incarnation"), []).append(event)
    lives = (_life(name, events, origin_ns, end_s) for name, events in by_incarnation.items())
    return tuple(life for life in lives if life.states)


def _life(incarnation: str, events: list[Event], origin_ns: int, end_s: float) -> Life:
    changes = [event for event in events if event.kind is not EventKind.HEALTH]
    ended = next((event for event in changes if _LIVES[event.kind] in ("dead", "stopped")), None)
    end: Moment | None = None
    gone_s = end_s
    if ended is not None:
        gone_s = seconds_between(origin_ns, ended.at_ns)
        why = _word(ended, "reason") or _word(ended, "because") or _word(ended, "how")
        note = f"exit code {_word(ended, 'exit_code') or 'unknown'}; {why}"
        end = Moment(kind=_LIVES[ended.kind], at_s=gone_s, label=_LIVES[ended.kind], note=note.rstrip("; "))
    return Life(
        incarnation=incarnation,
        states=_spans([(e.at_ns, _LIVES[e.kind]) for e in changes if e is not ended], origin_ns, gone_s, end_s),
        health=_spans(
            [(e.at_ns, "healthy" if e.data.get("status") == 200 else "unhealthy") for e in events if e not in changes],
            origin_ns,
            gone_s,
            end_s,
        ),
        end=end if end is not None and 0.0 <= gone_s <= end_s else None,
    )


def _spans(changes: list[tuple[int, str]], origin_ns: int, gone_s: float, end_s: float) -> tuple[Span, ...]:
    """Turn changes of state into spans inside the picture; neighbours of the same state become one."""
    spans: list[Span] = []
    starts = [seconds_between(origin_ns, at_ns) for at_ns, _ in changes]
    for (_, kind), start, until in zip(changes, starts, [*starts, gone_s][1:], strict=True):
        start_s, until_s = max(0.0, start), min(until, gone_s, end_s)
        if spans and spans[-1].kind == kind and start_s <= spans[-1].end_s:
            spans[-1] = Span(kind=kind, start_s=spans[-1].start_s, end_s=max(until_s, spans[-1].end_s))
        elif until_s > start_s:
            spans.append(Span(kind=kind, start_s=start_s, end_s=until_s))
    return tuple(spans)


def _steps(history: History, origin_ns: int, end_s: float) -> tuple[Span, ...]:
    spans: list[Span] = []
    for event in history.of(*_STEPS):
        kind, end_kind = _STEPS[event.kind]
        ended = next((other for other in history.of(end_kind) if other.at_ns >= event.at_ns), None)
        start_s = seconds_between(origin_ns, event.at_ns)
        until_s = end_s if ended is None else min(end_s, seconds_between(origin_ns, ended.at_ns))
        note = " ".join(filter(None, (_word(event, "version"), _word(event, "how"), _word(event, "what"))))
        outcome = "not finished" if ended is None else _word(ended, "because")
        if until_s > 0.0:
            note = "; ".join(filter(None, (note, outcome)))
            spans.append(Span(kind=kind, start_s=max(0.0, start_s), end_s=max(start_s, until_s), note=note))
    return tuple(spans)


def _guard(event: Event, origin_ns: int) -> Moment:
    at_s = seconds_between(origin_ns, event.at_ns)
    if event.kind is EventKind.CANARY_CHECKED:
        answer = _word(event, "answer")
        return Moment(kind=f"canary_{answer}", at_s=at_s, label=f"canary: {answer}", note=_word(event, "incarnation"))
    kind = event.kind.value.removeprefix("guard_")
    note = _word(event, "did") or _findings(event.data)
    return Moment(kind=kind, at_s=at_s, label=f"{_word(event, 'guard')} {kind}", note=note)


def _findings(data: Mapping[str, object]) -> str:
    findings = data.get("findings")
    if not isinstance(findings, list | tuple):
        return ""
    return "; ".join(str(item.get("id", item)) if isinstance(item, Mapping) else str(item) for item in findings)


def _at_ns(event: Event | None) -> int | None:
    return None if event is None else event.at_ns


def _word(event: Event | None, key: str) -> str:
    value = None if event is None else event.data.get(key)
    return "" if value is None else str(value)
