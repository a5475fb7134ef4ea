"""Whether the version that an engine tells is that of the weights it answers from."""

from __future__ import annotations

from harness.guards.canary import Answer
from harness.judge.claim import Context, Judgement
from harness.judge.reloads import sent_ns
from harness.judge.verdict import Verdict
from harness.observe.history import Event, EventKind, History, RequestResult

TELLING = frozenset({Answer.OLD, Answer.NEW, Answer.NEITHER})


def version_told_truly(history: History, context: Context) -> Judgement:
    """See whether, after an update, the new version stands for the new weights, and any other for the old ones."""
    ended = next(
        (e for e in history.of(EventKind.RELOAD_ENDED) if (e.data.get("update") or {}).get("version_given")), None
    )
    if ended is None:
        return Verdict.UNKNOWN, "no update gave the weights a version", ()
    given, told = ended.data["update"]["version_given"], ended.data["update"].get("version_after")
    if told is None:
        return Verdict.UNKNOWN, "the engine told no version after the update", (ended.id,)
    expected = Answer.NEW if told == given else Answer.OLD
    answers = _answers_since(ended, history)
    if not answers:
        return Verdict.UNKNOWN, f"no answer shows which weights the version {told!r} stands for", (ended.id,)
    wrong = [(answer, evidence) for answer, evidence in answers if answer is not expected]
    said = f"after an update that was to be version {given!r} the engine says {told!r}, which stands for the {expected} weights"
    if wrong:
        shown = ", ".join(sorted({str(answer) for answer, _ in wrong}))
        because = f"{said}; {len(wrong)} of {len(answers)} canaries were answered by: {shown}"
        return Verdict.BROKEN, because, (ended.id, wrong[0][1])
    return Verdict.HELD, f"{said}; so say all {len(answers)} canaries", (ended.id,)


def _answers_since(ended: Event, history: History) -> list[tuple[Answer, str]]:
    """Return from which weights each canary of this engine was answered since then, and what shows it."""
    incarnation = ended.data["incarnation"]
    checked = [
        (Answer(event.data["answer"]), event.id)
        for event in history.of(EventKind.CANARY_CHECKED)
        if event.data["incarnation"] == incarnation
        and event.at_ns > ended.at_ns
        and event.data["answer"] in TELLING
        and "under_way" not in event.data
    ]
    asked = [
        (request.answer, request.id)
        for request in history.canaries()
        if request.incarnation == incarnation
        and sent_ns(request) > ended.at_ns
        and request.result is RequestResult.OK
        and request.answer in TELLING
    ]
    return [*checked, *((answer, evidence) for answer, evidence in asked if answer is not None)]
