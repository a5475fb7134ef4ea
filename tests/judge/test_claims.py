"""Every claim says held, broken and unknown where it should."""

from __future__ import annotations

import pytest

from harness.errors import ScenarioInvalid
from harness.judge import claims
from harness.judge.claim import Claim, Context
from harness.judge.claims import JUDGES, judge
from harness.judge.moments import Layer
from harness.judge.verdict import Finding, Verdict, combine
from harness.observe.history import EventKind, History
from tests.judge.histories import before, canary, ended, event, history, load, remedy, rollout

CONTEXT = Context(scenario="s", engine_label="reference-1", expected_layers=(Layer.CANARY,) * 3)
WRONG = [canary(6.3 + at * 0.5, "new-1", "neither", took_s=0.05) for at in range(4)]
USERS = [load(6.2 + at * 0.25, "new-1", took_s=0.05) for at in range(8)]
WHOLE = history(*before(), *rollout(), *USERS, *WRONG, *remedy(), *ended())
EMPTY = History((), ())


def verdict(claim: Claim, seen: History, context: Context = CONTEXT) -> Verdict:
    """Judge one claim."""
    return next(finding for finding in judge((claim,), seen, context) if finding.claim == str(claim)).verdict


def without(seen: History, *kinds: EventKind) -> History:
    """Return a history in which nothing of these kinds happened."""
    return History(seen.requests, tuple(each for each in seen.events if each.kind not in kinds))


@pytest.mark.parametrize(
    ("claim", "held", "broken", "unknown"),
    [
        (
            claims.detected_by("canary"),
            WHOLE,
            history(*before(), *rollout(), *USERS, load(8.5, "new-1", result="stall")),
            None,
        ),
        (claims.detected_within(limit_s=3), WHOLE, history(*before(), *rollout(), *USERS), EMPTY),
        (claims.exposed_at_most(8), WHOLE, history(*before(), *rollout(), *USERS, *WRONG, load(8.4, "new-1")), EMPTY),
        (
            claims.answered_ok(ratio_min=1.0),
            WHOLE,
            history(*before(), load(4.9, "old-1", result="reset"), *ended()),
            EMPTY,
        ),
        (
            claims.only_weights_served("old", window="before"),
            WHOLE,
            history(*before(), canary(1.2, "old-1", "new"), *ended()),
            EMPTY,
        ),
        (claims.recovered(within_s=3), WHOLE, history(*before(), *rollout(), *remedy()[:3], *ended()), EMPTY),
        (
            claims.latency_back_in_band(factor=1.5, windows=5),
            WHOLE,
            None,
            history(*before(1), *rollout(), *remedy(), *ended()),
        ),
        (claims.faults_proved(), WHOLE, None, without(WHOLE, EventKind.FAULT_INJECTED)),
        (claims.healthy_before(), WHOLE, None, history(*before(), canary(1.2, "old-1", "neither"), *rollout())),
        (claims.load_valid(), WHOLE, None, history(*before(), *ended(lag_ms_p99=400.0))),
        (
            claims.nothing_left_over(),
            WHOLE,
            history(*before(), event(21, EventKind.LEFT_OVER, things={"containers": ["x"]})),
            EMPTY,
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, Claim) else "",
)
def test_claim_is_held_broken_and_unknown(
    claim: Claim, held: History, broken: History | None, unknown: History | None
) -> None:
    assert verdict(claim, held) is Verdict.HELD
    if broken is not None:
        assert verdict(claim, broken) is Verdict.BROKEN
    if unknown is not None:
        assert verdict(claim, unknown) is Verdict.UNKNOWN


REFUSED = event(
    8, EventKind.ENGINE_NOT_READY, incarnation="new-1", reason="limit passed", exit_code=None, log_lines=["x"]
)


@pytest.mark.parametrize(
    "claim", [claims.detected_by("canary"), claims.detected_within(limit_s=9), claims.layer_as_expected()]
)
def test_a_doubted_detection_decides_nothing(claim: Claim) -> None:
    assert verdict(claim, history(*before(), *rollout()[:4], REFUSED)) is Verdict.UNKNOWN


def test_harmless_where_a_layer_was_recorded_is_unknown_not_better() -> None:
    right = [canary(6.3 + at * 0.3, "new-1", "new", took_s=0.05) for at in range(8)]
    assert verdict(claims.layer_as_expected(), history(*before(), *rollout(), *right)) is Verdict.UNKNOWN
    context = Context(scenario="s", engine_label="reference-1", expected_layers=(Layer.HARMLESS,) * 3)
    assert verdict(claims.layer_as_expected(), history(*before(), *rollout(), *right), context) is Verdict.HELD


def test_a_preflight_that_let_a_harmless_damage_pass_did_not_notice_it() -> None:
    """That nothing came of it is luck; the other layers notice harm, and there was none."""
    right = [canary(6.3 + at * 0.3, "new-1", "new", took_s=0.05) for at in range(8)]
    passed = event(5.5, EventKind.GUARD_PASSED, guard="preflight", took_s=0.1)
    by_preflight, by_canary = claims.detected_by("preflight"), claims.detected_by("canary")
    assert verdict(by_preflight, history(*before(), *rollout(), passed, *right)) is Verdict.BROKEN
    assert verdict(by_canary, history(*before(), *rollout(), passed, *right)) is Verdict.HELD
    judged = judge((by_preflight,), history(*before(), *rollout(), *right), CONTEXT)
    (unasked,) = [finding for finding in judged if finding.claim == str(by_preflight)]
    assert unasked.verdict is Verdict.UNKNOWN
    assert unasked.because.startswith("pre-flight was not asked; ")
    refused = event(5.5, EventKind.GUARD_REFUSED, guard="preflight", findings=[{"id": "D08"}])
    assert verdict(by_preflight, history(*before(), *rollout(), refused, *right)) is Verdict.HELD


def test_every_declared_fault_has_to_prove_itself() -> None:
    context = Context(scenario="s", engine_label="reference-1", faults=("widen_tensor", "late_purge"))
    finding = next(f for f in judge((), WHOLE, context) if f.claim == "faults_proved()")
    assert (finding.verdict, "late_purge" in finding.because) == (Verdict.UNKNOWN, True)


@pytest.mark.parametrize(
    ("undone", "expected"),
    [
        ({"proved": True, "refused": []}, Verdict.HELD),
        ({"proved": False, "refused": []}, Verdict.UNKNOWN),
        ({"proved": True, "refused": [{"id": "D08"}]}, Verdict.BROKEN),
        (None, Verdict.UNKNOWN),
    ],
)
def test_a_remedy_has_to_prove_that_it_undid_the_fault(undone: dict[str, object] | None, expected: Verdict) -> None:
    rest = without(WHOLE, EventKind.FAULT_UNDONE)
    events = (
        () if undone is None else (event(20.5, EventKind.FAULT_UNDONE, fault="widen_tensor", because="b", **undone),)
    )
    assert verdict(claims.faults_undone(), History(rest.requests, (*rest.events, *events))) is expected


def test_slow_service_after_recovery_is_out_of_band() -> None:
    slow = [load(11.5 + at * 0.25, "new-2", took_s=0.4) for at in range(30)]
    seen = history(*before(), *rollout(), *USERS, *WRONG, *remedy(), *slow, *ended())
    slowed = History(
        tuple(r for r in seen.requests if r.incarnation != "new-2" or r.latency_s > 0.3 or r.is_canary), seen.events
    )
    assert verdict(claims.latency_back_in_band(factor=1.5, windows=5), slowed) is Verdict.BROKEN


def test_service_that_was_watched_for_less_than_its_limit_is_unknown() -> None:
    seen = history(*before(), *rollout(), *remedy()[:3], *ended(at_s=20.0))
    begun = seen.of(EventKind.REMEDY_STARTED)[0].at_ns / 1e9
    assert verdict(claims.recovered(within_s=20.0 - begun - 0.1), seen) is Verdict.BROKEN
    assert verdict(claims.recovered(within_s=20.0 - begun + 0.1), seen) is Verdict.UNKNOWN


@pytest.mark.parametrize(
    ("recorded", "expected"),
    [
        ((Layer.CANARY,) * 3, Verdict.HELD),
        ((Layer.STARTUP, Layer.CANARY, Layer.STARTUP), Verdict.HELD),
        ((Layer.STARTUP,) * 3, Verdict.BROKEN),
        ((Layer.CANARY,) * 2, Verdict.UNKNOWN),
        ((), Verdict.UNKNOWN),
    ],
)
def test_layer_is_compared_with_the_latest_of_three_recorded_starts(
    recorded: tuple[Layer, ...], expected: Verdict
) -> None:
    context = Context(scenario="s", engine_label="reference-1", expected_layers=recorded)
    assert verdict(claims.layer_as_expected(), WHOLE, context) is expected


@pytest.mark.parametrize(
    ("recorded", "expected"), [((Layer.CANARY,) * 3, Verdict.HELD), ((Layer.STARTUP,) * 3, Verdict.UNKNOWN)]
)
def test_recorded_starts_of_other_checkpoints_accuse_nobody(recorded: tuple[Layer, ...], expected: Verdict) -> None:
    context = Context(scenario="s", engine_label="reference-1", expected_layers=recorded, replaced=("model",))
    assert verdict(claims.layer_as_expected(), WHOLE, context) is expected


def test_every_declared_claim_has_a_judge() -> None:
    declared = [
        value
        for value in vars(claims).values()
        if callable(value) and getattr(value, "__module__", "") == claims.__name__
    ]
    names = {function.__name__ for function in declared if function.__annotations__.get("return") == "Claim"}
    assert names == set(JUDGES)


def test_claim_that_crashes_is_unknown_and_says_so() -> None:
    finding = next(f for f in judge((Claim("recovered", {"within_s": "soon"}),), WHOLE, CONTEXT) if "soon" in f.claim)
    assert finding.verdict is Verdict.UNKNOWN
    assert "TypeError" in finding.because


def test_unknown_layer_is_refused_when_declared() -> None:
    with pytest.raises(ScenarioInvalid, match="midnight"):
        claims.detected_by("midnight")


def found(verdict: str, *, precondition: bool = False) -> Finding:
    """Return a finding."""
    return Finding(claim="c", verdict=Verdict(verdict), because="b", is_precondition=precondition)


@pytest.mark.parametrize(
    ("findings", "expected"),
    [
        ([], Verdict.UNKNOWN),
        ([found("held", precondition=True)], Verdict.UNKNOWN),
        ([found("held")], Verdict.HELD),
        ([found("held"), found("unknown")], Verdict.UNKNOWN),
        ([found("broken"), found("unknown"), found("held")], Verdict.BROKEN),
        ([found("broken"), found("unknown", precondition=True)], Verdict.UNKNOWN),
        ([found("held"), found("broken", precondition=True)], Verdict.UNKNOWN),
    ],
)
def test_preconditions_come_first_then_broken_beats_unknown_beats_held(
    findings: list[Finding], expected: Verdict
) -> None:
    assert combine(findings) is expected


def test_claim_that_is_always_true_is_refused_when_declared() -> None:
    with pytest.raises(ScenarioInvalid, match="always true"):
        claims.detected_by("never")
