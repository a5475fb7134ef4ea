"""A scenario that contradicts itself is refused when it is made, with every problem named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness import Scenario, after_detection, at, claims, faults, load, models, rollout, then
from harness.errors import ScenarioInvalid
from harness.scenario import Mode, Step

GOOD = Scenario(
    name="good",
    old=models.tiny_llama(seed=1),
    new=models.tiny_llama(seed=2),
    faults=(faults.zero_tail(),),
    load=load.steady(rate_rps=1.0),
    unguarded=(claims.recovered(within_s=1),),
    guarded=(claims.exposed_at_most(0),),
)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": "not a name"}, "identifier"),
        ({"faults": ()}, "injects no fault"),
        ({"guarded": ()}, "claims nothing"),
        ({"limit_s": 0}, "limit_s must be positive, got 0"),
        ({"limit_s": float("inf")}, "limit_s must be positive, got inf"),
        ({"timeline": (at(1.0).publish("new"), at(float("nan")).start_rollout())}, "time order, got"),
        (
            {"timeline": (at(1.0).publish("new"), then().start_rollout(), after_detection(limit_s=0).remedy())},
            "limit_s=0\\): nobody could notice",
        ),
        (
            {
                "timeline": (
                    at(1.0).publish("new"),
                    then().start_rollout(),
                    after_detection(limit_s=float("nan")).remedy(),
                )
            },
            "limit_s=nan\\): nobody could notice",
        ),
        ({"timeline": (at(3.0).publish("new"), at(1.0).start_rollout())}, r"time order, got at_s=\(3.0, 1.0\)"),
        ({"timeline": (then().start_rollout(), then().publish("new"))}, "must be publish, start_rollout"),
        ({"timeline": (at(3.0).publish("new"),)}, "must be publish, start_rollout"),
        ({"timeline": (at(900.0).publish("new"), then().start_rollout())}, "between 0 and limit_s=600, got 900"),
        (
            {"timeline": (at(1.0).inject(),)},
            "without a rollout can only inject live faults; inject\\(\\) needs a live fault",
        ),
        ({"timeline": (at(1.0).inject(), then().start_rollout())}, "must be publish, start_rollout"),
        ({"timeline": (at(1.0).inject(), then().inject())}, "must be publish, start_rollout"),
        ({"timeline": (at(900.0).inject(),), "faults": (faults.frozen_process(),)}, "inject must lie between"),
        ({"faults": (faults.nested_move(), faults.overwrite_in_place())}, "2 publish faults, at most one"),
        (
            {"faults": (faults.moved_compile_cache(), faults.damaged_compile_cache())},
            "2 compile cache faults, at most one",
        ),
    ],
)
def test_contradiction_is_named(change: dict[str, object], said: str) -> None:
    with pytest.raises(ScenarioInvalid, match=said):
        replace(GOOD, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "got"),
    [
        ({}, "restart and blue_green"),
        ({"rollout": rollout.blue_green(), "guarded_rollout": rollout.restart()}, "blue_green and restart"),
    ],
)
def test_an_old_servers_port_is_only_held_while_the_old_server_runs(change: dict[str, object], got: str) -> None:
    with pytest.raises(ScenarioInvalid, match=f"rollout and guarded_rollout must be blue_green, got {got}"):
        replace(GOOD, faults=(faults.port_of_old_server(),), **change)  # type: ignore[arg-type]
    replace(GOOD, faults=(faults.port_of_old_server(),), rollout=rollout.blue_green())


def test_only_the_new_checkpoint_can_be_published() -> None:
    with pytest.raises(ScenarioInvalid, match='only "new"'):
        at(1.0).publish("old")


@pytest.mark.parametrize(
    ("timeline", "is_incident"),
    [
        ((at(1.0).inject(),), True),
        ((at(1.0).inject(), after_detection(limit_s=9).remedy()), True),
        ((at(1.0).inject(), then().publish("new"), then().start_rollout()), False),
        ((at(1.0).publish("new"), then().start_rollout(), then().inject(), then().remedy()), False),
        ((at(1.0).publish("new"), then().start_rollout()), False),
    ],
)
def test_an_incident_is_what_rolls_nothing_out(timeline: tuple[Step, ...], is_incident: bool) -> None:
    struck = replace(GOOD, faults=(faults.frozen_process(),), timeline=timeline)
    assert struck.is_incident is is_incident
    assert [step["action"] for step in struck.declaration()["timeline"]] == [step.action for step in timeline]


def test_declaration_says_what_goes_wrong_and_when() -> None:
    declared = replace(
        GOOD, timeline=(at(2.0).publish("new"), then().start_rollout(), after_detection(limit_s=9).remedy())
    )
    stored = declared.declaration()
    assert stored["about"] == __doc__.strip()
    assert [step["action"] for step in stored["timeline"]] == ["publish", "start_rollout", "remedy"]
    assert stored["faults"] == [
        {"name": "zero_tail", "fault_id": "D15", "parameters": {"shard": -1, "keep_ratio": 0.5}}
    ]
    assert GOOD.claims(Mode.GUARDED) == GOOD.guarded


@pytest.mark.parametrize(
    ("rate_rps", "published_at_s", "tail_s", "limit_s"), [(0.5, 5.0, 10.0, 1200.0), (2.0, 1.25, 2.5, 600.0)]
)
def test_at_another_rate_as_many_requests_fit(
    rate_rps: float, published_at_s: float, tail_s: float, limit_s: float
) -> None:
    changed = GOOD.at_rate(rate_rps)
    assert (changed.load.rate_rps, changed.timeline[0].at_s) == (rate_rps, published_at_s)
    assert (changed.load.tail_s, changed.limit_s) == (tail_s, limit_s)


def test_patience_multiplies_every_limit_and_nothing_else() -> None:
    patient = GOOD.with_patience(3)
    assert (patient.limit_s, patient.rollout.ready_limit_s, patient.guarded_rollout.ready_limit_s) == (1800, 540, 540)
    assert patient.timeline[-1].after_detection_limit_s == 360
    assert patient.timeline[0] == GOOD.timeline[0]
    assert patient.unguarded == (claims.recovered(within_s=3),)
    assert patient.guarded == GOOD.guarded
