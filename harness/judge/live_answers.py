"""Answers to the claims about updates of a running engine: from which weights, and what its own checks are worth."""

from __future__ import annotations

from harness.judge.claim import Context, Judgement
from harness.judge.reloads import Reload, reloads, sent_ns
from harness.judge.verdict import Verdict
from harness.observe.history import EventKind, History, Request


def answers_unmixed(history: History, context: Context) -> Judgement:
    """Look for answers that got tokens both before a reload began and after it had ended: users' own, and witnesses."""
    done = [each for each in reloads(history) if each.succeeded]
    if not done:
        return Verdict.UNKNOWN, "no reload succeeded, so no answer could meet two checkpoints", ()
    witnesses = [event for event in history.of(EventKind.CANARY_CHECKED) if "under_way" in event.data]
    for event in witnesses:
        if event.data["mixed"]:
            return Verdict.BROKEN, str(event.data["because"]), (event.id,)
    load = [r for r in history.requests if not r.is_canary and len(r.token_ns) > 1]
    under_way = [r for r in load if any(r.incarnation == e.incarnation and _is_around(r, e) for e in done)]
    mixed = [r for r in under_way if any(r.incarnation == e.incarnation and _is_mixed(r, e) for e in done)]
    if mixed:
        worst = max(mixed, key=lambda r: len(r.token_ns))
        return (
            Verdict.BROKEN,
            f"{len(mixed)} of {len(under_way)} answers that were under way have tokens of both checkpoints, the later ones "
            f'computed upon the keys and values of the older weights; "{worst.id}" has {len(worst.token_ns)} tokens',
            tuple(r.id for r in mixed[:5]),
        )
    undecided = sum(any(r.incarnation == e.incarnation and _is_undecided(r, e) for e in done) for r in under_way)
    undecided += sum(event.data.get("undecided", 0) for event in witnesses)
    count = len(under_way) + sum(max(event.data["under_way"] - event.data["failed"], 0) for event in witnesses)
    if undecided:
        return (
            Verdict.UNKNOWN,
            f"none of {count} answers that were under way certainly has tokens of both checkpoints, but {undecided} had their "
            "last token while the engine changed its weights: nobody knows which computed it",
            (),
        )
    if not count:
        return Verdict.UNKNOWN, "no request was under way when the engine reloaded, so none could be mixed", ()
    return Verdict.HELD, f"none of {count} answers that were under way has tokens of both checkpoints", ()


def _is_around(request: Request, reload: Reload) -> bool:
    """Say whether an answer had begun before the weights changed and ended after the reload had begun.

    One that began later has no token of the older weights, whenever it was sent: it proves nothing.
    """
    began_before = request.token_ns[0] < reload.call_ns[0] and sent_ns(request) < reload.ended_ns
    return began_before and request.ended_ns > reload.started_ns


def _is_mixed(request: Request, reload: Reload) -> bool:
    return request.token_ns[0] < reload.call_ns[0] and request.token_ns[-1] > reload.after_ns


def _is_undecided(request: Request, reload: Reload) -> bool:
    return request.token_ns[0] < reload.call_ns[0] <= request.token_ns[-1] <= reload.after_ns


def checksums_trusted(history: History, context: Context) -> Judgement:
    """See whether the checksum endpoint told a reload: every parameter has other bytes, so each digest must differ."""
    told = [event for event in history.of(EventKind.RELOAD_ENDED) if event.data["succeeded"]]
    if not told:
        return Verdict.UNKNOWN, "no reload succeeded, so nothing is known of the checksum endpoint", ()
    seen = told[0].data.get("weights") or {}
    count = int(seen.get("count", 0))
    if not count:
        return (
            Verdict.UNKNOWN,
            f"the engine gives no checksums: {seen.get('said', 'nobody asked')}",
            (told[0].id,),
        )
    empty, same = list(seen["of_no_bytes"]), list(seen["unchanged"])
    in_one_only = list(seen.get("in_one_only", ()))  # runs recorded before this was looked at do not say
    if empty or same or in_one_only:
        return (
            Verdict.BROKEN,
            f"the checksums of {seen['unchanged_count']} of {count} parameters are the same after other weights were loaded, "
            f"those of {seen['of_no_bytes_count']} are the digest of no bytes, those of {seen.get('in_one_only_count', 0)} "
            f"were given before or after it only (for example {', '.join(sorted(in_one_only or empty or same)[:3])}): the endpoint "
            "cannot tell that weights arrived",
            (told[0].id,),
        )
    return Verdict.HELD, f"the checksums of all {count} parameters changed with the weights", (told[0].id,)
