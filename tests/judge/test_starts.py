"""What one start on a fault came to: how soon it was noticed, how much was answered wrongly, and what it took."""

from __future__ import annotations

import pytest

from harness.judge.moments import Layer
from harness.judge.starts import Cost, start_of, wrong_ratio
from harness.observe.history import Event, EventKind, Request
from tests.judge.histories import before, canary, event, history, load, remedy, rollout


def checked(at_s: float, answer: str, incarnation: str = "new-1") -> Event:
    return event(at_s, EventKind.CANARY_CHECKED, incarnation=incarnation, answer=answer)


def bare(*things: Request | Event) -> list[Request | Event]:
    """Return a start on a fault at second 5 that nobody uses."""
    return [*rollout(), *things]


def test_a_silent_start_is_noticed_by_its_first_canary_and_every_answer_of_it_is_wrong() -> None:
    start = start_of("widened", "run-1", history(*bare(*(checked(7.5 + at, "neither") for at in range(5)))))
    assert (start.layer, start.noticed_after_s, start.wrong_ratio) == (Layer.CANARY, 2.5, 1.0)
    assert start.figures() == " after 2.5 s, 100% of the answers wrong"


def test_a_start_that_is_refused_answers_nobody() -> None:
    refused = event(6.25, EventKind.ENGINE_NOT_READY, incarnation="new-1", reason="it ended", exit_code=1)
    start = start_of("widened", "run-1", history(*rollout(ready_s=99.0)[:-1], refused))
    assert (start.layer, start.noticed_after_s, start.wrong_ratio) == (Layer.STARTUP, 1.25, None)
    assert start.figures() == " after 1.2 s"


def test_of_a_harmless_fault_no_time_is_recorded_and_no_answer_is_wrong() -> None:
    start = start_of("widened", "run-1", history(*bare(*(checked(7 + at, "new") for at in range(5)))))
    assert (start.layer, start.noticed_after_s, start.wrong_ratio) == (Layer.HARMLESS, None, 0.0)
    assert start.figures() == ""


@pytest.mark.parametrize(
    ("answers", "ratio"),
    [
        (("new", "neither"), 0.5),
        (("old", "old", "new", "new"), 0.5),  # stale weights are wrong ones
        (("ambiguous", "new"), 0.0),
        (("no answer (TimeoutError)", "neither"), 1.0),  # what was not answered is not counted
        (("no answer (TimeoutError)",), None),
    ],
)
def test_wrong_answers_are_counted_among_those_that_were_given(answers: tuple[str, ...], ratio: float | None) -> None:
    given = [checked(7 + at, answer) for at, answer in enumerate(answers)]
    assert wrong_ratio(history(*bare(*given))) == ratio


def test_where_users_are_served_their_answers_count_and_only_until_the_remedy() -> None:
    users = [load(6.5 + at * 0.5, "new-1") for at in range(4)]
    wrong = [canary(6.1 + at, "new-1", "neither") for at in range(3)]
    seen = history(*before(), *rollout(), *users, *wrong, *remedy())
    assert wrong_ratio(seen) == 1.0
    assert wrong_ratio(history(*before(), *remedy())) is None  # no fault began


def test_canaries_before_the_fault_and_after_the_remedy_are_not_counted() -> None:
    outside = [checked(4.5, "neither"), checked(9.5, "neither")]
    seen = history(*bare(checked(7, "new"), *outside), event(9, EventKind.REMEDY_STARTED, what="repair"))
    assert wrong_ratio(seen) == 0.0


def test_engines_that_are_handed_on_are_no_starts_and_no_cold_ones() -> None:
    handed = event(1, EventKind.ENGINE_STARTING, incarnation="old-1", expects="old", launch={"handed_on": "new-2"})
    cost = Cost.of(
        history(handed, event(1.1, EventKind.ENGINE_READY, incarnation="old-1", took_s=0.1), *rollout()), took_s=4.0
    )
    assert (cost.engine_starts, cost.ready_after_s) == (1, (1.0,))


def test_cost_is_told_beside_a_bare_cold_start() -> None:
    each = [Cost(engine_starts=1, ready_after_s=(20.0,), took_s=(took_s,)) for took_s in (10.0, 30.0, 90.0)]
    assert Cost.sum_of(each).sentence() == (
        "3 faults, 3 engine starts, 30.0 s per fault (median), 1.5 times a bare cold start (20.0 s)"
    )
    alone = Cost(engine_starts=1, ready_after_s=(), took_s=(5.0,), golden_starts=2)
    assert alone.sentence() == (
        "1 fault, 1 engine starts and 2 for the answers of undamaged checkpoints, 5.0 s per fault (median); no engine became "
        "ready, so how long a bare cold start takes is not known"
    )
