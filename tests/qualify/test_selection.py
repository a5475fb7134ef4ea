"""What is marked is required, a selection takes more, and what it leaves out is never a pass."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness import cli
from harness.errors import EnvironmentMissing
from harness.judge.moments import Layer
from harness.judge.qualification import DETECTION, SCENARIOS
from harness.judge.verdict import Verdict
from harness.qualify import qualify
from harness.qualify.evidence import RecoveryTimes
from harness.qualify.side import parse_side
from harness.settings import Settings
from tests.qualify.asked import EXPECTATIONS, SUITE, Absent, add_unmarked, part, record, request


def test_only_recoveries_of_the_selected_scenarios_count(suite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []

    def times(_: object, names: tuple[str, ...]) -> RecoveryTimes:
        asked.append(names)
        return RecoveryTimes(seen={}, beyond={})

    monkeypatch.setattr("harness.qualify.judged.recovery_times", times)
    add_unmarked(suite)
    qualify(request(suite, may_run=False), lambda _: None)
    qualify(request(suite, marked="", may_run=False), lambda _: None)
    assert asked == [("missing",)] * 2 + [("missing", "other")] * 2


@pytest.mark.parametrize(
    ("changes", "judged"),
    [
        ({}, ["missing"]),
        ({"marked": ""}, ["missing", "other"]),
        ({"marked": "qualification or nightly"}, ["missing", "other"]),
        ({"marked": "", "select": "missing"}, ["missing"]),
        ({"marked": "", "select": "test_miss"}, ["missing"]),  # the name of its module
    ],
)
def test_the_marked_scenarios_are_required_and_a_selection_takes_more(
    suite: Path, changes: dict[str, Any], judged: list[str]
) -> None:
    add_unmarked(suite)
    found = qualify(request(suite, may_run=False, **changes), lambda _: None)
    for name in (SCENARIOS, DETECTION):
        assert [each.name for each in part(found, name).missing] == judged
    assert part(found, SCENARIOS).required == len(judged)
    assert not any("leaves out" in note for note in found.notes)


def test_a_selection_that_leaves_out_what_is_required_is_never_a_pass(suite: Path) -> None:
    add_unmarked(suite)
    for version in ("1.0", "2.0"):
        record(version, *[Layer.STARTUP] * 3, scenario="other")
    sides = {
        name: parse_side(f"reference-{version}", Settings(), EXPECTATIONS)
        for name, version in (("candidate", "2.0"), ("baseline", "1.0"))
    }
    asked = request(suite, **sides, required=(DETECTION,), marked="", select="other", may_run=False)
    found = qualify(asked, lambda _: None)
    detection = part(found, DETECTION)
    assert [each.verdict for each in detection.findings] == [Verdict.HELD]
    assert [(each.name, each.because) for each in detection.missing] == [
        ("missing", 'it is required, and -k "other" left it out')
    ]
    assert found.verdict is Verdict.UNKNOWN
    assert found.notes[0].startswith('-k "other" leaves out 1 of the 1 scenarios that every qualification requires')
    assert found.as_json()["selection"] == '-k "other"'
    # What is left out is not run, and what is known of it counts.
    for version in ("1.0", "2.0"):
        record(version, *[Layer.STARTUP] * 3)
    sides["candidate"] = parse_side("reference-2.0", Settings(), EXPECTATIONS)
    assert qualify(replace(asked, **sides), lambda _: None).verdict is Verdict.HELD


def test_only_selected_scenarios_are_run_and_started(suite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_unmarked(suite)
    asked: list[tuple[str, ...]] = []

    def measured(*_: object, names: list[str], **__: object) -> None:
        asked.append(tuple(names))
        raise EnvironmentMissing("docker", "not now")

    monkeypatch.setattr("harness.qualify.guarded_runs.Run", Absent)
    monkeypatch.setattr("harness.qualify.starts.measure_starts", measured)
    told: list[str] = []
    found = qualify(request(suite, marked="", select="other"), told.append)
    assert told[0] == "1 guarded scenario on the candidate"
    assert asked == [("other",)]
    reasons = {each.name: each.because for each in part(found, SCENARIOS).missing}
    assert reasons == {
        "other": "docker is not available: not now",
        "missing": 'it is required, and -k "other" left it out',
    }


@pytest.mark.parametrize(
    ("arguments", "selection"),
    [
        ([], '-m "qualification"'),
        (["--all"], "--all"),
        (["-k", "miss"], '-k "miss"'),
        (["-m", "nightly or qualification"], '-m "nightly or qualification"'),
        (["-k", "miss", "-m", "qualification"], '-k "miss" -m "qualification"'),
    ],
)
def test_command_selects(suite: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], selection: str) -> None:
    add_unmarked(suite)
    sides = ["--candidate", "reference", "--baseline", "reference", "--no-run", "--out", "out"]
    assert cli.main(["qualify", "rollouts", *sides, *arguments]) == 2
    assert json.loads(Path("out/qualification.json").read_text())["selection"] == selection
    assert selection.replace('"', "&#34;") in Path("out/qualification.html").read_text()


def test_a_part_that_is_not_required_is_not_run(suite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.qualify.guarded_runs.Run", Absent)
    monkeypatch.setattr("harness.compare.compare", Absent)
    for required, started in (
        (("latency",), []),
        (("recovery",), ["1 guarded scenario on the candidate", "1 guarded scenario on the baseline"]),
        ((SCENARIOS,), ["1 guarded scenario on the candidate"]),
    ):
        told: list[str] = []
        qualify(request(suite, required=required), told.append)
        assert told == started


def test_detection_is_about_scenarios_that_claim_who_notices(suite: Path) -> None:
    """One about speed alone has no layer to compare, and lacks none; it is still run with guards."""
    text = SUITE.replace('"missing"', '"slow"').replace("claims.layer_as_expected()", "claims.recovered(within_s=9.0)")
    (suite / "test_slow.py").write_text(text)
    found = qualify(request(suite, may_run=False), lambda _: None)
    assert [each.name for each in part(found, SCENARIOS).missing] == ["missing", "slow"]
    assert [each.name for each in part(found, DETECTION).missing] == ["missing"]
    (suite / "test_missing.py").unlink()
    assert part(qualify(request(suite, may_run=False), lambda _: None), DETECTION).verdict is Verdict.UNKNOWN
