"""Incidents are measured without load, and a fault that this engine cannot have is no failure of a measurement."""

from __future__ import annotations

from pathlib import Path

from harness.judge.expectations import load_expectations
from harness.observe.history import EventKind, load_history
from harness.recording import measure_starts
from harness.settings import Settings
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
