"""An engine that is struck while it serves: who noticed, what its health and its exit code told, when service was back."""

from __future__ import annotations

import pytest

from harness.faults import FAULTS
from harness.judge import claims
from harness.judge.claim import Claim, Context
from harness.judge.detection import detection
from harness.judge.exposure import LEAVE_WEIGHTS_ALONE, exposure
from harness.judge.moments import Layer, fault_at_ns, recovery_at_ns
from harness.judge.verdict import Verdict
from harness.observe.history import Event, EventKind, History, Request
from tests.judge.histories import S, before, canary, ended, event, history, load

CONTEXT = Context(scenario="s", engine_label="reference-1.0", faults=("frozen_process",))


def struck(at_s: float = 5.0, *, by: tuple[str, ...] = ("frozen_process",)) -> list[Request | Event]:
    return [
        event(at_s, EventKind.INCIDENT_STARTED, incarnation="old-1", undo=dict.fromkeys(by, "by hand")),
        event(at_s + 0.1, EventKind.FAULT_INJECTED, fault="frozen_process", fault_id="M04", proved=True, because="T"),
    ]


def health(at_s: float, status: int, incarnation: str = "old-1", *, refused: bool = False) -> Event:
    return event(at_s, EventKind.HEALTH, incarnation=incarnation, status=status, refused=refused, took_ms=1.0)


def died(at_s: float, code: int) -> Event:
    return event(at_s, EventKind.ENGINE_DIED, incarnation="old-1", exit_code=code)


def restarted(at_s: float = 12.0) -> list[Request | Event]:
    return [
        event(at_s, EventKind.REMEDY_STARTED, what="restart"),
        event(at_s + 0.1, EventKind.ENGINE_STARTING, incarnation="old-2", expects="old"),
        event(at_s + 1, EventKind.ENGINE_READY, incarnation="old-2", took_s=1.0),
        event(20.5, EventKind.FAULT_UNDONE, fault="frozen_process", proved=True, because="runs", refused=[]),
        *(canary(at_s + 1.1 + at * 0.5, "old-2", "old") for at in range(8)),
        *(load(at_s + 1.2 + at * 0.5, "old-2") for at in range(8)),
    ]


FROZEN = (
    *before(),
    *struck(),
    health(5.5, 200),
    load(5.5, "old-1", took_s=5, result="first_token_timeout"),
    canary(5.6, "old-1", None, took_s=5, result="first_token_timeout"),
)


def judged(claim: Claim, seen: History) -> tuple[Verdict, str]:
    findings = {finding.claim: finding for finding in claims.judge((claim,), seen, CONTEXT)}
    found = findings[str(claim)]
    return found.verdict, found.because


def test_the_fault_begins_when_the_engine_is_struck() -> None:
    assert fault_at_ns(history(*FROZEN)) == 5 * S


def test_a_canary_notices_a_frozen_engine_though_a_client_was_earlier() -> None:
    seen = detection(history(*FROZEN, *restarted(), *ended()))
    assert seen.layer is Layer.CANARY
    assert "first_token_timeout" in seen.because


def test_a_canary_that_comes_much_later_than_the_client_noticed_nothing_first() -> None:
    late = history(*FROZEN[:-1], canary(9.0, "old-1", None, took_s=5, result="first_token_timeout"))
    assert detection(late).layer is Layer.CLIENT


@pytest.mark.parametrize(
    ("more", "layer"),
    [
        ((health(7.0, 503),), Layer.HEALTH),
        ((health(6.5, 0), health(7.0, 0)), Layer.HEALTH),
        ((health(7.0, 0), health(7.2, 503)), Layer.HEALTH),
        ((health(7.0, 0, refused=True), health(7.2, 200)), Layer.HEALTH),
        ((died(6.9, 0), health(7.0, 0)), Layer.HEALTH),
        ((health(7.0, 0), died(7.1, 0)), Layer.HEALTH),
        ((health(6.8, 200), health(7.0, 0), health(7.2, 200)), Layer.CLIENT),
        ((health(7.0, 0),), Layer.CLIENT),
        ((died(7.0, -9),), Layer.EXIT),
        ((health(6.5, 503), died(7.0, -9)), Layer.EXIT),
        ((health(6.5, 503), died(7.0, 0)), Layer.HEALTH),
        ((died(7.0, 0),), Layer.CLIENT),
        ((health(7.0, 503, "old-2"),), Layer.CLIENT),
        ((health(4.0, 503),), Layer.CLIENT),
    ],
)
def test_the_cheapest_witness_decides(more: tuple[Event, ...], layer: Layer) -> None:
    failed = load(6.0, "old-1", took_s=0.1, result="http_5xx")
    assert detection(history(*before(), *struck(), failed, *more, *restarted(), *ended())).layer is layer


def test_health_of_a_rollout_is_no_sign() -> None:
    rolled = [event(5, EventKind.ROLLOUT_STARTED, how="restart"), health(6.0, 503)]
    assert detection(history(*before(), *rolled)).layer is Layer.NEVER


def test_an_engine_that_goes_on_answering_was_not_harmed() -> None:
    seen = history(*before(), *struck(), *(canary(6 + at * 0.5, "old-1", "old") for at in range(6)))
    assert detection(seen).layer is Layer.HARMLESS
    assert recovery_at_ns(seen) is not None
    earlier = history(*before(), *struck(), *(canary(6 + at * 0.5, "old-1", "old") for at in range(3)))
    assert detection(earlier).layer is Layer.NEVER, "canaries before it was struck say nothing"


def test_service_is_back_with_the_next_engine() -> None:
    verdict, because = judged(claims.recovered(within_s=5.0), history(*FROZEN, *restarted(), *ended()))
    assert verdict is Verdict.HELD, because
    verdict, because = judged(claims.recovered(within_s=1.0), history(*FROZEN, *restarted(), *ended()))
    assert verdict is Verdict.BROKEN, because


FAILING = (
    canary(5.6, "old-1", None, result="http_5xx"),
    load(5.7, "old-1", result="http_5xx"),
)
KILLED = (*before(), *struck(), *FAILING)


@pytest.mark.parametrize(("admitted_s", "is_suspected"), [(-0.5, False), (5.05, True)])
def test_errors_of_an_engine_that_was_struck_while_it_served_are_no_wrong_answers(
    admitted_s: float, is_suspected: bool
) -> None:
    admitted = event(admitted_s, EventKind.TRAFFIC_ADMITTED, incarnation="old-1", endpoint="http://127.0.0.1:1")
    seen = exposure(history(admitted, *KILLED, *restarted(), *ended()))
    assert (seen.lower, seen.upper > 0) == (0, is_suspected)


@pytest.mark.parametrize(
    ("by", "is_suspected"),
    [
        (("killed_process", "memory_limit"), False),
        (("changed_while_loading",), True),
        (("killed_process", "changed_while_loading"), True),
        (("of a plug-in",), True),
    ],
)
def test_errors_are_excused_only_by_faults_that_cannot_touch_weights(by: tuple[str, ...], is_suspected: bool) -> None:
    admitted = event(-0.5, EventKind.TRAFFIC_ADMITTED, incarnation="old-1", endpoint="http://127.0.0.1:1")
    seen = exposure(history(admitted, *before(), *struck(by=by), *FAILING, *restarted(), *ended()))
    assert (seen.upper > 0) is is_suspected


def test_what_leaves_weights_alone_is_the_name_of_a_fault() -> None:
    assert set(FAULTS) >= LEAVE_WEIGHTS_ALONE


def test_a_wrong_answer_of_a_struck_engine_is_one() -> None:
    admitted = event(-0.5, EventKind.TRAFFIC_ADMITTED, incarnation="old-1", endpoint="http://127.0.0.1:1")
    wrong = [canary(6 + at * 0.5, "old-1", "neither") for at in range(3)]
    seen = exposure(history(admitted, *before(), *struck(), *wrong, load(6.7, "old-1"), *restarted(), *ended()))
    assert seen.lower == 1


# what the platform is told


@pytest.mark.parametrize(
    ("more", "verdict"),
    [
        ((health(7.0, 503),), Verdict.HELD),
        ((health(11.0, 503),), Verdict.BROKEN),
        ((health(7.0, 200), health(11.0, 200)), Verdict.BROKEN),
        ((died(7.0, 0),), Verdict.HELD),
        ((health(13.0, 503),), Verdict.BROKEN),
    ],
)
def test_health_has_to_be_bad_in_time(more: tuple[Event, ...], verdict: Verdict) -> None:
    found, because = judged(claims.health_told(within_s=5.0), history(*FROZEN, *more, *restarted(), *ended()))
    assert found is verdict, because


@pytest.mark.parametrize(
    ("more", "verdict", "said"),
    [
        ((health(7.0, 0), health(7.3, 200), health(11.0, 200)), Verdict.BROKEN, "no answer: 1"),
        ((health(7.0, 0), health(7.3, 0), health(7.6, 200)), Verdict.HELD, "said nothing 2.00 s"),
        ((health(7.0, 0, refused=True), health(7.3, 200)), Verdict.HELD, "said nothing 2.00 s"),
        ((health(7.0, 0),), Verdict.UNKNOWN, "no other followed"),
        ((health(11.9, 0),), Verdict.BROKEN, "single"),
    ],
)
def test_one_probe_without_an_answer_tells_nothing(more: tuple[Event, ...], verdict: Verdict, said: str) -> None:
    found, because = judged(claims.health_told(within_s=5.0), history(*FROZEN, *more, *restarted(), *ended()))
    assert found is verdict, because
    assert said in because


def test_a_status_of_an_earlier_release_lasts_until_another_is_written() -> None:
    lasting = Event(
        id="e9", at_ns=7 * S, source="health", kind=EventKind.HEALTH, data={"incarnation": "old-1", "status": 0}
    )
    assert judged(claims.health_told(within_s=5.0), history(*FROZEN, lasting, *restarted()))[0] is Verdict.HELD
    again = health(7.2, 200)
    assert judged(claims.health_told(within_s=5.0), history(*FROZEN, lasting, again, *restarted()))[0] is Verdict.BROKEN


def test_health_watched_for_too_short_a_time_is_unknown() -> None:
    found, because = judged(claims.health_told(within_s=30.0), history(*FROZEN, *restarted(), *ended()))
    assert found is Verdict.UNKNOWN
    assert "7.0 s, too short for 30 s" in because


@pytest.mark.parametrize(
    ("more", "verdict", "said"),
    [
        ((died(7.0, -9),), Verdict.HELD, "exit code -9"),
        ((died(7.0, 1),), Verdict.HELD, "exit code 1"),
        ((died(7.0, 0),), Verdict.BROKEN, "leaves it dead"),
        ((), Verdict.UNKNOWN, "had not ended"),
    ],
)
def test_exit_code_has_to_be_one_that_a_supervisor_acts_upon(
    more: tuple[Event, ...], verdict: Verdict, said: str
) -> None:
    found, because = judged(claims.exit_code_told(), history(*FROZEN, *more, *restarted(), *ended()))
    assert found is verdict
    assert said in because


@pytest.mark.parametrize("claim", [claims.health_told(within_s=1.0), claims.exit_code_told()], ids=str)
def test_without_an_incident_nothing_was_told(claim: Claim) -> None:
    assert judged(claim, history(*before(), *ended()))[0] is Verdict.UNKNOWN


def test_an_incident_without_remedy_still_has_to_be_undone() -> None:
    left = event(15, EventKind.FAULT_UNDONE, fault="frozen_process", proved=False, because="still frozen")
    verdict, because = judged(claims.faults_undone(), history(*before(), *struck(), left, *ended()))
    assert verdict is Verdict.UNKNOWN
    assert "still frozen" in because
