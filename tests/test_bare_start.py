"""A start without load carries out every step of a scenario but its remedy, the blow of an incident included."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness import Scenario, after_detection, at, claims, faults, rollout, then
from harness.engine.reference_starter import ReferenceStarter
from harness.errors import HarnessError
from harness.faults import Fault
from harness.judge.moments import Layer
from harness.observe.history import EventKind, load_history
from harness.run import Run
from harness.scenario import Step
from tests.planted import run_on, short

ROLLED = (at(0.7).publish("new"), then().start_rollout())
STRUCK_AFTER = (*ROLLED, then().inject(), after_detection(limit_s=20.0).remedy())
STRUCK_BEFORE = (at(0.7).inject(), then().publish("new"), then().start_rollout())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Give a run on reference engines, which learns the goldens once."""
    with run_on(ReferenceStarter(), tmp_path_factory.mktemp("struck")) as started:
        yield started


def scenario(name: str, timeline: tuple[Step, ...], *more: Fault) -> Scenario:
    return short(
        name,
        *more,
        faults.killed_process("server"),
        claims=(claims.layer_as_expected(),),
        rollout=rollout.restart(ready_limit_s=120.0),
        timeline=timeline,
    )


@pytest.mark.parametrize(("timeline", "struck"), [(STRUCK_AFTER, "new"), (STRUCK_BEFORE, "old")])
def test_an_engine_is_struck_before_or_after_its_rollout(run: Run, timeline: tuple[Step, ...], struck: str) -> None:
    seen, place = run.start_only(scenario(struck, timeline), 1)
    history = load_history(place / "history.jsonl")
    kinds = [event.kind for event in history.events]
    is_first = kinds.index(EventKind.INCIDENT_STARTED) < kinds.index(EventKind.ROLLOUT_STARTED)
    assert is_first is (struck == "old")
    assert [event.data["proved"] for event in history.of(EventKind.FAULT_INJECTED)] == [True]
    assert [event.data["completed"] for event in history.of(EventKind.ROLLOUT_ENDED)] == [True]
    assert seen.layer in (Layer.EXIT, Layer.HEALTH), seen


def test_a_start_that_could_not_strike_anybody_is_none(run: Run) -> None:
    """The rollout was refused and nobody serves: what is recorded would be of another fault."""
    refused = scenario("refused", STRUCK_AFTER, faults.launch_argument("--no-such-flag"))
    with pytest.raises(HarnessError, match="no engine serves"):
        run.start_only(refused, 1)
