"""Incidents are measured without load, and a fault that this engine cannot have is no failure of a measurement."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness import cli
from harness.judge.expectations import load_expectations, record_start
from harness.judge.moments import Layer
from harness.observe.history import EventKind, load_history
from harness.recording import measure_starts
from harness.settings import Settings
from harness.suite import collect
from tests.suites import write_frozen_suite

ROOT = Path(__file__).parent.parent


def settings(tmp_path: Path) -> Settings:
    return Settings(engine="reference", results=tmp_path / "results")


def test_a_frozen_engine_is_struck_observed_and_undone_without_load(tmp_path: Path) -> None:
    suite = write_frozen_suite(tmp_path)

    measured = measure_starts([suite], settings(tmp_path), tmp_path, starts=1, select="", tell=print)

    assert (measured.made, measured.failed) == (1, ())
    assert load_expectations(tmp_path, measured.label)["frozen"].layers == ("health",)
    [path] = (tmp_path / "results").glob("2*/scenarios/frozen-start-1/history.jsonl")
    kinds = [event.kind for event in load_history(path).events]
    assert kinds.index(EventKind.INCIDENT_STARTED) < kinds.index(EventKind.FAULT_INJECTED)
    assert EventKind.NOTHING_LEFT in kinds


def test_what_this_engine_cannot_have_is_skipped_with_its_reason(tmp_path: Path) -> None:
    said: list[str] = []

    measured = measure_starts(
        [ROOT / "scenarios" / "test_resources.py"],
        settings(tmp_path),
        tmp_path,
        starts=1,
        select="small_shared_memory",
        tell=said.append,
    )

    assert (measured.made, measured.failed) == (0, ())
    assert "needs an engine in a container" in said[-1]
    [(scenario, why)] = measured.skipped
    assert scenario.startswith("small_shared_memory")
    assert "needs an engine in a container" in why
    assert measured.is_nothing


def test_a_round_after_which_nothing_is_recorded_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    file = ROOT / "scenarios" / "test_resources.py"
    asked = [
        "expectations",
        "measure",
        str(file),
        "-k",
        "small_shared_memory",
        "--engine",
        "reference",
        "--into",
        "into",
    ]
    assert cli.main(asked) == 2
    assert "harness: 0 starts recorded, 0 failed, 3 skipped" in capsys.readouterr().out

    [scenario] = collect([file], select="small_shared_memory")
    label = json.loads((tmp_path / "results/latest/run.json").read_text())["engine_label"]
    record_start(Path("into"), label, scenario.name, layer=Layer.STARTUP, run="r", seen="x")
    assert cli.main(asked) == 0
    assert "harness: 0 starts recorded, 0 failed, 2 skipped" in capsys.readouterr().out
