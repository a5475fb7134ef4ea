"""How many answers users got from wrong weights: an interval, from what canaries say about each engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

from harness.guards.canary import Answer
from harness.judge.moments import struck_at_ns
from harness.judge.reloads import FOREVER_NS, Expected, expected_answers, is_wrong, sent_ns, tells_nothing_of_weights
from harness.observe.history import EventKind, History, Request, RequestResult

LEAVE_WEIGHTS_ALONE = frozenset(  # of the faults that strike engines
    {
        "killed_process",
        "frozen_process",
        "killed_with_leftovers",
        "memory_limit",
        "full_shared_memory",
        "full_disk",
        "slow_storage",
        "port_of_old_server",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposure:
    """Answers that users got from wrong weights: at least `lower`, at most `upper`."""

    lower: int
    upper: int
    evidence: tuple[str, ...] = ()


def exposure(history: History) -> Exposure:
    """Count the answers users got from wrong weights, per incarnation.

    An incarnation is suspected from when its last right canary was sent (or its start) until its next right one (or its
    end), if any canary in between was wrong or got no usable answer; canaries that ask other prompts are followed apart.
    A reload begins anew: until a canary is right after it, nothing vouches for the weights.
    It is convicted between two wrong canaries that follow each other, unless the prompts of one of them were answered
    rightly in between. One that answered users and never a canary rightly is suspected throughout.
    """
    lower = upper = 0
    evidence: list[str] = []
    for incarnation, expected in expected_answers(history).items():
        answered = [r for r in history.requests if r.incarnation == incarnation and not r.is_canary and _was_seen(r)]
        marks = _canary_marks(history, incarnation, expected)
        suspected: dict[str, Request] = {}
        convicted: dict[str, Request] = {}
        if not any(mark.is_right for mark in marks):
            suspected = {r.id: r for r in answered}
        # A right answer to some prompts does not clear an engine that answers others wrongly: each pass is followed alone.
        rotations: set[int | None] = {mark.rotation for mark in marks} - {None}
        followed = [_of_rotation(marks, rotation) for rotation in rotations or {None}]
        changes_ns = [each.call_ns[0] for each in expected.reloads]
        for begin_ns, end_ns in (span for alone in followed for span in _doubtful_spans(alone, changes_ns)):
            within = [r for r in answered if r.ended_ns > begin_ns and sent_ns(r) < end_ns]
            suspected |= {r.id: r for r in within}
        for begin_ns, end_ns in _unvouched_spans(marks, expected):
            suspected |= {r.id: r for r in answered if r.ended_ns > begin_ns and sent_ns(r) < end_ns}
        for begin_ns, end_ns in _convicting_spans(marks):
            convicted |= {r.id: r for r in answered if sent_ns(r) >= begin_ns and r.ended_ns <= end_ns}
        lower += len(convicted)
        upper += len(suspected)
        evidence += list(suspected)[:3]
    return Exposure(lower=lower, upper=upper, evidence=tuple(evidence))


def _was_seen(request: Request) -> bool:
    """Say whether a user saw an answer, or the beginning of one: tokens of a stream that breaks off later are read too."""
    return request.result is RequestResult.OK or request.first_token_ns is not None or bool(request.token_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mark:
    """What one canary says about the weights of an engine; neither right nor wrong when its answer was unusable."""

    sent_ns: int
    ended_ns: int
    is_right: bool
    is_wrong: bool
    rotation: int | None = None  # which pass of the canary prompts was asked; None: all


def _of_rotation(marks: Sequence[_Mark], rotation: int | None) -> list[_Mark]:
    """Return what was asked of one pass, and what all passes were asked.

    Passes below zero are questions of another kind, such as a long prompt: those that ask all others do not clear them.
    """
    begun_ns = min((mark.ended_ns for mark in marks if mark.rotation == rotation), default=0)
    is_other = rotation is not None and rotation < 0
    return [
        mark
        for mark in marks
        if mark.rotation == rotation or (mark.rotation is None and not (is_other and mark.ended_ns > begun_ns))
    ]


def _doubtful_spans(marks: Sequence[_Mark], changes_ns: Sequence[int]) -> list[tuple[int, int]]:
    """Return (begin, end) of every stretch without a right canary, from the right one before to the one after.

    What is first wrong after a running engine was told to read other weights says nothing about those it had before.
    """
    runs = [(is_right, list(run)) for is_right, run in groupby(marks, key=lambda mark: mark.is_right)]
    spans = []
    for number, (is_right, run) in enumerate(runs):
        if not is_right:
            right_ns = runs[number - 1][1][-1].sent_ns if number > 0 else 0
            begin_ns = max((at_ns for at_ns in changes_ns if right_ns < at_ns <= run[0].sent_ns), default=right_ns)
            end_ns = runs[number + 1][1][0].ended_ns if number + 1 < len(runs) else 2**63
            spans.append((begin_ns, end_ns))
    return spans


def _unvouched_spans(marks: Sequence[_Mark], expected: Expected) -> list[tuple[int, int]]:
    """Return (begin, end) from every reload to the next after which no canary was right, whether it succeeded or not."""
    begins = [each.ended_ns for each in expected.reloads]
    ends = [*(each.started_ns for each in expected.reloads[1:]), FOREVER_NS]
    spans = zip(begins, ends, strict=True) if begins else ()
    return [
        (begin_ns, end_ns)
        for begin_ns, end_ns in spans
        if not any(mark.is_right and begin_ns <= mark.sent_ns < end_ns for mark in marks)
    ]


def _convicting_spans(marks: Sequence[_Mark]) -> list[tuple[int, int]]:
    """Return (begin, end) between two wrong canaries, where nothing says that the weights were right meanwhile."""
    spans = []
    for first, last in pairwise(mark for mark in marks if mark.is_wrong):
        asked = {first.rotation, last.rotation, None}
        if not any(
            mark.is_right and first.ended_ns <= mark.ended_ns <= last.ended_ns and mark.rotation in asked
            for mark in marks
        ):
            spans.append((first.ended_ns, last.sent_ns))
    return spans


_UNUSABLE = frozenset(
    {
        RequestResult.HTTP_4XX,
        RequestResult.HTTP_5XX,
        RequestResult.MALFORMED,
        RequestResult.WRONG_MODEL,
        RequestResult.WRONG_CONTENT,
        RequestResult.MIXED_VERSION,
    }
)


def _canary_marks(history: History, incarnation: str, expected: Expected) -> list[_Mark]:
    """Return what the canaries of one incarnation say, in time order.

    A broken connection says nothing about weights, nor does an error of an engine that an incident struck while it served,
    if that cannot have touched its weights: why it gives errors is known.
    """
    struck_ns = _struck_while_serving_ns(history, incarnation)
    marks = []
    for event in history.of(EventKind.CANARY_CHECKED):
        if event.data["incarnation"] == incarnation and not tells_nothing_of_weights(event):
            answer = event.data["answer"]
            mark = _mark(event.at_ns, event.at_ns, str(answer), expected)
            marks.append(replace(mark, rotation=event.data.get("rotation")))
    for canary in history.canaries():
        if expected.at(sent_ns(canary), canary.ended_ns) is None and not is_wrong(canary, expected):
            continue  # it met a reload, of which either answer is right: it says nothing
        if canary.incarnation == incarnation and canary.result is RequestResult.OK:
            mark = _mark(sent_ns(canary), canary.ended_ns, str(canary.answer), expected)
            marks.append(replace(mark, rotation=canary.rotation))
        elif canary.incarnation == incarnation and canary.result in _UNUSABLE and canary.ended_ns < struck_ns:
            mark = _Mark(sent_ns=sent_ns(canary), ended_ns=canary.ended_ns, is_right=False, is_wrong=False)
            marks.append(replace(mark, rotation=canary.rotation))
    return sorted(marks, key=lambda mark: mark.ended_ns)


def _struck_while_serving_ns(history: History, incarnation: str) -> int:
    """Return when an incident that leaves weights alone struck an engine that users were sent to; for ever later if none."""
    admitted = {event.data["incarnation"]: event.at_ns for event in reversed(history.of(EventKind.TRAFFIC_ADMITTED))}
    struck_ns = struck_at_ns(history).get(incarnation, FOREVER_NS)
    faults = {
        fault
        for event in history.of(EventKind.INCIDENT_STARTED)
        if event.data["incarnation"] == incarnation
        for fault in event.data["undo"]
    }
    if not faults <= LEAVE_WEIGHTS_ALONE:
        return FOREVER_NS
    return struck_ns if admitted.get(incarnation, FOREVER_NS) <= struck_ns else FOREVER_NS


def _mark(sent_ns: int, ended_ns: int, answer: str, expected: Expected) -> _Mark:
    known = (
        answer in frozenset(Answer) and answer != Answer.AMBIGUOUS and not expected.allows(answer, sent_ns, ended_ns)
    )
    is_right = answer == expected.at(sent_ns, ended_ns)
    return _Mark(sent_ns=sent_ns, ended_ns=ended_ns, is_right=is_right, is_wrong=known and not is_right)
