"""Who noticed a fault first: every sign that a history holds, and the one that counts.

Everything here is pure, so the runner can act on it while a scenario runs and a stored run can be judged anew.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness.clock import NS_PER_S, seconds_between
from harness.guards.canary import Answer
from harness.judge.health import HTTP_OK, bad_health, told_of_health
from harness.judge.moments import Layer, fault_at_ns, remedy_at_ns, struck_at_ns
from harness.judge.reloads import (
    Expected,
    Reload,
    expected_answers,
    is_right,
    is_wrong,
    reloads,
    sent_ns,
    suspects,
    tells_nothing_of_weights,
    told_of_version,
    told_of_weights,
)
from harness.observe.history import Event, EventKind, History, Request, RequestResult

AFTERMATH_CHARACTERS_MAX = 160
HUNG_TIMES = 3.0  # how many times longer than an undamaged engine a start hangs, if its log says what went wrong
WITNESSES_S = 3.0  # how much later than the first sign of an incident, or than a client, a cheaper one still counts
RIGHT_FOR_HARMLESS = 5  # right canaries before a fault that nobody noticed counts as one that changed nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Detection:
    """Who noticed first, when, and what shows it."""

    layer: Layer
    at_ns: int | None
    because: str
    evidence: tuple[str, ...] = ()
    doubt: str = ""  # why this may have nothing to do with the fault; claims about detection are then unknown


def detection(history: History) -> Detection:
    """Say who noticed first between the fault and the remedy.

    Engines started or reloaded since the fault are looked at, and before the rollout begins also the one that was there:
    files that it still reads may be what was damaged. A reload that the engine answers with an error is noticed as early
    as a start that it refuses: the operator is told before anybody is served from it.
    """
    start, remedy = fault_at_ns(history), remedy_at_ns(history)
    if start is None:
        return Detection(layer=Layer.NEVER, at_ns=None, because="no rollout was started")
    end = remedy if remedy is not None else 2**63
    expected = expected_answers(history)
    suspected = suspects(history, start, end)
    reloaded = {each.incarnation: each for each in reloads(history) if start <= each.started_ns < end}
    signs = [
        sign for event in history.events if start <= event.at_ns < end for sign in _event_sign(event, history, expected)
    ]
    rolled = history.first(EventKind.ROLLOUT_STARTED)
    rolled_ns = end if rolled is None else min(rolled.at_ns, end)  # from then on, being stopped is what happens to it
    for incarnation, expects in expected.items():
        since, until = (start, end if incarnation in reloaded else rolled_ns)
        if incarnation in suspected and incarnation not in reloaded:
            since, until = 0, end
        served = [r for r in history.requests if r.incarnation == incarnation and r.ended_ns < until and not r.is_ours]
        if incarnation in reloaded:  # what it answered with the weights before says nothing about those it got
            earlier = [r for r in served if r.ended_ns < reloaded[incarnation].started_ns]
            signs += _request_signs(earlier, expects, since=since)
            served = _with_new_weights(served, reloaded[incarnation])
        signs += _request_signs(served, expects, since=since)
        signs += _death_signs(history, incarnation, served, since=since, until=until)
    struck = {incarnation: at_ns for incarnation, at_ns in struck_at_ns(history).items() if at_ns < end}
    for incarnation, at_ns in struck.items():
        signs += _incident_signs(history, incarnation, since=at_ns, until=end)
    suspected = {**suspected, **struck}
    if signs:
        first = _first_witness(signs) if struck else _earliest(signs)
        told = told_of_version(history)
        if first.layer is Layer.CANARY and told:  # what the operator was told stands before what canaries were
            return replace(first, because=f"{told}; {first.because}")
        return replace(
            first, because="; ".join(filter(None, (first.because + _aftermath(first, signs, history), told)))
        )
    right = [
        r
        for r in history.canaries()
        if suspected.get(r.incarnation, end) <= sent_ns(r)
        and r.ended_ns < end
        and is_right(r, expected.get(r.incarnation))
    ]
    checked = [
        event
        for event in history.of(EventKind.CANARY_CHECKED)
        if suspected.get(event.data["incarnation"], end) <= event.at_ns < end and not tells_nothing_of_weights(event)
    ]
    seen = (*(request.id for request in right), *(event.id for event in checked))  # a wrong one would be a sign
    if len(seen) >= RIGHT_FOR_HARMLESS:
        return Detection(
            layer=Layer.HARMLESS,
            at_ns=None,
            because=f"{len(seen)} of {len(seen)} canaries were right: nothing that clients see has changed"
            + told_of_weights(history)
            + (f"; {told}" if (told := told_of_version(history)) else ""),
            evidence=seen[:RIGHT_FOR_HARMLESS],
        )
    cut = any(event.data.get("is_cut") for event in history.of(EventKind.DETECTION_SEEN))
    doubt = "the scenario's own time was over before the time to notice it was" if cut else ""
    return Detection(layer=Layer.NEVER, at_ns=None, because="nobody noticed anything", doubt=doubt)


def _with_new_weights(served: Sequence[Request], reload: Reload) -> list[Request]:
    """Return the requests that tell about a reload: those sent since it began, and those that failed in it."""
    return [
        r
        for r in served
        if sent_ns(r) >= reload.started_ns or (r.result is not RequestResult.OK and r.ended_ns >= reload.started_ns)
    ]


def _aftermath(first: Detection, signs: Sequence[Detection], history: History) -> str:
    """Say what became of an engine after it had refused a reload; empty for everything else."""
    refused = next((e for e in history.of(EventKind.RELOAD_ENDED) if e.id in first.evidence), None)
    if refused is None:
        return ""
    later = [sign for sign in signs if sign is not first]
    if not later:
        return "; it went on serving"
    return f"; then: {min(later, key=lambda sign: sign.at_ns or 0).because[:AFTERMATH_CHARACTERS_MAX]}"


def _event_sign(event: Event, history: History, expected: dict[str, Expected]) -> list[Detection]:
    data = event.data
    if event.kind is EventKind.GUARD_REFUSED and data.get("guard") == "preflight":
        ids = ", ".join(sorted({str(finding["id"]) for finding in data.get("findings", ())}))
        return [_sign(Layer.PREFLIGHT, event, f"pre-flight refused the checkpoint ({ids})")]
    if event.kind is EventKind.ENGINE_NOT_READY and _starts_on_new(expected.get(data["incarnation"])):
        lines = data.get("log_lines") or ["no error line in its log"]
        because = f'the engine refused to start ({data["reason"]}): "{lines[0]}"'
        return [replace(_sign(Layer.STARTUP, event, because), doubt=_doubt_about_start(event, history))]
    if event.kind is EventKind.RELOAD_ENDED and not data["succeeded"]:
        sign = _sign(Layer.STARTUP, event, f"the engine refused the {data.get('how', 'reload')}: {data['because']}")
        return [
            replace(
                sign, doubt="" if data["was_answered"] else "the reload got no answer: a slow machine looks the same"
            )
        ]
    if event.kind is EventKind.CANARY_CHECKED and not tells_nothing_of_weights(event):
        expects = expected.get(data["incarnation"])
        if expects is None or not expects.allows(data["answer"], event.at_ns, event.at_ns):
            if _failed_on_first_use(event, history):
                gone = f"`/health` is bad: {data['health'] or 'no answer'}"
                because = f'the first request to "{data["incarnation"]}" had {data["answer"]}, and then {gone}'
                return [_sign(Layer.FIRST_REQUEST, event, because)]
            why = f" ({data['because']})" if data.get("because") else ""
            when = data.get("when", "before traffic")
            is_gone = data.get("is_first_request") and data["answer"] not in frozenset(Answer)
            layer, asked = (Layer.FIRST_REQUEST, "the first request") if is_gone else (Layer.CANARY, "a canary")
            return [_sign(layer, event, f"{asked} {when} was answered by: {data['answer']}{_how_far(data)}{why}")]
    return []


def _failed_on_first_use(event: Event, history: History) -> bool:
    """Say whether an engine that users are sent to broke at the first request of all, and its health tells so afterwards."""
    incarnation = event.data["incarnation"]
    if event.data.get("health", HTTP_OK) == HTTP_OK:
        return False
    before = [e for e in history.events if e.data.get("incarnation") == incarnation and e.at_ns < event.at_ns]
    was_asked = any(e.kind is EventKind.CANARY_CHECKED for e in before) or any(
        r.incarnation == incarnation and r.ended_ns < event.at_ns for r in history.requests
    )
    return not was_asked and any(e.kind is EventKind.TRAFFIC_ADMITTED for e in before)


def _how_far(data: Mapping[str, Any]) -> str:
    """Say how far an answer of neither checkpoint is from both: a rounding error or garbage."""
    old, new = data.get("difference_old"), data.get("difference_new")
    if data["answer"] != Answer.NEITHER or old is None or new is None:
        return ""
    return f" (its logprobs differ by {new:.2g} from those of the new checkpoint, by {old:.2g} from the old)"


def _starts_on_new(expected: Expected | None) -> bool:
    return expected is not None and expected.started is Answer.NEW


def _doubt_about_start(event: Event, history: History) -> str:
    """Say why a start that failed may not have failed for the fault; empty when the engine itself refused or crashed.

    One that hangs is no slow machine if its log names an error and an undamaged engine was ready here much sooner.
    """
    data, code = event.data, event.data.get("exit_code")
    if code is None:
        healthy_s = [e.data["took_s"] for e in history.of(EventKind.ENGINE_READY) if _was_started(e, history)]
        hung_s = _starting_for_s(event, history)
        if data.get("log_lines") and healthy_s and hung_s >= HUNG_TIMES * max(healthy_s):
            return ""
        return "the engine was still starting when the limit passed: a slow machine looks the same"
    if code == -signal.SIGKILL:
        return "the engine was killed from outside (SIGKILL), perhaps for want of memory"
    if not data.get("log_lines"):
        return f"the engine ended with exit code {code} and no error line in its log"
    return ""


def _start_of(event: Event, history: History) -> Event | None:
    """Return the event of the start that an event of an engine belongs to."""
    started = history.of(EventKind.ENGINE_STARTING)
    return next((each for each in started if each.data["incarnation"] == event.data["incarnation"]), None)


def _was_started(ready: Event, history: History) -> bool:
    start = _start_of(ready, history)
    return start is not None and "handed_on" not in start.data.get("launch", {})


def _starting_for_s(event: Event, history: History) -> float:
    start = _start_of(event, history)
    return 0.0 if start is None else seconds_between(start.at_ns, event.at_ns)


def _sign(layer: Layer, event: Event, because: str) -> Detection:
    return Detection(layer=layer, at_ns=event.at_ns, because=because, evidence=(event.id,))


def _request_signs(served: Sequence[Request], expected: Expected | None, *, since: int) -> list[Detection]:
    """Return the signs that requests to one incarnation give: its first failed one and its first wrong canary.

    Only requests planned `since` then can be signs; earlier ones tell whether the engine had answered before.
    """
    signs: list[Detection] = []
    by_end = sorted(served, key=lambda request: request.ended_ns)
    lately = [request for request in by_end if request.planned_ns >= since]
    failed = next((r for r in lately if r.result is not RequestResult.OK and not r.is_canary), None)
    if failed is not None:
        had_answers = any(
            r.result is RequestResult.OK and r.ended_ns < failed.ended_ns for r in by_end if not r.is_canary
        )
        layer = Layer.CLIENT if had_answers else Layer.FIRST_REQUEST
        seen = f"{failed.result}{'' if failed.status is None else f' {failed.status}'} {failed.error[:120]}".strip()
        signs.append(_request_sign(layer, failed, f'a request to "{failed.incarnation}" failed: {seen}'))
    canary = next(
        (r for r in lately if r.is_canary and (r.result is not RequestResult.OK or is_wrong(r, expected))), None
    )
    if canary is not None:
        if canary.result is RequestResult.OK:
            wanted = None if expected is None else expected.at(sent_ns(canary), canary.ended_ns) or "old or new"
            seen = f"was answered by {canary.answer} instead of {wanted} weights"
        else:
            seen = f"failed: {canary.result}{'' if canary.status is None else f' {canary.status}'} {canary.error[:120]}"
        # A canary that dies together with the first user requests shows an engine that fails on use.
        if failed is not None and canary.result is not RequestResult.OK and signs[0].layer is Layer.FIRST_REQUEST:
            signs.append(
                _request_sign(Layer.FIRST_REQUEST, canary, f'the first request to "{canary.incarnation}" {seen}')
            )
        else:
            signs.append(_request_sign(Layer.CANARY, canary, f'a canary to "{canary.incarnation}" {seen}'))
    return signs


def _death_signs(
    history: History, incarnation: str, served: Sequence[Request], *, since: int, until: int
) -> list[Detection]:
    """Return the sign that an engine gives by dying while users are sent to it."""
    died = next(
        (
            event
            for event in history.of(EventKind.ENGINE_DIED)
            if event.data["incarnation"] == incarnation and since <= event.at_ns < until
        ),
        None,
    )
    if died is None or not served:
        return []
    had_answers = any(r.result is RequestResult.OK and r.ended_ns < died.at_ns for r in served)
    layer = Layer.CLIENT if had_answers else Layer.FIRST_REQUEST
    return [_sign(layer, died, f"the engine died while serving (exit code {died.data.get('exit_code')})")]


def _earliest(signs: Sequence[Detection]) -> Detection:
    """Return the earliest sign, but that of one who asked on purpose where a client was first by a moment: that is chance."""
    first = min(signs, key=lambda sign: (sign.at_ns or 0, sign.layer.rank))
    if first.layer is not Layer.CLIENT:
        return first
    until_ns = (first.at_ns or 0) + round(WITNESSES_S * NS_PER_S)
    asked = (Layer.FIRST_REQUEST, Layer.CANARY)
    canaries = [sign for sign in signs if sign.layer in asked and (sign.at_ns or 0) <= until_ns]
    return min(canaries, key=lambda sign: sign.at_ns or 0, default=first)


def _first_witness(signs: Sequence[Detection]) -> Detection:
    """Return the cheapest of the signs that come together: many see an incident at once, and one of them is enough."""
    until_ns = min(sign.at_ns or 0 for sign in signs) + round(WITNESSES_S * NS_PER_S)
    together = [sign for sign in signs if (sign.at_ns or 0) <= until_ns]
    return min(together, key=lambda sign: (sign.layer.rank, sign.at_ns or 0))


def _incident_signs(history: History, incarnation: str, *, since: int, until: int) -> list[Detection]:
    """Return the signs that whoever runs an engine sees without asking it for an answer: its health and its exit code."""
    told = told_of_health(history, incarnation, since=since, until=until)
    signs = [
        _sign(Layer.HEALTH, event, f"`/health` of the struck engine was bad: {event.data['status'] or 'no answer'}")
        for event in bad_health(told)
    ]
    for event in told:
        if event.kind is EventKind.ENGINE_DIED and event.data.get("exit_code"):
            code = event.data["exit_code"]
            signs.append(_sign(Layer.EXIT, event, f"the struck engine ended with exit code {code}"))
    return signs


def _request_sign(layer: Layer, request: Request, because: str) -> Detection:
    return Detection(layer=layer, at_ns=request.ended_ns, because=because, evidence=(request.id,))
