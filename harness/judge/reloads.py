"""What an incarnation is expected to answer when it may be given other weights while it runs.

A reload that succeeded moves the expectation from one checkpoint to the other. A request that overlaps it may have been
answered by either: it is neither right nor wrong. After a reload that failed, the old weights are what the operator was
told is still served.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.clock import NS_PER_S
from harness.guards.canary import Answer
from harness.observe.history import Event, EventKind, History, Request, RequestResult

FOREVER_NS = 2**63
WAITS = "wait"  # the pause in which the engine finishes what is under way
LAG_LIMIT_MS = 250.0  # beyond it the generator, not the engine, made the latency


@dataclass(frozen=True, slots=True, kw_only=True)
class Reload:
    """One reload of a running engine."""

    incarnation: str
    expects: Answer
    started_ns: int
    ended_ns: int  # for ever when its end was not recorded
    succeeded: bool
    call_ns: tuple[int, int]  # of the call that changes the weights alone; the whole reload when that was not recorded
    pause: str = ""

    @property
    def after_ns(self) -> int:
        """Return since when a token that arrives was computed with other weights.

        An engine that finished what was under way before it reloaded may have its last tokens stamped late.
        """
        if self.pause != WAITS:
            return self.ended_ns
        return max(self.ended_ns, self.call_ns[1] + round(LAG_LIMIT_MS / 1000 * NS_PER_S))

    def overlaps(self, sent_ns: int, ended_ns: int) -> bool:
        """Say whether something between these times may have met both checkpoints."""
        return sent_ns <= self.ended_ns and ended_ns >= self.started_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What one incarnation is expected to answer, and when that changed."""

    started: Answer
    reloads: tuple[Reload, ...] = ()

    @property
    def latest(self) -> Answer:
        """Return what it is expected to answer at the end."""
        return next((each.expects for each in reversed(self.reloads) if each.succeeded), self.started)

    def at(self, sent_ns: int, ended_ns: int) -> Answer | None:
        """Return what is expected of a request between these times; None when a reload overlaps it."""
        answer = self.started
        for each in self.reloads:
            if each.succeeded and each.overlaps(sent_ns, ended_ns):
                return None
            if each.succeeded and each.ended_ns < sent_ns:
                answer = each.expects
        return answer

    def allows(self, answer: str, sent_ns: int, ended_ns: int) -> bool:
        """Say whether an answer between these times is not wrong."""
        expected = self.at(sent_ns, ended_ns)
        if expected is not None:
            return answer == expected
        possible = {self.started, *(each.expects for each in self.reloads)}
        return answer in {str(each) for each in possible}


def reloads(history: History) -> tuple[Reload, ...]:
    """Return every reload in time order."""
    ends = list(history.of(EventKind.RELOAD_ENDED))
    return tuple(_reload(event, ends) for event in history.of(EventKind.RELOAD_STARTED))


def _reload(start: Event, ends: Sequence[Event]) -> Reload:
    incarnation = start.data["incarnation"]
    end = next((e for e in ends if e.data["incarnation"] == incarnation and e.at_ns >= start.at_ns), None)
    ended_ns = FOREVER_NS if end is None else end.at_ns
    call_ns = (end.data.get("call_ns") if end is not None else None) or (start.at_ns, ended_ns)
    return Reload(
        incarnation=incarnation,
        expects=Answer(start.data["expects"]),
        started_ns=start.at_ns,
        ended_ns=ended_ns,
        succeeded=end is not None and bool(end.data["succeeded"]),
        call_ns=(int(call_ns[0]), int(call_ns[1])),
        pause=str(start.data.get("pause", "")),
    )


def expected_answers(history: History) -> dict[str, Expected]:
    """Return what each incarnation is expected to answer."""
    seen = reloads(history)
    return {
        event.data["incarnation"]: Expected(
            started=Answer(event.data["expects"]),
            reloads=tuple(each for each in seen if each.incarnation == event.data["incarnation"]),
        )
        for event in history.of(EventKind.ENGINE_STARTING)
    }


def tells_nothing_of_weights(checked: Event) -> bool:
    """Say whether a canary is of answers under way at a reload, none of them mixed: each may be of the older weights."""
    return "under_way" in checked.data and checked.data["answer"] != Answer.NEITHER


def told_of_weights(history: History) -> str:
    """Say what an engine's own checks of its weights were worth at a reload that succeeded; empty when nobody asked them."""
    for event in history.of(EventKind.RELOAD_ENDED):
        seen = event.data.get("weights") or {}
        if not event.data["succeeded"] or not seen.get("count"):
            continue
        before, after = seen.get("version_before"), seen.get("version_after")
        return (
            f"; its checksum endpoint gave {seen['of_no_bytes_count']} of {seen['count']} parameters the digest of no bytes, "
            f"and its weight version was {before!r} before and {after!r} after"
        )
    return ""


def told_of_version(history: History) -> str:
    """Say which version an update gave and what the engine then says that it has; empty where nothing was given."""
    event = history.last(EventKind.RELOAD_ENDED)
    seen = {} if event is None else event.data.get("update") or {}
    if not seen.get("version_given"):
        return ""
    given, before, after = (seen.get(f"version_{when}") for when in ("given", "before", "after"))
    told = "gives none" if after is None else f"says {after!r}"
    return f"the update gave version {given!r} after {before!r}, and `/weight_info` then {told}"


def sent_ns(request: Request) -> int:
    """Return when a request was sent, or planned when it was not."""
    return request.planned_ns if request.sent_ns is None else request.sent_ns


def is_wrong(canary: Request, expected: Expected | None) -> bool:
    """Say whether an answered canary came from other weights than its engine was given."""
    if canary.result is not RequestResult.OK or canary.answer is Answer.AMBIGUOUS:
        return False
    return expected is None or not expected.allows(str(canary.answer), sent_ns(canary), canary.ended_ns)


def is_right(canary: Request, expected: Expected | None) -> bool:
    """Say whether an answered canary provably came from the weights its engine was given."""
    if canary.result is not RequestResult.OK or expected is None:
        return False
    return canary.answer is not None and canary.answer is expected.at(sent_ns(canary), canary.ended_ns)


def suspects(history: History, start_ns: int, end_ns: int) -> Mapping[str, int]:
    """Return the incarnations that got weights between these times, started or reloaded, and since when they have them."""
    found = {
        event.data["incarnation"]: event.at_ns
        for event in history.of(EventKind.ENGINE_STARTING)
        if start_ns <= event.at_ns < end_ns
    }
    for each in reloads(history):
        if start_ns <= each.started_ns < end_ns:
            found[each.incarnation] = each.ended_ns
    return found
