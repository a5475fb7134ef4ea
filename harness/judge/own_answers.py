"""Answers to the claims about the harness's own part: proofs, the load, what is left behind."""

from __future__ import annotations

from harness.judge.claim import Context, Judgement
from harness.judge.moments import Window, fault_at_ns, requests_in
from harness.judge.reloads import LAG_LIMIT_MS, expected_answers, is_right
from harness.judge.verdict import Verdict
from harness.observe.history import EventKind, History, RequestResult

TIMELINE_FINISHED = "timeline finished"  # what a scenario that came to its end says of it


def faults_proved(history: History, context: Context) -> Judgement:
    """Look for the proof of every declared fault."""
    injected = history.of(EventKind.FAULT_INJECTED)
    if (
        not injected
        and not context.faults
        and history.first(EventKind.RELOAD_STARTED, EventKind.GUARD_REFUSED) is not None
    ):
        return Verdict.HELD, "no fault was declared: what a reload by itself does is looked at", ()
    if not injected:
        return Verdict.UNKNOWN, "no fault was injected", ()
    absent = [fault for fault in context.faults if fault not in {event.data["fault"] for event in injected}]
    if absent:
        return Verdict.UNKNOWN, f"never injected: {', '.join(absent)}", ()
    unproved = [event for event in injected if not event.data["proved"]]
    if unproved:
        said = "; ".join(f'"{event.data["fault"]}" is not proved: {event.data["because"]}' for event in unproved)
        return Verdict.UNKNOWN, said, tuple(event.id for event in unproved)
    said = "; ".join(f'"{event.data["fault"]}": {event.data["because"]}' for event in injected)
    return Verdict.HELD, said, tuple(event.id for event in injected)


def healthy_before(history: History, context: Context) -> Judgement:
    """Look at every request and canary that ended before the fault."""
    if fault_at_ns(history) is None:
        return Verdict.UNKNOWN, "the scenario ended before its rollout began", ()
    # A request that was still under way at the fault says nothing about the time before it.
    at_ns = fault_at_ns(history) or 0
    requests = [r for r in requests_in(history, Window.BEFORE, canaries=False) if not r.is_ours and r.ended_ns < at_ns]
    failed = [r for r in requests if r.result is not RequestResult.OK]
    expected = expected_answers(history)
    canaries = [r for r in requests_in(history, Window.BEFORE, canaries=True) if r.ended_ns < at_ns]
    right = [r for r in canaries if is_right(r, expected.get(r.incarnation))]
    wrong = [r for r in canaries if not is_right(r, expected.get(r.incarnation))]
    if failed or wrong or not right or not requests:
        text = (
            f"before the fault {len(failed)} of {len(requests)} requests failed and {len(wrong)} of {len(canaries)} canaries "
            "were not right"
        )
        return Verdict.UNKNOWN, text, tuple(r.id for r in (*failed, *wrong)[:5])
    return Verdict.HELD, f"{len(requests)} requests and {len(right)} canaries before the fault, all right", ()


def load_valid(history: History, context: Context) -> Judgement:
    """Compare the load with its plan."""
    ended = history.last(EventKind.LOAD_ENDED)
    if ended is None:
        return Verdict.UNKNOWN, "the load did not end in an orderly way", ()
    data = ended.data
    bugs = [r for r in history.requests if r.is_ours]
    wrong = []
    if data["recorded"] != data["planned"]:
        wrong.append(f"{data['recorded']} records for {data['planned']} planned arrivals")
    if bugs:
        wrong.append(f"{len(bugs)} arrivals lost by the generator ({bugs[0].result}: {bugs[0].error[:120]})")
    if data["lag_ms_p99"] > LAG_LIMIT_MS:
        wrong.append(f"arrivals started late: p99 {data['lag_ms_p99']:.0f} ms, limit {LAG_LIMIT_MS:.0f} ms")
    if wrong:
        return Verdict.UNKNOWN, "the load was not what was planned: " + "; ".join(wrong), (ended.id,)
    return (
        Verdict.HELD,
        f"{data['recorded']} of {data['planned']} planned arrivals, start lag p99 {data['lag_ms_p99']:.1f} ms",
        (ended.id,),
    )


def faults_undone(history: History, context: Context) -> Judgement:
    """Look for the proof that the remedy undid every fault."""
    undone = history.of(EventKind.FAULT_UNDONE)
    if history.first(EventKind.REMEDY_STARTED) is None and not undone:
        return Verdict.HELD, "nothing had to be undone", ()
    refused = [event for event in undone if event.data.get("refused")]
    if refused:
        said = ", ".join(sorted({str(finding["id"]) for finding in refused[0].data["refused"]}))
        return Verdict.BROKEN, f"pre-flight refuses the undamaged checkpoint too ({said})", (refused[0].id,)
    unproved = [event for event in undone if not event.data["proved"]]
    if unproved or not undone:
        said = "the remedy did not come that far" if not undone else str(unproved[0].data["because"])
        return Verdict.UNKNOWN, f"not proved to be undone: {said}", tuple(event.id for event in unproved)
    absent = [fault for fault in context.faults if fault not in {event.data["fault"] for event in undone}]
    if absent:
        return Verdict.UNKNOWN, f"nothing says whether it was undone: {', '.join(absent)}", ()
    said = "; ".join(dict.fromkeys(str(event.data["because"]) for event in undone))
    return Verdict.HELD, said, tuple(event.id for event in undone)


def ended_early(history: History) -> str:
    """Say why a scenario that began did not come to its end; empty when it did, and for a start without load."""
    ended = history.last(EventKind.SCENARIO_ENDED)
    if ended is not None:
        because = str(ended.data.get("because"))
        return "" if because == TIMELINE_FINISHED else f"the scenario ended early: {because}"
    return "" if history.first(EventKind.SCENARIO_STARTED) is None else "the scenario did not come to its end"


def nothing_left_over(history: History, context: Context) -> Judgement:
    """Read what the search for left-overs found."""
    left, clean = history.last(EventKind.LEFT_OVER), history.last(EventKind.NOTHING_LEFT)
    if left is not None:
        return Verdict.BROKEN, f"left over after the scenario: {left.data['things']}", (left.id,)
    if clean is None:
        failed = [e for e in history.of(EventKind.OBSERVER_FAILED) if e.data.get("observer") == "left-overs"]
        why = f": {failed[-1].data['because']}" if failed else ""
        return Verdict.UNKNOWN, f"nobody could look for left-overs{why}", tuple(event.id for event in failed[-1:])
    return Verdict.HELD, f"looked for {clean.data['checked']}: nothing is left", (clean.id,)
