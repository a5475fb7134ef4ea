"""What a scenario may claim about its history; every claim is a pure function of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeGuard

from harness.errors import ScenarioInvalid, UsageError
from harness.guards.canary import Answer
from harness.judge import answers, incident_answers, live_answers, own_answers, prefix_cache, spike, weight_version
from harness.judge.claim import PAIRED_ONLY, Claim, Context, Judgement
from harness.judge.moments import Layer, Window
from harness.judge.verdict import Finding, Verdict
from harness.observe.history import History


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
    return Claim("detected_within", {"limit_s": _above_zero("limit_s", limit_s)})


def exposed_at_most(answers: int) -> Claim:
    """Claim that at most so many answers came from wrong weights, counted at the upper end of the interval."""
    return Claim("exposed_at_most", {"answers": _whole("answers", answers, smallest=0)})


def answered_ok(*, ratio_min: float, window: str = "all") -> Claim:
    """Claim that at least this share of the planned requests was answered."""
    return Claim("answered_ok", {"ratio_min": _share("ratio_min", ratio_min), "window": _window(window)})


def only_weights_served(which: str, *, window: str = "all") -> Claim:
    """Claim that every answered canary came from the `old` or from the `new` weights."""
    if which not in (Answer.OLD, Answer.NEW):
        raise ScenarioInvalid(f"only_weights_served: {which!r} are no weights; weights: {Answer.OLD}, {Answer.NEW}")
    return Claim("only_weights_served", {"which": Answer(which).value, "window": _window(window)})


def recovered(*, within_s: float) -> Claim:
    """Claim that service was back, answering rightly, within `within_s` seconds of the remedy."""
    return Claim("recovered", {"within_s": _above_zero("within_s", within_s)})


def latency_back_in_band(*, factor: float, windows: int) -> Claim:
    """Claim that after recovery most of `windows` windows have a median latency inside the old band times `factor`."""
    counted = _whole("windows", windows, smallest=1)
    return Claim("latency_back_in_band", {"factor": _above_zero("factor", factor), "windows": counted})


def spike_at_most(*, factor: float) -> Claim:
    """Claim that no 2 s of the rollout had a median first token of more than `factor` times the one before it."""
    return Claim("spike_at_most", {"factor": _factor(factor)})


def spike_at_least(*, factor: float) -> Claim:
    """Expect that some 2 s of the rollout had at least `factor` times the median first token before it; else unknown."""
    return Claim("spike_at_least", {"factor": _factor(factor)})


def prefix_cache_went_cold(*, ratio_before_min: float) -> Claim:
    """Expect that the rollout emptied a prefix cache that found at least this share of the prompt tokens; else unknown."""
    return Claim("prefix_cache_went_cold", {"ratio_before_min": _share("ratio_before_min", ratio_before_min)})


def latency_not_regressed(*, profile: str = "nightly") -> Claim:
    """Claim that the new side of a comparison is not slower by more than the profile's margin.

    For paired blocks alone (`harness compare`): a scenario refuses it. Slower is broken, not slower is held, and
    inconclusive or invalid is unknown.
    """
    from harness.judge.profiles import profile_named

    try:
        return Claim(PAIRED_ONLY, {"profile": profile_named(profile).name})
    except UsageError as error:
        raise ScenarioInvalid(f"{PAIRED_ONLY}: {error}") from None


def answers_unmixed() -> Claim:
    """Claim that no answer that was under way at a reload has tokens of both checkpoints."""
    return Claim("answers_unmixed")


def checksums_trusted() -> Claim:
    """Claim that the checksum endpoint told a reload: the digest of every parameter changed with its bytes."""
    return Claim("checksums_trusted")


def version_told_truly() -> Claim:
    """Claim that after an update the version that the engine tells is that of the weights that it answers from."""
    return Claim("version_told_truly")


def health_told(*, within_s: float) -> Claim:
    """Claim that `/health` of a struck engine was bad within `within_s` seconds."""
    return Claim("health_told", {"within_s": _above_zero("within_s", within_s)})


def exit_code_told() -> Claim:
    """Claim that a struck server ended with an exit code that a supervisor with restart-on-failure acts upon: not 0."""
    return Claim("exit_code_told")


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

JUDGES: dict[str, Callable[..., Judgement]] = {
    "layer_as_expected": answers.layer_as_expected,
    "detected_by": answers.detected_by,
    "detected_within": answers.detected_within,
    "exposed_at_most": answers.exposed_at_most,
    "answered_ok": answers.answered_ok,
    "only_weights_served": answers.only_weights_served,
    "recovered": answers.recovered,
    "latency_back_in_band": answers.latency_back_in_band,
    "spike_at_most": spike.spike_at_most,
    "spike_at_least": spike.spike_at_least,
    "prefix_cache_went_cold": prefix_cache.prefix_cache_went_cold,
    PAIRED_ONLY: answers.latency_not_regressed,
    "answers_unmixed": live_answers.answers_unmixed,
    "checksums_trusted": live_answers.checksums_trusted,
    "version_told_truly": weight_version.version_told_truly,
    "health_told": incident_answers.health_told,
    "exit_code_told": incident_answers.exit_code_told,
    "faults_proved": own_answers.faults_proved,
    "healthy_before": own_answers.healthy_before,
    "load_valid": own_answers.load_valid,
    "faults_undone": own_answers.faults_undone,
    "nothing_left_over": own_answers.nothing_left_over,
}


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _above_zero(name: str, value: float) -> float:
    """Return a number that a claim can be about; with any other it would be broken, or held, whatever an engine does."""
    if not (_is_number(value) and value > 0):
        raise ScenarioInvalid(f"{name} is {value!r}: it must be a number above 0")
    return value


def _share(name: str, value: float) -> float:
    if not (_is_number(value) and 0 < value <= 1):
        raise ScenarioInvalid(f"{name} is {value!r}: it must be a share above 0, and 1 is all of them")
    return value


def _factor(factor: float) -> float:
    if not (_is_number(factor) and factor > 1):
        raise ScenarioInvalid(f"factor is {factor!r}: it must be a number above 1")
    return factor


def _whole(name: str, value: int, *, smallest: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
        raise ScenarioInvalid(f"{name} is {value!r}: it must be a whole number of at least {smallest}")
    return value


def _window(window: str) -> str:
    if window not in frozenset(Window):
        raise ScenarioInvalid(f"{window!r} is no window; windows: {', '.join(Window)}")
    return Window(window).value


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
    if early := own_answers.ended_early(history):  # what was seen until then is judged all the same
        findings.append(Finding(claim="came_to_its_end()", verdict=Verdict.UNKNOWN, because=early))
    return tuple(findings)
