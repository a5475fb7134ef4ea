"""Who noticed, what users got and when it was over, on histories written by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.judge.detection import detection
from harness.judge.exposure import exposure
from harness.judge.moments import Layer, Window, recovery_at_ns, requests_in, window_span
from harness.observe.history import Event, EventKind, History, Request
from tests.judge.histories import S, before, canary, ended, event, history, load, remedy, rollout


def served(canary_answer: str, *, first_s: float = 6.1, until_s: float = 9.0) -> list:
    """Return a new engine that answers users and whose canaries say `canary_answer`."""
    count = int((until_s - first_s) * 4)
    requests = [load(first_s + 0.05 + at * 0.25, "new-1", took_s=0.05) for at in range(count)]
    return requests + [
        canary(first_s + 0.3 + at * 0.5, "new-1", canary_answer, took_s=0.05) for at in range(count // 2)
    ]


def test_preflight_is_noticed_before_anything_starts() -> None:
    refused = event(5.01, EventKind.GUARD_REFUSED, guard="preflight", findings=[{"id": "D08"}])
    seen = detection(history(*before(), *rollout()[:2], refused))
    assert (seen.layer, seen.at_ns, seen.evidence) == (Layer.PREFLIGHT, refused.at_ns, (refused.id,))


def test_engine_that_refuses_is_noticed_at_startup() -> None:
    refused = event(8, EventKind.ENGINE_NOT_READY, incarnation="new-1", reason="exited", log_lines=["header too large"])
    seen = detection(history(*before(), *rollout()[:4], refused))
    assert seen.layer is Layer.STARTUP
    assert "header too large" in seen.because


def test_old_engine_that_fails_because_it_is_stopped_is_no_sign_of_the_fault() -> None:
    stopped = load(5.5, "old-1", result="refused")
    assert detection(history(*before(), *rollout(), stopped)).layer is Layer.NEVER


@pytest.mark.parametrize(
    ("sign", "layer"),
    [
        (load(5.2, "old-1", took_s=0.1, result="http_5xx"), Layer.CLIENT),
        (canary(5.2, "old-1", "neither"), Layer.CANARY),
        (event(5.9, EventKind.ENGINE_DIED, incarnation="old-1", exit_code=-7), Layer.CLIENT),
    ],
    ids=["fails", "answers wrongly", "dies"],
)
def test_old_engine_that_suffers_before_the_rollout_is_a_sign_of_the_fault(sign: Event | Request, layer: Layer) -> None:
    published = event(5, EventKind.PUBLISH_STARTED, version="new", how="overwrite_in_place")
    later = event(6, EventKind.ROLLOUT_STARTED, how="restart")
    assert detection(history(*before(), published, load(5.1, "old-1"), sign, later)).layer is layer
    # The same thing once the rollout has begun is what a restart does to every engine.
    at_once = event(5.05, EventKind.ROLLOUT_STARTED, how="restart")
    assert detection(history(*before(), published, at_once, sign)).layer is Layer.NEVER


def test_first_failed_request_and_a_later_one_are_different_layers() -> None:
    failed = load(6.5, "new-1", result="http_5xx")
    assert detection(history(*before(), *rollout(), failed)).layer is Layer.FIRST_REQUEST
    answered = load(6.1, "new-1")
    assert detection(history(*before(), *rollout(), answered, failed)).layer is Layer.CLIENT


def test_wrong_canary_is_noticed_although_users_are_answered() -> None:
    seen = detection(history(*before(), *rollout(), *served("neither")))
    assert seen.layer is Layer.CANARY
    assert "neither" in seen.because


def test_canary_before_traffic_counts_at_its_own_layer() -> None:
    checked = event(6.2, EventKind.CANARY_CHECKED, incarnation="new-1", answer="old")
    assert detection(history(*before(), *rollout(), checked)).layer is Layer.CANARY


def test_engine_that_dies_on_its_first_canary_is_noticed_on_use() -> None:
    died = event(6.6, EventKind.ENGINE_DIED, incarnation="new-1", exit_code=0)
    requests = [canary(6.1, "new-1", None, result="http_5xx"), load(6.3, "new-1", result="closed")]
    assert detection(history(*before(), *rollout(), *requests, died)).layer is Layer.FIRST_REQUEST


ADMITTED = event(6.05, EventKind.TRAFFIC_ADMITTED, incarnation="new-1")


@pytest.mark.parametrize(
    ("health", "before_it", "layer"),
    [
        (503, (), Layer.FIRST_REQUEST),
        (0, (), Layer.FIRST_REQUEST),
        (200, (), Layer.CANARY),  # it refuses this request, and answers others
        (503, (event(6.06, EventKind.CANARY_CHECKED, incarnation="new-1", answer="new"),), Layer.CANARY),
        (503, (load(6.06, "new-1"),), Layer.CANARY),
    ],
)
def test_an_engine_that_is_not_healthy_after_its_first_request_failed_on_use(
    health: int, before_it: tuple[Event | Request, ...], layer: Layer
) -> None:
    failed = event(
        6.5, EventKind.CANARY_CHECKED, incarnation="new-1", answer="no answer (Refused: HTTP 500)", health=health
    )
    seen = detection(history(*before(), *rollout(), ADMITTED, *before_it, failed))
    assert seen.layer is layer
    assert ("`/health` is bad" in seen.because) == (layer is Layer.FIRST_REQUEST)


def test_a_gate_that_asks_before_any_user_is_a_canary() -> None:
    failed = event(6.01, EventKind.CANARY_CHECKED, incarnation="new-1", answer="no answer (Refused)", health=503)
    assert detection(history(*before(), *rollout(), failed, ADMITTED)).layer is Layer.CANARY


def test_right_answers_long_enough_are_harmless_and_too_few_are_not() -> None:
    assert detection(history(*before(), *rollout(), *served("new"))).layer is Layer.HARMLESS
    assert detection(history(*before(), *rollout(), *served("new", until_s=7.0))).layer is Layer.NEVER


def test_nothing_after_the_remedy_counts_as_detection() -> None:
    late = canary(9.5, "new-1", "neither")
    assert detection(history(*before(), *rollout(), *remedy(), late)).layer is Layer.NEVER


def test_exposure_is_an_interval_from_the_start_of_the_engine() -> None:
    seen = exposure(history(*before(), *rollout(), *served("neither"), *remedy(), *ended()))
    answered = sum(r.incarnation == "new-1" and not r.is_canary for r in history(*served("neither")).requests)
    assert seen.upper == answered
    assert 0 < seen.lower < seen.upper


def test_exposure_begins_after_the_last_right_canary() -> None:
    right, wrong = canary(6.4, "new-1", "new"), canary(7.4, "new-1", "neither")
    users = [load(6.2, "new-1"), load(6.6, "new-1"), load(7.0, "new-1")]
    seen = exposure(history(*before(), *rollout(), right, wrong, *users))
    assert (seen.lower, seen.upper) == (0, 2)


def test_engine_that_answered_users_and_no_canary_is_suspected_throughout() -> None:
    seen = exposure(history(*before(), *rollout(), load(6.2, "new-1"), load(6.6, "new-1")))
    assert (seen.lower, seen.upper) == (0, 2)


def test_right_canary_before_traffic_clears_an_engine() -> None:
    checked = event(6.05, EventKind.CANARY_CHECKED, incarnation="new-1", answer="new")
    seen = exposure(history(*before(), *rollout(), checked, load(6.2, "new-1")))
    assert (seen.lower, seen.upper) == (0, 0)


def test_recovery_is_the_third_right_canary_after_the_remedy() -> None:
    assert recovery_at_ns(history(*before(), *rollout(), *remedy(), *ended())) == round(11.2 * S)


def test_failed_request_beside_the_canaries_delays_recovery() -> None:
    failed = load(10.8, "new-2", result="http_5xx")
    recovered = recovery_at_ns(history(*before(), *rollout(), *remedy(), failed, *ended()))
    assert recovered == round(12.2 * S)


@pytest.mark.parametrize("answer", ["old", "neither", "ambiguous"])
def test_wrong_answers_are_no_recovery(answer: str) -> None:
    wrong = [canary(10.1 + at, "new-2", answer) for at in range(8)]
    assert recovery_at_ns(history(*before(), *rollout(), *remedy()[:3], *wrong, *ended())) is None


def test_load_error_in_the_log_since_the_remedy_is_no_recovery() -> None:
    error = event(10, EventKind.LOG_LINE, incarnation="new-2", line="Weight files referenced", **{"class": "load"})
    assert recovery_at_ns(history(*before(), *rollout(), *remedy(), error, *ended())) is None


def test_old_engine_that_goes_on_answering_is_no_recovery() -> None:
    still_old = [canary(9.5 + at, "old-1", "old") for at in range(8)]
    assert recovery_at_ns(history(*before(), *rollout(), *remedy()[:1], *still_old, *ended())) is None


def test_windows_follow_each_other() -> None:
    whole = history(*before(), *rollout(), *remedy(), *ended())
    spans = [window_span(whole, window) for window in (Window.BEFORE, Window.FAULTY, Window.RECOVERING, Window.AFTER)]
    assert spans == [(0, 5 * S), (5 * S, 9 * S), (9 * S, round(11.2 * S)), (round(11.2 * S), 20 * S)]
    assert all(request.incarnation == "old-1" for request in requests_in(whole, Window.BEFORE, canaries=False))


@pytest.mark.parametrize("relapse", [canary(18.0, "new-2", "neither"), load(18.0, "new-2", result="stall")])
def test_what_goes_wrong_later_takes_recovery_back(relapse: Request) -> None:
    whole = history(*before(), *rollout(), *remedy(), relapse, *ended())
    assert recovery_at_ns(whole) == round(19.2 * S)


def test_relapse_until_the_end_is_no_recovery() -> None:
    wrong = [canary(19.0 + at * 0.25, "new-2", "neither") for at in range(4)]
    assert recovery_at_ns(history(*before(), *rollout(), *remedy(), *wrong, *ended())) is None


@pytest.mark.parametrize(
    ("exit_code", "log_lines", "doubt"),
    [
        (1, ["header too large"], ""),
        (-7, ["Bus error"], ""),
        (None, ["header too large"], "limit passed"),
        (-9, ["header too large"], "killed from outside"),
        (1, [], "no error line"),
    ],
)
def test_a_start_that_may_have_failed_for_other_reasons_is_doubted(
    exit_code: int | None, log_lines: list[str], doubt: str
) -> None:
    data = {"incarnation": "new-1", "reason": "it ended", "exit_code": exit_code, "log_lines": log_lines}
    seen = detection(history(*before(), *rollout()[:4], event(8, EventKind.ENGINE_NOT_READY, **data)))
    assert seen.layer is Layer.STARTUP
    assert doubt in seen.doubt
    assert bool(seen.doubt) == bool(doubt)


@pytest.mark.parametrize(
    ("given_up_s", "log_lines", "launch", "is_doubted"),
    [
        (8.3, ["InductorError: failed to import"], {}, False),  # 3.1 s, and the old engine was ready after 1
        (8.1, ["InductorError: failed to import"], {}, True),
        (60.0, [], {}, True),
        (60.0, ["InductorError: failed to import"], {"handed_on": "new-7"}, True),  # how long it took is not known here
    ],
)
def test_a_start_that_hangs_after_an_error_is_told_from_a_slow_machine(
    given_up_s: float, log_lines: list[str], launch: dict[str, str], is_doubted: bool
) -> None:
    hung = event(
        given_up_s, EventKind.ENGINE_NOT_READY, incarnation="new-1", reason="limit", exit_code=None, log_lines=log_lines
    )
    old = event(-2, EventKind.ENGINE_STARTING, incarnation="old-1", expects="old", launch=launch)
    seen = detection(history(old, *before()[1:], *rollout()[:4], hung))
    assert seen.layer is Layer.STARTUP
    assert bool(seen.doubt) == is_doubted


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("neither", "neither (its logprobs differ by 0.062 from those of the new checkpoint, by 13 from the old)"),
        ("old", "answered by: old"),
    ],
)
def test_how_far_an_answer_of_neither_checkpoint_is_from_both_is_told(answer: str, said: str) -> None:
    data = {"incarnation": "new-1", "answer": answer, "difference_old": 13.27, "difference_new": 0.06203}
    seen = detection(history(*before(), *rollout(), event(7, EventKind.CANARY_CHECKED, **data)))
    assert seen.because.endswith(said)


def in_turn(*answers: str, passes: int = 4) -> History:
    """Return a remedy whose engine answers canaries that ask so many passes in turn; then the load ends."""
    asked = [
        replace(canary(10.1 + at * 0.5, "new-2", answer), rotation=at % passes) for at, answer in enumerate(answers)
    ]
    seen = history(*before(), *rollout(), *remedy()[:3], *asked, *ended(10.2 + len(answers) * 0.5))
    told = [
        replace(each, data={**each.data, "canary_passes": passes}) if each.kind is EventKind.LOAD_STARTED else each
        for each in seen.events
    ]
    return replace(seen, events=tuple(told))


def test_an_engine_that_is_wrong_in_one_pass_alone_is_not_back_while_that_is_not_asked() -> None:
    assert recovery_at_ns(in_turn("new", "new", "new")) is None, "three of four passes say nothing of the fourth"
    assert recovery_at_ns(in_turn("new", "new", "new", "new")) == round(11.7 * S)
    assert recovery_at_ns(in_turn("new", "new", "new", "neither")) is None
    assert recovery_at_ns(in_turn("new", "new", "new", "neither", "new", "new", "new")) is None
    assert recovery_at_ns(in_turn("neither", "new", "new", "new", "new")) == round(12.2 * S)


def test_few_passes_need_three_canaries_all_the_same() -> None:
    assert recovery_at_ns(in_turn("new", "new", passes=2)) is None
    assert recovery_at_ns(in_turn("new", "new", "new", passes=2)) == round(11.2 * S)


def test_canaries_without_a_usable_answer_leave_users_exposed() -> None:
    checked = event(6.05, EventKind.CANARY_CHECKED, incarnation="new-1", answer="new")
    failing = [canary(6.4 + at, "new-1", None, result="http_4xx") for at in range(3)]
    users = [load(6.2 + at * 0.25, "new-1") for at in range(10)]
    seen = exposure(history(*before(), *rollout(), checked, *failing, *users))
    assert (seen.lower, seen.upper) == (0, 10)


def test_broken_connection_says_nothing_about_weights() -> None:
    cut = canary(4.9, "old-1", None, result="reset")
    assert exposure(history(*before(), cut, *rollout())).upper == 0


def test_an_engine_is_convicted_between_wrong_canaries_of_different_prompts() -> None:
    asked = [replace(canary(6.2 + at, "new-1", "neither", took_s=0.05), rotation=at) for at in range(3)]
    answers = [load(6.5 + at, "new-1", took_s=0.05) for at in range(3)]
    assert exposure(history(*before(), *rollout(), *asked, *answers)).lower == 2
    # Other prompts that were answered rightly in between clear nothing, the same ones do.
    for rotation, lower in ((7, 2), (1, 0)):
        right = (
            replace(canary(7.0, "new-1", "new", took_s=0.05), rotation=rotation),
            replace(canary(8.1, "new-1", "new", took_s=0.05), rotation=rotation),
        )
        assert exposure(history(*before(), *rollout(), *asked, *answers, *right)).lower == lower
