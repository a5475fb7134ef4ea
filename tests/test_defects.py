"""Every claim turns broken on a defect planted for it, end to end under load, and stays held where nothing is wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness import after_detection, at, claims, faults, load, then
from harness.clock import poll_until
from harness.errors import LeftOver
from harness.judge.moments import Layer
from harness.judge.verdict import Verdict
from harness.label import LABEL_VARIABLE
from harness.observe.history import EventKind
from harness.report.store import ScenarioRecord, load_run
from harness.scenario import Mode, Scenario
from tests.planted import (
    DEFECT,
    LIMITS,
    STEP_MS,
    UNSEEN,
    Planted,
    PlantingStarter,
    defect,
    expect,
    finding,
    require,
    run_on,
    short,
    verdict,
)

HELD, BROKEN, UNKNOWN = Verdict.HELD, Verdict.BROKEN, Verdict.UNKNOWN
SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]
DOWN = "model.layers.1.mlp.down_proj.weight"

Play = Callable[..., ScenarioRecord]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep checkpoints and known-good answers of these tests to themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLOUT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def play(tmp_path: Path) -> Play:
    """Give a function that runs one scenario on engines with planted defects."""

    def run(
        scenario: Scenario,
        *,
        planted: Planted | None = None,
        mode: Mode = Mode.UNGUARDED,
        expectations: Path | None = None,
    ) -> ScenarioRecord:
        with run_on(PlantingStarter(planted or {}), tmp_path, expectations=expectations) as opened:
            return opened.scenario(scenario, mode)

    return run


# --- the engine notices later than it was seen to, or not at all ---


def missing_tensor(*more: faults.Fault) -> Scenario:
    return short(
        "missing_tensor",
        faults.drop_tensor(DOWN),
        *more,
        claims=(
            claims.layer_as_expected(),
            claims.detected_by("startup"),
            claims.detected_within(limit_s=20.0),
            claims.exposed_at_most(0),
            claims.answered_ok(ratio_min=1.0),
            claims.recovered(within_s=20.0),
        ),
    )


def test_engine_that_notices_later_than_recorded_is_broken(play: Play, tmp_path: Path) -> None:
    expectations = expect(tmp_path / "known", "missing_tensor", Layer.STARTUP)
    record = play(missing_tensor(defect("ignores_missing_tensor")), expectations=expectations)
    require(record, faults_proved=HELD, healthy_before=HELD, layer_as_expected=BROKEN, detected_by=BROKEN)
    require(record, recovered=HELD, nothing_left_over=HELD)
    assert record.layer == Layer.CANARY
    assert verdict(record) is BROKEN


def test_engine_that_notices_as_recorded_is_held(play: Play, tmp_path: Path) -> None:
    record = play(missing_tensor(), expectations=expect(tmp_path / "known", "missing_tensor", Layer.STARTUP))
    require(record, layer_as_expected=HELD, detected_by=HELD, detected_within=HELD, exposed_at_most=HELD)
    assert record.layer == Layer.STARTUP
    assert verdict(record) is HELD


def test_hanging_engine_is_noticed_too_late(play: Play) -> None:
    limit_s = LIMITS.first_token_s  # nobody can notice earlier: requests wait as long as that
    scenario = short("hanging_engine", defect("hangs_on_request"), claims=(claims.detected_within(limit_s=limit_s),))
    record = play(scenario)
    require(record, healthy_before=HELD, detected_within=BROKEN)
    assert "first_token_timeout" in finding(record, "detected_within").because
    assert verdict(record) is BROKEN


# --- wrong answers ---


def test_wrong_answers_that_outlast_the_remedy_are_exposure_and_no_recovery(play: Play) -> None:
    scenario = short(
        "wrong_for_good",
        defect("wrong_answer"),
        claims=(
            claims.exposed_at_most(0),
            claims.only_weights_served("new", window="faulty"),
            claims.detected_by("first_request"),
            claims.recovered(within_s=4.0),
        ),
    )
    record = play(scenario, planted={"new-2": {DEFECT: "wrong_answer"}})
    require(record, exposed_at_most=BROKEN, only_weights_served=BROKEN, detected_by=BROKEN, recovered=BROKEN)
    assert record.measured["exposed_answers_lower"] > 0
    assert "neither" in finding(record, "only_weights_served").because
    assert "the last canary was neither" in finding(record, "recovered").because
    assert verdict(record) is BROKEN


def test_wrong_answers_are_contained_by_the_canary_gate(play: Play) -> None:
    scenario = short(
        "wrong_but_gated",
        defect("wrong_answer"),
        claims=(
            claims.exposed_at_most(0),
            claims.detected_by("canary"),
            claims.answered_ok(ratio_min=1.0),
            claims.recovered(within_s=20.0),
        ),
    )
    record = play(scenario, mode=Mode.GUARDED)
    require(record, exposed_at_most=HELD, detected_by=HELD, answered_ok=HELD, recovered=HELD)
    assert record.layer == Layer.CANARY
    assert verdict(record) is HELD


# --- requests that fail ---


@pytest.mark.parametrize(
    ("planted", "seen"),
    [
        ("dies_on_first_request", ("closed", "reset", "refused")),
        ("resets_stream", ("reset_mid_stream",)),
        ("truncates_stream", ("truncated",)),
        ("inband_error", ("inband_error",)),
        ("lies_on_health", ("http_5xx",)),
    ],
)
def test_engine_that_fails_requests_is_broken(play: Play, planted: str, seen: tuple[str, ...]) -> None:
    answered = claims.answered_ok(ratio_min=1.0)
    record = play(short(f"engine_{planted}", defect(planted), claims=(answered, claims.detected_by("startup"))))
    require(record, faults_proved=HELD, healthy_before=HELD, answered_ok=BROKEN, detected_by=BROKEN)
    because = finding(record, "answered_ok").because
    assert any(kind in because for kind in seen), because
    assert verdict(record) is BROKEN


# --- speed ---


def test_slower_engine_is_out_of_its_band(play: Play) -> None:
    scenario = short(
        "slower_engine",
        UNSEEN,
        claims=(claims.latency_back_in_band(factor=1.5, windows=3), claims.recovered(within_s=20.0)),
        load=load.steady(rate_rps=8.0, canary_ratio=0.4, tail_s=1.8, output_tokens=4, limits=LIMITS),
        timeline=(at(1.8).publish("new"), then().start_rollout()),
    )
    # A step is one token of one request: 16 ms are about two thirds of what this load leaves for it.
    record = play(scenario, planted={"old-1": {STEP_MS: "2"}, "new-1": {STEP_MS: "16"}})
    require(record, recovered=HELD, latency_back_in_band=BROKEN)
    assert verdict(record) is BROKEN


# --- preconditions: the harness does not know ---


def test_fault_that_was_prevented_makes_it_unknown(play: Play) -> None:
    scenario = short("cache_never_filled", faults.stale_weight_cache(), claims=(claims.recovered(within_s=20.0),))
    record = play(scenario, planted={"old-1": {"VLLM_WEIGHT_CACHE_DISABLED": "1"}})
    require(record, faults_proved=UNKNOWN, healthy_before=HELD, recovered=HELD)
    assert "stale_weight_cache" in finding(record, "faults_proved").because
    assert record.verdict is UNKNOWN


def test_engine_that_was_ill_before_makes_it_unknown(play: Play) -> None:
    scenario = short("ill_before", defect("wrong_answer"), claims=(claims.exposed_at_most(0),))
    record = play(scenario, planted={"old-1": {DEFECT: "truncates_stream"}})
    require(record, healthy_before=UNKNOWN, load_valid=UNKNOWN, nothing_left_over=HELD)
    checked = record.history.first(EventKind.CANARY_CHECKED)
    assert checked is not None
    assert "broken stream" in checked.data["answer"]
    assert record.verdict is UNKNOWN


def test_engine_that_serves_other_weights_from_the_start_makes_it_unknown(play: Play) -> None:
    scenario = short("wrong_before", UNSEEN, claims=(claims.exposed_at_most(0),))
    record = play(scenario, planted={"old-1": {DEFECT: "wrong_answer"}})
    require(record, healthy_before=UNKNOWN, load_valid=UNKNOWN, nothing_left_over=HELD)
    ended = record.history.last(EventKind.SCENARIO_ENDED)
    assert ended is not None
    assert "does not answer from the old checkpoint" in ended.data["because"]
    assert record.verdict is UNKNOWN


# --- left-overs ---


def test_labelled_process_that_outlives_the_scenario_is_broken_and_ended(tmp_path: Path) -> None:
    scenario = short("left_over", UNSEEN, claims=(claims.recovered(within_s=20.0),))
    records: list[ScenarioRecord] = []
    children: list[subprocess.Popen[bytes]] = []

    def leave_a_process_behind() -> None:
        with run_on(PlantingStarter({}), tmp_path) as run:
            labelled = {**os.environ, LABEL_VARIABLE: str(run.label)}
            children.append(subprocess.Popen(SLEEPER, env=labelled, start_new_session=True))
            records.append(run.scenario(scenario, Mode.UNGUARDED))

    try:
        with pytest.raises(LeftOver) as raised:
            leave_a_process_behind()
        (child,), (record,) = children, records
        assert child.wait(10) == -signal.SIGKILL  # the run named it at its end, and ended it
    finally:
        for each in children:
            each.kill()
            each.wait(10)
    assert str(child.pid) in str(raised.value)
    require(record, recovered=HELD, nothing_left_over=BROKEN)
    assert str(child.pid) in finding(record, "nothing_left_over").because
    assert verdict(record) is BROKEN


# --- no false alarm ---


def test_harmless_change_raises_no_alarm(tmp_path: Path) -> None:
    expectations = expect(tmp_path / "known", "harmless", Layer.HARMLESS)
    scenario = short(
        "harmless",
        UNSEEN,
        claims=(
            claims.layer_as_expected(),
            claims.detected_by("harmless"),
            claims.detected_within(limit_s=1.0),
            claims.exposed_at_most(0),
            claims.answered_ok(ratio_min=1.0),
            claims.only_weights_served("new", window="after"),
            claims.recovered(within_s=30.0),
            claims.latency_back_in_band(factor=5.0, windows=3),
        ),
        load=load.steady(rate_rps=12.0, canary_ratio=0.4, tail_s=1.3, output_tokens=4, limits=LIMITS),
        timeline=(at(1.3).publish("new"), then().start_rollout(), after_detection(limit_s=20.0).remedy()),
    )
    starter = PlantingStarter({})
    with run_on(starter, tmp_path, expectations=expectations) as run:
        records = [run.scenario(scenario, mode) for mode in Mode]
    for record in records:
        held = {each.claim.partition("(")[0]: HELD for each in record.findings if "load_valid" not in each.claim}
        require(record, **held)
        assert record.layer == Layer.HARMLESS
        assert record.history.of(EventKind.REMEDY_STARTED) == ()
        # An engine that was started with a fault is not handed on, whatever canaries say about it.
        assert handed_on(record) == [None, None]
    stored = [(each.name, each.mode, each.verdict) for each in load_run(run.directory).scenarios]
    assert stored == [(each.name, each.mode, each.verdict) for each in records]


# --- engines handed on ---


def test_repaired_engine_is_handed_on_while_it_lives(tmp_path: Path) -> None:
    scenario = short("repaired", defect("lies_on_health"), claims=(claims.recovered(within_s=30.0),))
    starter = PlantingStarter({})
    with run_on(starter, tmp_path) as run:
        first, second = (run.scenario(scenario, Mode.GUARDED) for _ in range(2))
        (running,) = (engine for engine in starter.started if engine.exit_code() is None)
        os.kill(running.pid, signal.SIGKILL)
        poll_until(running.exit_code, what="death of the engine handed on", limit_s=10)
        third = run.scenario(scenario, Mode.GUARDED)
    for record in (first, second, third):
        require(record, faults_proved=HELD, healthy_before=HELD, recovered=HELD, nothing_left_over=HELD)
        assert verdict(record) is HELD
    assert handed_on(first) == [None, None, None]
    assert handed_on(second) == ["new-2", None, None]
    assert handed_on(third) == [None, None, None]  # a dead engine is not used
    started = [engine.incarnation for engine in starter.started if not engine.incarnation.startswith("golden-")]
    assert started == ["old-1", "new-1", "new-2", "new-1", "new-2", "old-1", "new-1", "new-2"]
    assert "Shutting down" in (first.directory / "logs" / "new-2.log").read_text()  # kept where it began, to its end
    # The second scenario goes back to the first one's old checkpoint, which is what its engine then serves.
    assert second.declaration["new"] == first.declaration["old"]
    assert all(engine.exit_code() is not None and engine.members() == [] for engine in starter.started)


def handed_on(record: ScenarioRecord) -> list[str | None]:
    """Return for every engine of a scenario the name it was started under if an earlier scenario started it."""
    return [each.data["launch"].get("handed_on") for each in record.history.of(EventKind.ENGINE_STARTING)]
