"""Scenarios are found with the markers of the tests that run them, and what qualification requires covers every family."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import Guard
from harness.errors import UsageError
from harness.faults.fault import CacheFault, CompileCacheFault, Damage, LaunchFault, LiveFault, PublishFault
from harness.suite import QUALIFICATION, Collected, collect_marked

ROOT = Path(__file__).parents[1]
SUITE = """
import pytest
from harness import Scenario, claims, faults, load, models

def made(name):
    return Scenario(
        name=name, old=models.tiny_llama(seed=1), new=models.tiny_llama(seed=2), faults=(faults.missing_shard(),),
        load=load.steady(rate_rps=8.0), unguarded=(claims.exposed_at_most(0),), guarded=(claims.exposed_at_most(0),),
    )

ALONE, IN_NO_TEST = made("alone"), made("in_no_test")
MANY = (made("one"), made("two"))
PAIR = (made("first"), made("second"))

@pytest.mark.core
@pytest.mark.qualification
def test_alone(run_scenario):
    run_scenario(ALONE).require_held()

@pytest.mark.nightly
@pytest.mark.parametrize("scenario", [MANY[0], pytest.param(MANY[1], marks=pytest.mark.qualification)])
def test_many(run_scenario, scenario): ...

@pytest.mark.parametrize(("number", "scenario"), [(1, PAIR[0]), (2, PAIR[1])])
def test_pairs(run_scenario, number, scenario): ...

def helper(run_scenario):
    run_scenario(IN_NO_TEST)
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """Give a directory with one module of scenarios."""
    folder = tmp_path / "rollouts"
    folder.mkdir()
    (folder / "test_some.py").write_text(SUITE)
    return folder


def markers(found: list[Collected]) -> dict[str, set[str]]:
    return {each.scenario.name: set(each.markers) - {"parametrize"} for each in found}


def test_a_scenario_has_the_markers_of_its_tests_and_of_its_parameter(suite: Path) -> None:
    assert markers(collect_marked([suite])) == {
        "alone": {"core", "qualification"},
        "in_no_test": set(),
        "one": {"nightly"},
        "two": {"nightly", "qualification"},
        "first": set(),
        "second": set(),
    }


def test_a_marker_of_the_module_is_one_of_each_of_its_scenarios(suite: Path) -> None:
    file = suite / "test_some.py"
    file.write_text(f"{SUITE}\npytestmark = [pytest.mark.gpu]\n")
    assert markers(collect_marked([file]))["one"] == {"nightly", "gpu"}
    file.write_text(f"{SUITE}\npytestmark = pytest.mark.gpu\n")
    assert markers(collect_marked([file]))["second"] == {"gpu"}


@pytest.mark.parametrize(
    ("expression", "chosen"),
    [
        ("", {"alone", "in_no_test", "one", "two", "first", "second"}),
        ("qualification", {"alone", "two"}),
        ("qualification and not nightly", {"alone"}),
        ("core or nightly", {"alone", "one", "two"}),
        ("not (qualification or nightly)", {"in_no_test", "first", "second"}),
    ],
)
def test_markers_are_selected_as_by_pytest(suite: Path, expression: str, chosen: set[str]) -> None:
    assert {each.scenario.name for each in collect_marked([suite]) if each.is_marked(expression)} == chosen


@pytest.mark.parametrize(
    "expression", ["a b", "a +", "f(a)", "a == b", "1", "a if b else c", "(" * 3000, "__import__('os')"]
)
def test_what_is_no_expression_of_markers_is_refused(suite: Path, expression: str) -> None:
    with pytest.raises(UsageError, match="cannot be read as markers"):
        collect_marked([suite])[0].is_marked(expression)


def test_what_qualification_requires_covers_every_fault_family_and_every_guard() -> None:
    found = collect_marked([ROOT / "scenarios"])
    required = [each.scenario for each in found if QUALIFICATION in each.markers]
    injected = [fault for scenario in required for fault in scenario.faults]
    # The families of the fault list: damages, configs, launch, processes, caches, speed, storage; updates are reloads.
    assert {fault.fault_id[0] for fault in injected} | {"U" for each in required if each.reloads} == set("DCLMKUPN")
    for kind in (Damage, LaunchFault, PublishFault, CacheFault, CompileCacheFault, LiveFault):
        assert any(isinstance(fault, kind) for fault in injected), kind
    assert {guard for scenario in required for guard in scenario.guards} == set(Guard)
    noticed = {
        str(claim.parameters["layer"]) for each in required for claim in each.guarded if claim.name == "detected_by"
    }
    assert noticed >= {"preflight", "startup", "canary", "harmless"}
    files = {each.file.name for each in found if QUALIFICATION in each.markers}
    # A reload stands for other updates, and a GPU is not required.
    nightly_alone = {"test_weight_updates.py", "test_adapters.py", "test_device_memory.py"}
    assert files == {each.file.name for each in found} - nightly_alone, "each file of scenarios is a family"
    assert 20 <= len(required) <= 32, "about 40 minutes a side in containers"


@pytest.mark.parametrize(("text", "is_named"), [("alone", True), ("some", True), ("", True), ("other", False)])
def test_a_scenario_is_named_by_its_own_name_or_that_of_its_module(suite: Path, text: str, is_named: bool) -> None:
    assert collect_marked([suite])[0].is_named(text) is is_named


def test_a_scenario_of_two_modules_is_one_with_the_markers_of_both(suite: Path) -> None:
    text = SUITE.replace("@pytest.mark.core\n", "").replace("@pytest.mark.nightly\n", "@pytest.mark.gpu\n")
    (suite / "test_others.py").write_text(text)
    found = collect_marked([suite])
    assert len(found) == 6
    assert markers(found)["alone"] == {"core", "qualification"}
    assert markers(found)["one"] == {"nightly", "gpu"}
