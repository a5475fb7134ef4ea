"""Answers to the claims about the service: who noticed, what users got, when it came back."""

from __future__ import annotations

from harness.clock import seconds_between
from harness.guards.canary import Answer
from harness.judge.claim import WHY_PAIRED_ONLY, Context, Judgement
from harness.judge.detection import Detection, detection
from harness.judge.exposure import exposure
from harness.judge.latency import band_finding
from harness.judge.moments import (
    RIGHT_IN_A_ROW,
    Layer,
    Window,
    fault_at_ns,
    fault_event,
    load_span,
    recovery_at_ns,
    remedy_at_ns,
    requests_in,
    service_changed,
    window_span,
)
from harness.judge.verdict import Verdict
from harness.observe.history import Event, EventKind, History, RequestResult

STARTS_BEHIND_AN_EXPECTATION = 3
RATES_ALIKE = 3.0  # Poisson arrivals of 15 requests on either side are further apart once in more than a hundred times


def layer_as_expected(history: History, context: Context) -> Judgement:
    """Compare the layer that noticed with the latest of the recorded starts."""
    seen = detection(history)
    known = context.expected_layers
    if len(known) < STARTS_BEHIND_AN_EXPECTATION:
        return (
            Verdict.UNKNOWN,
            f'{context.engine_label} has {len(known)} recorded starts of "{context.scenario}", at least '
            f"{STARTS_BEHIND_AN_EXPECTATION} are needed; seen now: {seen.layer} ({seen.because})",
            seen.evidence,
        )
    if seen.doubt:
        return _doubted(seen)
    if seen.layer is Layer.HARMLESS and Layer.HARMLESS not in known:
        return Verdict.UNKNOWN, f"nobody noticed anything where {known[-1]} was recorded: {seen.because}", seen.evidence
    latest = max(known, key=lambda layer: layer.rank)
    if seen.layer.rank > latest.rank:
        later = f"noticed at {seen.layer}, later than ever recorded ({latest}): {seen.because}"
        if context.replaced:
            other = f"; but the recorded starts are without what this run was given: {', '.join(context.replaced)}"
            return Verdict.UNKNOWN, later + other, seen.evidence
        return Verdict.BROKEN, later, seen.evidence
    earlier = "" if seen.layer in known else f", earlier than ever recorded ({', '.join(sorted(set(known)))})"
    return Verdict.HELD, f"noticed at {seen.layer}{earlier}: {seen.because}", seen.evidence


def _doubted(seen: Detection) -> Judgement:
    return Verdict.UNKNOWN, f"{seen.because}; but {seen.doubt}", seen.evidence


def detected_by(history: History, context: Context, layer: str) -> Judgement:
    """Compare the layer that noticed with the claimed one. Pre-flight sees damage whether or not it does harm; others see harm."""
    seen = detection(history)
    if seen.doubt:
        return _doubted(seen)
    if seen.layer is Layer.HARMLESS and layer == Layer.PREFLIGHT:
        passed = next((e for e in history.of(EventKind.GUARD_PASSED) if e.data.get("guard") == "preflight"), None)
        if passed is None:
            return Verdict.UNKNOWN, f"pre-flight was not asked; {seen.because}", seen.evidence
        return (
            Verdict.BROKEN,
            f"pre-flight let the damage pass, claimed it notices; that it did no harm is luck: {seen.because}",
            (passed.id, *seen.evidence),
        )
    verdict = Verdict.HELD if seen.layer.rank <= Layer(layer).rank else Verdict.BROKEN
    return verdict, f"noticed at {seen.layer}, claimed {layer} or earlier: {seen.because}", seen.evidence


def detected_within(history: History, context: Context, limit_s: float) -> Judgement:
    """Measure how long after the fault began to act it was noticed: after the publish, the rollout or the incident."""
    seen, began = detection(history), fault_event(history)
    if began is None:
        return Verdict.UNKNOWN, "no rollout was started", ()
    if seen.doubt:
        return _doubted(seen)
    if seen.at_ns is None and seen.layer is not Layer.HARMLESS:
        watched_s = _watched_s(history, began.at_ns)
        verdict = Verdict.BROKEN if watched_s >= limit_s else Verdict.UNKNOWN
        return verdict, f"{seen.layer}: {seen.because} in {watched_s:.1f} s, limit {limit_s:g} s", seen.evidence
    if seen.at_ns is None:
        return Verdict.HELD, f"{seen.layer}: {seen.because}", seen.evidence
    after_s = seconds_between(began.at_ns, seen.at_ns)
    verdict = Verdict.HELD if after_s <= limit_s else Verdict.BROKEN
    return (
        verdict,
        f"noticed {after_s:.2f} s after the {began.kind.removesuffix('_started')} began, limit {limit_s:g} s: {seen.because}",
        seen.evidence,
    )


def _watched_s(history: History, since_ns: int) -> float:
    """Return how long somebody could have noticed: until the remedy, or the end of the load."""
    remedy_ns, span = remedy_at_ns(history), load_span(history)
    until_ns = remedy_ns if remedy_ns is not None else since_ns if span is None else span[1]
    return seconds_between(since_ns, max(since_ns, until_ns))


def exposed_at_most(history: History, context: Context, answers: int) -> Judgement:
    """Count the answers that may have come from wrong weights."""
    seen = exposure(history)
    verdict = Verdict.HELD if seen.upper <= answers else Verdict.BROKEN
    if not any(history.canaries()) and history.first(EventKind.CANARY_CHECKED) is None:
        return Verdict.UNKNOWN, "no canary was sent, so nobody knows which weights answered", ()
    return (
        verdict,
        f"between {seen.lower} and {seen.upper} answers came from wrong weights, claimed at most {answers}",
        seen.evidence,
    )


def answered_ok(history: History, context: Context, ratio_min: float, window: str) -> Judgement:
    """Count the planned requests of a window that were answered."""
    planned = [r for r in requests_in(history, Window(window), canaries=False) if not r.is_ours]
    if not planned:
        return Verdict.UNKNOWN, f'no request was planned in window "{window}"', ()
    failed = [r for r in planned if r.result is not RequestResult.OK]
    ratio = 1 - len(failed) / len(planned)
    kinds = ", ".join(f"{sum(r.result is kind for r in failed)} {kind}" for kind in sorted({r.result for r in failed}))
    return (
        Verdict.HELD if ratio >= ratio_min else Verdict.BROKEN,
        f'{len(planned) - len(failed)} of {len(planned)} requests in window "{window}" were answered ({ratio:.1%}), claimed '
        f"at least {ratio_min:.1%}" + (f"; failures: {kinds}" if failed else ""),
        tuple(request.id for request in failed[:5]),
    )


def only_weights_served(history: History, context: Context, which: str, window: str) -> Judgement:
    """Look at which weights the canaries of a window were answered from."""
    canaries = [r for r in requests_in(history, Window(window), canaries=True) if r.result is RequestResult.OK]
    wrong = [r for r in canaries if r.answer not in (which, Answer.AMBIGUOUS)]
    if wrong:
        seen = ", ".join(sorted({str(r.answer) for r in wrong}))
        text = f'{len(wrong)} of {len(canaries)} canaries in window "{window}" were answered by {seen} instead of {which} weights'
        return Verdict.BROKEN, text, tuple(r.id for r in wrong[:5])
    right = [r for r in canaries if r.answer == which]
    if not right:
        return Verdict.UNKNOWN, f'no canary in window "{window}" was answered beyond doubt', ()
    return Verdict.HELD, f'all {len(right)} clear canaries in window "{window}" came from the {which} weights', ()


def recovered(history: History, context: Context, within_s: float) -> Judgement:
    """Measure how long after the remedy began service answered rightly again."""
    begun, end = service_changed(history), recovery_at_ns(history)
    if begun is None:
        return Verdict.UNKNOWN, "neither a rollout nor a remedy was started", ()
    start = begun.at_ns
    if end is None:
        last = next((r for r in reversed(history.canaries()) if r.planned_ns >= start), None)
        seen = "no canary was sent" if last is None else f"the last canary was {last.answer or last.result}"
        evidence = [] if last is None else [last.id]
        if (error := _load_error(history, since_ns=start)) is not None:
            seen += f'; the log of "{error.data["incarnation"]}" says since: "{error.data["line"][:200]}"'
            evidence.append(error.id)
        span = load_span(history)
        watched_s = 0.0 if span is None else seconds_between(start, span[1])
        if watched_s < within_s:
            return (
                Verdict.UNKNOWN,
                f"service was watched for {watched_s:.1f} s after the remedy began, too short for the limit of {within_s:g} s, "
                f"and was not back: {seen}",
                tuple(evidence),
            )
        return (
            Verdict.BROKEN,
            f"service never came back: no {RIGHT_IN_A_ROW} right canaries in a row from an engine started since whose log "
            f"shows no load error; {seen}",
            tuple(evidence),
        )
    took_s = seconds_between(start, end)
    verdict = Verdict.HELD if took_s <= within_s else Verdict.BROKEN
    return verdict, f"service answered rightly again after {took_s:.1f} s, limit {within_s:g} s", ()


def _load_error(history: History, *, since_ns: int) -> Event | None:
    """Return the first line of a log since then that keeps its engine from counting as recovered."""
    lines = (event for event in history.of(EventKind.LOG_LINE) if event.at_ns >= since_ns)
    return next((event for event in lines if event.data.get("class") in ("load", "file")), None)


def latency_back_in_band(history: History, context: Context, factor: float, windows: int) -> Judgement:
    """Compare latency after recovery with the band before the fault.

    What was still under way at the fault may have been ended or held up by it: it says nothing about the time before.
    """
    rates = [_arrivals_per_s(history, window) for window in (Window.BEFORE, Window.AFTER)]
    if min(rates) > 0 and max(rates) > RATES_ALIKE * min(rates):
        said = f"{rates[0]:.1f} requests per second arrived before the fault and {rates[1]:.1f} after recovery"
        return Verdict.UNKNOWN, f"{said}: another load has another latency", ()
    fault_ns = fault_at_ns(history)
    before = requests_in(history, Window.BEFORE, canaries=False)
    return band_finding(
        [request for request in before if fault_ns is None or request.ended_ns < fault_ns],
        requests_in(history, Window.AFTER, canaries=False),
        factor=factor,
        windows=windows,
    )


def _arrivals_per_s(history: History, window: Window) -> float:
    span = window_span(history, window)
    if span is None or span[1] <= span[0]:
        return 0.0
    return len(requests_in(history, window, canaries=False)) / seconds_between(*span)


def latency_not_regressed(history: History, context: Context, profile: str) -> Judgement:
    """Say why one scenario cannot answer this."""
    return Verdict.UNKNOWN, WHY_PAIRED_ONLY, ()
