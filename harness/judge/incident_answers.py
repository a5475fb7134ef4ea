"""Answers to the claims about an engine that was struck: what its health and its exit code told whoever runs it."""

from __future__ import annotations

from harness.clock import seconds_between
from harness.judge.claim import Context, Judgement
from harness.judge.health import HTTP_OK, bad_health, is_probe, told_of_health
from harness.judge.moments import load_span, remedy_at_ns, struck_at_ns
from harness.judge.verdict import Verdict
from harness.observe.history import Event, EventKind, History

NOT_STRUCK = "no engine was struck, so there was nothing to tell"


def health_told(history: History, context: Context, within_s: float) -> Judgement:
    """Look for the first bad answer of `/health` after the engine was struck; one that has ended answers nothing."""
    struck = struck_at_ns(history)
    if not struck:
        return Verdict.UNKNOWN, NOT_STRUCK, ()
    incarnation, struck_ns = next(iter(struck.items()))
    remedy_ns, span = remedy_at_ns(history), load_span(history)
    until_ns = remedy_ns if remedy_ns is not None else span[1] if span is not None else struck_ns
    about = told_of_health(history, incarnation, since=struck_ns, until=until_ns)
    counted = bad_health(about)
    bad = next((e for e in about if not is_probe(e) or e in counted), None)
    alone = [e for e in about if is_probe(e) and e not in counted and e.data["status"] != HTTP_OK]
    watched_s = seconds_between(struck_ns, until_ns)
    if bad is None and watched_s < within_s:
        return Verdict.UNKNOWN, f"`/health` was watched for {watched_s:.1f} s, too short for {within_s:g} s", ()
    if bad is None and about and about[-1] in alone and seconds_between(struck_ns, about[-1].at_ns) <= within_s:
        said = "the last probe of `/health` got no answer, and no other followed that could say whether the engine was slow or gone"
        return Verdict.UNKNOWN, said, (about[-1].id,)
    if bad is None and (unasked := _unasked(history, incarnation, about, until_ns)):
        return Verdict.UNKNOWN, unasked, ()
    if bad is None:
        said = f"`/health` said {HTTP_OK} all the {watched_s:.1f} s after the engine was struck, claimed bad within {within_s:g} s"
        said += f"; single probes among good ones that got no answer: {len(alone)}" if alone else ""
        return Verdict.BROKEN, said, tuple(event.id for event in about[-1:])
    after_s = seconds_between(struck_ns, bad.at_ns)
    seen = (
        "the engine had ended"
        if bad.kind is EventKind.ENGINE_DIED
        else f"`/health` said {bad.data['status'] or 'nothing'}"
    )
    verdict = Verdict.HELD if after_s <= within_s else Verdict.BROKEN
    return verdict, f"{seen} {after_s:.2f} s after the engine was struck, limit {within_s:g} s", (bad.id,)


def _unasked(history: History, incarnation: str, about: tuple[Event, ...], until_ns: int) -> str:
    """Say why nothing is known of `/health` of an engine all the time; empty when it was asked."""
    if not about:
        return "nobody asked `/health` since the engine was struck"
    failed = [e for e in history.of(EventKind.OBSERVER_FAILED) if e.data.get("observer") == f"health of {incarnation}"]
    if failed and failed[0].at_ns < until_ns:
        return f"nobody asked `/health` any more: its observer failed ({failed[0].data.get('because')})"
    return ""


def exit_code_told(history: History, context: Context) -> Judgement:
    """Look at the exit code of the server that was struck: a supervisor with restart-on-failure restarts what is not 0."""
    struck = struck_at_ns(history)
    if not struck:
        return Verdict.UNKNOWN, NOT_STRUCK, ()
    died = next((e for e in history.of(EventKind.ENGINE_DIED) if e.data["incarnation"] in struck), None)
    if died is None:
        return Verdict.UNKNOWN, "the server that was struck had not ended when the remedy began", ()
    code = died.data["exit_code"]
    if code == 0:
        said = (
            "the server ended with exit code 0 after it was struck: a supervisor with restart-on-failure leaves it dead"
        )
        return Verdict.BROKEN, said, (died.id,)
    return Verdict.HELD, f"the server ended with exit code {code}: a supervisor starts it anew", (died.id,)
