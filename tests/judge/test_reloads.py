"""What is expected of an engine that is given other weights while it runs, on histories written by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.guards.canary import Answer
from harness.judge import claims
from harness.judge.claim import Claim, Context
from harness.judge.claims import judge
from harness.judge.detection import detection
from harness.judge.exposure import exposure
from harness.judge.moments import Layer, recovery_at_ns
from harness.judge.reloads import expected_answers, is_right, is_wrong, suspects
from harness.judge.verdict import Verdict
from harness.observe.history import Event, EventKind, Request
from tests.judge.histories import S, before, canary, ended, event, history, load, remedy

CONTEXT = Context(scenario="s", engine_label="reference-1")
Things = list[Request | Event]


def reload(
    at_s: float = 5.2, *, took_s: float = 0.3, succeeded: bool = True, pause: str = "none", **more: Any
) -> Things:
    """Return publish and reload of the engine that serves."""
    return [
        event(5, EventKind.PUBLISH_STARTED, version="new", how="atomic"),
        event(5.1, EventKind.ROLLOUT_STARTED, how="reload"),
        event(at_s, EventKind.RELOAD_STARTED, incarnation="old-1", expects="new", pause=pause),
        event(
            at_s + took_s,
            EventKind.RELOAD_ENDED,
            incarnation="old-1",
            succeeded=succeeded,
            **{"was_answered": True, "because": "" if succeeded else "reload_weights answered 500: no", **more},
        ),
    ]


def after(answer: str, *, first_s: float = 5.6, count: int = 6) -> Things:
    """Return users and canaries of the reloaded engine."""
    users = [load(first_s + at * 0.25, "old-1", took_s=0.05) for at in range(count * 2)]
    return [*users, *(canary(first_s + 0.1 + at * 0.5, "old-1", answer, took_s=0.05) for at in range(count))]


def verdict(claim: Claim, *things: Request | Event) -> Verdict:
    return next(f for f in judge((claim,), history(*things), CONTEXT) if f.claim == str(claim)).verdict


def test_expected_answer_switches_with_the_reload_and_either_is_right_meanwhile() -> None:
    seen = expected_answers(history(*before(), *reload()))["old-1"]
    assert (seen.started, seen.latest) == (Answer.OLD, Answer.NEW)
    for at_s, right, wrong in ((4.0, "old", "new"), (6.0, "new", "old")):
        assert is_right(canary(at_s, "old-1", right), seen)
        assert is_wrong(canary(at_s, "old-1", wrong), seen)
    for answer in ("old", "new"):
        meanwhile = canary(5.15, "old-1", answer)
        assert not is_right(meanwhile, seen)
        assert not is_wrong(meanwhile, seen)
    assert is_wrong(canary(5.15, "old-1", "neither"), seen)


def test_failed_reload_leaves_the_old_answer_right() -> None:
    seen = expected_answers(history(*before(), *reload(succeeded=False)))["old-1"]
    assert seen.latest is Answer.OLD
    assert is_right(canary(6, "old-1", "old"), seen)
    assert is_wrong(canary(6, "old-1", "new"), seen)


def test_reload_without_an_end_leaves_either_answer_possible() -> None:
    started = reload()[:3]
    seen = expected_answers(history(*before(), *started))["old-1"]
    assert not is_wrong(canary(9, "old-1", "old"), seen)


def test_reloaded_engine_has_its_weights_since_the_reload() -> None:
    assert suspects(history(*before(), *reload()), 5 * S, 9 * S) == {"old-1": round(5.5 * S)}
    assert suspects(history(*before()), 5 * S, 9 * S) == {}


def test_good_reload_is_harmless_and_service_is_back_with_it() -> None:
    meanwhile = [canary(5.15, "old-1", "old"), canary(5.3, "old-1", "new", took_s=0.3), load(5.25, "old-1", took_s=0.3)]
    seen = history(*before(), *reload(), *meanwhile, *after("new"), *ended())
    assert detection(seen).layer is Layer.HARMLESS
    assert recovery_at_ns(seen) == round(6.75 * S)
    assert exposure(seen).upper == 0
    mixed = canary(5.3, "old-1", "neither", took_s=0.1)
    assert exposure(history(*before(), *reload(), mixed, *after("new"), *ended(), *meanwhile)).upper > 0


def test_engine_that_kept_the_old_weights_and_said_otherwise_is_noticed_by_a_canary() -> None:
    seen = detection(history(*before(), *reload(), *after("old"), *ended()))
    assert seen.layer is Layer.CANARY
    assert "old instead of new" in seen.because


def test_mixture_is_noticed_by_a_canary_and_counted_until_the_remedy() -> None:
    seen = history(*before(), *reload(), *after("neither"), *remedy(), *ended())
    assert detection(seen).layer is Layer.CANARY
    counted = exposure(seen)
    assert counted.upper >= counted.lower > 0
    assert recovery_at_ns(seen) is not None


def test_refused_reload_counts_as_refused_start_and_tells_what_followed() -> None:
    refused = [*before(), *reload(succeeded=False)]
    served_on = detection(history(*refused, *after("old")))
    assert served_on.layer is Layer.STARTUP
    assert "went on serving" in served_on.because
    died = event(5.8, EventKind.ENGINE_DIED, incarnation="old-1", exit_code=0)
    seen = detection(history(*refused, load(5.7, "old-1", took_s=0.05, result="http_5xx"), died))
    assert seen.layer is Layer.STARTUP
    assert "then: a request" in seen.because
    assert recovery_at_ns(history(*refused, *after("old"), *ended())) is None


def test_reload_that_got_no_answer_is_in_doubt() -> None:
    assert detection(history(*before(), *reload(succeeded=False, was_answered=False))).doubt


def test_engine_that_fails_at_the_first_request_after_a_reload_that_succeeded() -> None:
    failed = load(5.7, "old-1", took_s=0.05, result="http_5xx")
    assert detection(history(*before(), *reload(), failed)).layer is Layer.FIRST_REQUEST
    answered = load(5.6, "old-1", took_s=0.05)
    assert detection(history(*before(), *reload(), answered, failed)).layer is Layer.CLIENT


def test_request_that_failed_before_the_reload_is_a_sign_of_what_was_published() -> None:
    failed = load(5.05, "old-1", took_s=0.02, result="http_5xx")
    assert detection(history(*before(), *reload(), failed, *after("new"))).layer is Layer.CLIENT


def test_stale_prefix_is_not_cleared_by_right_short_prompts() -> None:
    deep = event(
        5.55,
        EventKind.CANARY_CHECKED,
        incarnation="old-1",
        answer="neither",
        because="the KV cache is stale",
        when="of 200 tokens after the reload",
        rotation=-1,
    )
    seen = history(*before(), *reload(), deep, *after("new"), *ended())
    assert detection(seen).layer is Layer.CANARY
    assert "stale" in detection(seen).because
    assert exposure(seen).upper >= 12
    assert exposure(history(*before(), *reload(), *after("new"), *ended())).upper == 0


def streamed(first_s: float, last_s: float) -> Request:
    """Return a user's request with tokens at these times."""
    request = load(first_s - 0.1, "old-1", took_s=last_s - first_s + 0.2)
    return replace(request, token_ns=(round(first_s * S), round(last_s * S)))


def witness(mixed: int, *, failed: int = 0, at_s: float = 6) -> Event:
    return event(
        at_s,
        EventKind.CANARY_CHECKED,
        incarnation="old-1",
        answer="neither" if mixed else "new",
        under_way=4,
        mixed=mixed,
        failed=failed,
        because="2 of 4",
        rotation=-2,
    )


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ([streamed(5.15, 5.9)], Verdict.BROKEN),
        ([witness(2)], Verdict.BROKEN),
        ([streamed(5.15, 5.19), streamed(5.6, 5.9), witness(0)], Verdict.HELD),
        ([streamed(4.0, 4.5)], Verdict.UNKNOWN),
        ([witness(0, failed=4)], Verdict.UNKNOWN),
    ],
    ids=["a user's answer", "a witness", "none", "nothing under way", "all failed"],
)
def test_answers_unmixed(more: Things, expected: Verdict) -> None:
    assert verdict(claims.answers_unmixed(), *before(), *reload(), *more, *ended()) is expected


@pytest.mark.parametrize(
    ("pause", "last_s", "expected"),
    [
        ("none", 5.9, Verdict.HELD),
        ("none", 6.1, Verdict.UNKNOWN),
        ("none", 8.0, Verdict.UNKNOWN),
        ("none", 8.25, Verdict.BROKEN),
        ("wait", 5.9, Verdict.HELD),
        ("wait", 8.0, Verdict.UNKNOWN),
        ("wait", 8.25, Verdict.UNKNOWN),
        ("wait", 8.4, Verdict.BROKEN),
    ],
)
def test_an_answer_that_ended_while_the_weights_changed_is_undecided(
    pause: str, last_s: float, expected: Verdict
) -> None:
    """The call that changes the weights goes from 6.0 to 8.1 s; generators may stamp tokens 250 ms late."""
    rolled = reload(5.2, took_s=3.0, pause=pause, call_ns=[6 * S, round(8.1 * S)])
    answers = [streamed(5.0, 5.1), streamed(5.3, 5.4), streamed(5.0, last_s)]
    seen = history(*before(), *rolled, *answers, *ended())
    [found] = [f for f in judge((claims.answers_unmixed(),), seen, CONTEXT) if f.claim == "answers_unmixed()"]
    assert found.verdict is expected, found.because
    if expected is Verdict.UNKNOWN:
        assert "1 had their last token while the engine changed its weights" in found.because


def test_witnesses_that_ended_while_the_weights_changed_are_undecided() -> None:
    seen = replace(witness(0), data={**witness(0).data, "undecided": 1})
    assert verdict(claims.answers_unmixed(), *before(), *reload(), seen, *ended()) is Verdict.UNKNOWN


def test_answers_under_way_that_are_not_mixed_do_not_show_that_the_new_weights_arrived() -> None:
    few = [*before(), *reload(), *after("new", count=4)]
    assert detection(history(*few, canary(9, "old-1", "new"))).layer is Layer.HARMLESS
    assert detection(history(*few, witness(0))).layer is Layer.NEVER
    assert detection(history(*few, witness(2))).layer is Layer.CANARY
    wrong = [*before(), *reload(), *after("neither"), *ended()]
    assert exposure(history(*wrong, witness(0))) == exposure(history(*wrong))
    assert exposure(history(*wrong)).upper > 0


def test_answers_unmixed_knows_nothing_without_a_reload() -> None:
    assert verdict(claims.answers_unmixed(), *before(), streamed(4.0, 6.0), *ended()) is Verdict.UNKNOWN
    refused = reload(succeeded=False)
    assert verdict(claims.answers_unmixed(), *before(), *refused, streamed(4.0, 6.0), *ended()) is Verdict.UNKNOWN


def told(**seen: Any) -> Things:
    known = {"count": 3, "unchanged_count": 0, "unchanged": [], "of_no_bytes_count": 0, "of_no_bytes": [], **seen}
    return reload(weights=known)


@pytest.mark.parametrize(
    ("things", "expected"),
    [
        (told(), Verdict.HELD),
        (told(unchanged_count=1, unchanged=["a"]), Verdict.BROKEN),
        (told(of_no_bytes_count=1, of_no_bytes=["a"]), Verdict.BROKEN),
        (told(in_one_only_count=1, in_one_only=["a"]), Verdict.BROKEN),
        (reload(weights={"count": 0, "said": "HTTP 404: Not Found"}), Verdict.UNKNOWN),
        (reload(), Verdict.UNKNOWN),
        ([], Verdict.UNKNOWN),
    ],
    ids=[
        "all changed",
        "one did not",
        "one of no bytes",
        "one in one answer only",
        "no endpoint",
        "nobody asked",
        "no reload",
    ],
)
def test_checksums_trusted(things: Things, expected: Verdict) -> None:
    assert verdict(claims.checksums_trusted(), *before(), *things, *ended()) is expected


def test_what_an_engine_says_of_its_own_weights_is_told_with_the_layer() -> None:
    told_little = told(of_no_bytes_count=2, version_before="default", version_after="default")
    seen = detection(history(*before(), *told_little, *after("new"), *ended()))
    assert seen.layer is Layer.HARMLESS
    assert "2 of 3 parameters the digest of no bytes" in seen.because
    assert "'default' before" in seen.because


def test_reload_without_a_declared_fault_needs_no_proof() -> None:
    assert verdict(claims.faults_proved(), *before(), *reload(), *ended()) is Verdict.HELD
    assert verdict(claims.faults_proved(), *before(), *ended()) is Verdict.UNKNOWN
