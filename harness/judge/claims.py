"""What a scenario may claim about its history; every claim is a pure function of it.

A claim is declared as a name with parameters, so that it is stored with the run and can be judged anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.clock import seconds_between
from harness.errors import ScenarioInvalid, UsageError
from harness.guards.canary import Answer
from harness.judge.exposure import exposure
from harness.judge.latency import band_finding
from harness.judge.moments import (
    RIGHT_IN_A_ROW,
    Detection,
    Layer,
    Window,
    detection,
    expected_answers,
    fault_at_ns,
    is_right,
    load_span,
    recovery_at_ns,
    remedy_at_ns,
    requests_in,
)
from harness.judge.verdict import Finding, Verdict
from harness.observe.history import EventKind, History, RequestResult

Judgement = tuple[Verdict, str, tuple[str, ...]]  # verdict, sentence, evidence
STARTS_BEHIND_AN_EXPECTATION = 3
LAG_LIMIT_MS = 250.0  # beyond it the generator, not the engine, made the latency
PAIRED_ONLY = "latency_not_regressed"
WHY_PAIRED_ONLY = (
    f"{PAIRED_ONLY} needs paired, interleaved blocks (harness compare): within one scenario the old checkpoint runs before "
    "the new one, and a machine that drifts in between looks like a regression; claim latency_back_in_band(factor, windows) here"
)


@dataclass(frozen=True, slots=True)
class Claim:
    """A statement about a history, by name and parameters."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def with_patience(self, factor: float) -> Claim:
        """Return the same claim with its time limits multiplied."""
        limits = {name: value * factor for name, value in self.parameters.items() if name in ("within_s", "limit_s")}
        return Claim(self.name, {**self.parameters, **limits})

    def __str__(self) -> str:
        shown = ", ".join(f"{key}={value!r}" for key, value in self.parameters.items())
        return f"{self.name}({shown})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What a claim needs besides the history; stored with the run."""

    scenario: str
    engine_label: str
    expected_layers: tuple[Layer, ...] = ()  # one per recorded start of this scenario on this engine release
    faults: tuple[str, ...] = ()  # the declared ones: each has to prove itself


def layer_as_expected() -> Claim:
    """Claim that the fault is noticed no later than in the recorded starts of this engine release."""
    return Claim("layer_as_expected")


def detected_by(layer: str) -> Claim:
    """Claim that the fault is noticed at this layer or an earlier one."""
    try:
        Layer(layer)
    except ValueError:
        raise ScenarioInvalid(f'detected_by: "{layer}" is no layer; layers: {", ".join(Layer)}') from None
    if layer == Layer.NEVER:
        raise ScenarioInvalid('detected_by("never") is always true; claim a layer that can be missed')
    return Claim("detected_by", {"layer": layer})


def detected_within(limit_s: float) -> Claim:
    """Claim that the fault is noticed within `limit_s` seconds of the rollout."""
    return Claim("detected_within", {"limit_s": limit_s})


def exposed_at_most(answers: int) -> Claim:
    """Claim that at most so many answers came from wrong weights, counted at the upper end of the interval."""
    return Claim("exposed_at_most", {"answers": answers})


def answered_ok(*, ratio_min: float, window: str = "all") -> Claim:
    """Claim that at least this share of the planned requests was answered."""
    return Claim("answered_ok", {"ratio_min": ratio_min, "window": Window(window).value})


def only_weights_served(which: str, *, window: str = "all") -> Claim:
    """Claim that every answered canary came from the `old` or from the `new` weights."""
    return Claim("only_weights_served", {"which": Answer(which).value, "window": Window(window).value})


def recovered(*, within_s: float) -> Claim:
    """Claim that service was back, answering rightly, within `within_s` seconds of the remedy."""
    return Claim("recovered", {"within_s": within_s})


def latency_back_in_band(*, factor: float, windows: int) -> Claim:
    """Claim that after recovery most of `windows` windows have a median latency inside the old band times `factor`."""
    return Claim("latency_back_in_band", {"factor": factor, "windows": windows})


def latency_not_regressed(*, profile: str = "nightly") -> Claim:
    """Claim that the new side of a comparison is not slower by more than the profile's margin.

    For paired blocks alone (`harness compare`): a scenario refuses it. Slower is broken, not slower is held, and
    inconclusive or invalid is unknown.
    """
    from harness.judge.paired import profile_named

    try:
        return Claim(PAIRED_ONLY, {"profile": profile_named(profile).name})
    except UsageError as error:
        raise ScenarioInvalid(f"{PAIRED_ONLY}: {error}") from None


def faults_proved() -> Claim:
    """Claim that every fault proved itself (added to every scenario)."""
    return Claim("faults_proved")


def healthy_before() -> Claim:
    """Claim that the engine answered every request rightly before the fault (added to every scenario)."""
    return Claim("healthy_before")


def load_valid() -> Claim:
    """Claim that the load was what was planned (added to every scenario)."""
    return Claim("load_valid")


def nothing_left_over() -> Claim:
    """Claim that nothing of the scenario is left after it (added to every scenario)."""
    return Claim("nothing_left_over")


def faults_undone() -> Claim:
    """Claim that the remedy undid every fault, and that no guard refuses the undamaged checkpoint (always added)."""
    return Claim("faults_undone")


PRECONDITIONS = (faults_proved(), healthy_before(), load_valid())
ALWAYS = (faults_undone(), nothing_left_over())


def _layer_as_expected(history: History, context: Context) -> Judgement:
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
        return (
            Verdict.BROKEN,
            f"noticed at {seen.layer}, later than ever recorded ({latest}): {seen.because}",
            seen.evidence,
        )
    earlier = "" if seen.layer in known else f", earlier than ever recorded ({', '.join(sorted(set(known)))})"
    return Verdict.HELD, f"noticed at {seen.layer}{earlier}: {seen.because}", seen.evidence


def _doubted(seen: Detection) -> Judgement:
    return Verdict.UNKNOWN, f"{seen.because}; but {seen.doubt}", seen.evidence


def _detected_by(history: History, context: Context, layer: str) -> Judgement:
    seen = detection(history)
    if seen.doubt:
        return _doubted(seen)
    verdict = Verdict.HELD if seen.layer.rank <= Layer(layer).rank else Verdict.BROKEN
    return verdict, f"noticed at {seen.layer}, claimed {layer} or earlier: {seen.because}", seen.evidence


def _detected_within(history: History, context: Context, limit_s: float) -> Judgement:
    seen, start = detection(history), fault_at_ns(history)
    if start is None:
        return Verdict.UNKNOWN, "no rollout was started", ()
    if seen.doubt:
        return _doubted(seen)
    if seen.at_ns is None:
        verdict = Verdict.HELD if seen.layer is Layer.HARMLESS else Verdict.BROKEN
        return verdict, f"{seen.layer}: {seen.because}", seen.evidence
    after_s = seconds_between(start, seen.at_ns)
    verdict = Verdict.HELD if after_s <= limit_s else Verdict.BROKEN
    return (
        verdict,
        f"noticed {after_s:.2f} s after the rollout began, limit {limit_s:g} s: {seen.because}",
        seen.evidence,
    )


def _exposed_at_most(history: History, context: Context, answers: int) -> Judgement:
    seen = exposure(history)
    verdict = Verdict.HELD if seen.upper <= answers else Verdict.BROKEN
    if not any(history.canaries()) and history.first(EventKind.CANARY_CHECKED) is None:
        return Verdict.UNKNOWN, "no canary was sent, so nobody knows which weights answered", ()
    return (
        verdict,
        f"between {seen.lower} and {seen.upper} answers came from wrong weights, claimed at most {answers}",
        seen.evidence,
    )


def _answered_ok(history: History, context: Context, ratio_min: float, window: str) -> Judgement:
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


def _only_weights_served(history: History, context: Context, which: str, window: str) -> Judgement:
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


def _recovered(history: History, context: Context, within_s: float) -> Judgement:
    start, end = remedy_at_ns(history), recovery_at_ns(history)
    rollout = history.first(EventKind.ROLLOUT_STARTED)
    if start is None and rollout is not None:
        start = rollout.at_ns
    if start is None:
        return Verdict.UNKNOWN, "neither a rollout nor a remedy was started", ()
    if end is None:
        last = next((r for r in reversed(history.canaries()) if r.planned_ns >= start), None)
        seen = "no canary was sent" if last is None else f"the last canary was {last.answer or last.result}"
        span = load_span(history)
        watched_s = 0.0 if span is None else seconds_between(start, span[1])
        if watched_s < within_s:
            return (
                Verdict.UNKNOWN,
                f"service was watched for {watched_s:.1f} s after the remedy began, too short for the limit of {within_s:g} s, "
                f"and was not back: {seen}",
                () if last is None else (last.id,),
            )
        return (
            Verdict.BROKEN,
            f"service never came back: no {RIGHT_IN_A_ROW} right canaries in a row from an engine started since; {seen}",
            () if last is None else (last.id,),
        )
    took_s = seconds_between(start, end)
    verdict = Verdict.HELD if took_s <= within_s else Verdict.BROKEN
    return verdict, f"service answered rightly again after {took_s:.1f} s, limit {within_s:g} s", ()


def _latency_back_in_band(history: History, context: Context, factor: float, windows: int) -> Judgement:
    return band_finding(
        requests_in(history, Window.BEFORE, canaries=False),
        requests_in(history, Window.AFTER, canaries=False),
        factor=factor,
        windows=windows,
    )


def _latency_not_regressed(history: History, context: Context, profile: str) -> Judgement:
    return Verdict.UNKNOWN, WHY_PAIRED_ONLY, ()


def _faults_proved(history: History, context: Context) -> Judgement:
    injected = history.of(EventKind.FAULT_INJECTED)
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


def _healthy_before(history: History, context: Context) -> Judgement:
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


def _load_valid(history: History, context: Context) -> Judgement:
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


def _faults_undone(history: History, context: Context) -> Judgement:
    if history.first(EventKind.REMEDY_STARTED) is None:
        return Verdict.HELD, "nothing had to be undone", ()
    undone = history.of(EventKind.FAULT_UNDONE)
    refused = [event for event in undone if event.data.get("refused")]
    if refused:
        said = ", ".join(sorted({str(finding["id"]) for finding in refused[0].data["refused"]}))
        return Verdict.BROKEN, f"pre-flight refuses the undamaged checkpoint too ({said})", (refused[0].id,)
    unproved = [event for event in undone if not event.data["proved"]]
    if unproved or not undone:
        said = "the remedy did not come that far" if not undone else str(unproved[0].data["because"])
        return Verdict.UNKNOWN, f"not proved to be undone: {said}", tuple(event.id for event in unproved)
    return Verdict.HELD, str(undone[0].data["because"]), tuple(event.id for event in undone)


def _nothing_left_over(history: History, context: Context) -> Judgement:
    left, clean = history.last(EventKind.LEFT_OVER), history.last(EventKind.NOTHING_LEFT)
    if left is not None:
        return Verdict.BROKEN, f"left over after the scenario: {left.data['things']}", (left.id,)
    if clean is None:
        failed = [e for e in history.of(EventKind.OBSERVER_FAILED) if e.data.get("observer") == "left-overs"]
        why = f": {failed[-1].data['because']}" if failed else ""
        return Verdict.UNKNOWN, f"nobody could look for left-overs{why}", tuple(event.id for event in failed[-1:])
    return Verdict.HELD, f"looked for {clean.data['checked']}: nothing is left", (clean.id,)


JUDGES: dict[str, Callable[..., Judgement]] = {
    "layer_as_expected": _layer_as_expected,
    "detected_by": _detected_by,
    "detected_within": _detected_within,
    "exposed_at_most": _exposed_at_most,
    "answered_ok": _answered_ok,
    "only_weights_served": _only_weights_served,
    "recovered": _recovered,
    "latency_back_in_band": _latency_back_in_band,
    PAIRED_ONLY: _latency_not_regressed,
    "faults_proved": _faults_proved,
    "healthy_before": _healthy_before,
    "load_valid": _load_valid,
    "faults_undone": _faults_undone,
    "nothing_left_over": _nothing_left_over,
}


def judge(claims: tuple[Claim, ...], history: History, context: Context) -> tuple[Finding, ...]:
    """Judge the preconditions, the author's claims and what every scenario claims; a claim that crashes is unknown."""
    findings = []
    for claim in (*PRECONDITIONS, *claims, *ALWAYS):
        try:
            verdict, because, evidence = JUDGES[claim.name](history, context, **claim.parameters)
        except Exception as error:
            verdict, because, evidence = Verdict.UNKNOWN, f"judging failed: {type(error).__name__}: {error}", ()
        findings.append(
            Finding(
                claim=str(claim),
                verdict=verdict,
                because=because,
                evidence=evidence,
                is_precondition=claim in PRECONDITIONS,
            )
        )
    return tuple(findings)
