"""Other runs on the same machine are noted: both are measured on cores that they share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from harness.label import RunLabel, new_label, shared_memory_directory, work_directory
from harness.machine import Neighbours, other_runs
from harness.run import Run
from harness.settings import Settings

EXPECTATIONS = Path("scenarios/expectations")


@pytest.fixture
def neighbour() -> Iterator[RunLabel]:
    """Give the label of a run whose owner lives, without its directories."""
    owner = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ticks = int(Path(f"/proc/{owner.pid}/stat").read_text().rpartition(")")[2].split()[19])
    yield replace(new_label(), owner_pid=owner.pid, owner_start_ticks=ticks)
    owner.communicate(b"\n", timeout=20.0)


@pytest.fixture
def scratch(neighbour: RunLabel) -> Iterator[Path]:
    """Give where its directory in shared memory would be."""
    place = shared_memory_directory(neighbour)
    yield place
    if place.exists():
        place.rmdir()


def test_only_runs_whose_owners_live_here_are_neighbours(neighbour: RunLabel, scratch: Path) -> None:
    own = new_label()
    assert neighbour not in other_runs(own)
    scratch.mkdir()
    assert neighbour in other_runs(own)
    assert neighbour not in other_runs(neighbour), "nobody is a neighbour to themselves"
    for changed in ({"owner_start_ticks": 1}, {"namespace": "0000"}, {"boot": "0000"}):
        other = replace(neighbour, token="abcdef", **changed)
        work_directory(other).mkdir()
        try:
            assert other not in other_runs(own), changed
        finally:
            work_directory(other).rmdir()


def test_a_neighbour_is_told_of_once(neighbour: RunLabel, scratch: Path) -> None:
    told: list[str] = []
    neighbours = Neighbours(own=new_label(), tell=told.append)
    scratch.mkdir()
    assert neighbours.look()
    assert not neighbours.look()
    (line,) = [line for line in told if neighbour.token in line]
    assert f"process {neighbour.owner_pid}" in line
    scratch.rmdir()
    neighbours.look()
    assert neighbour.token in str(neighbours), "it was there"


@pytest.mark.parametrize("begins", ["before", "after"])
def test_a_run_keeps_and_tells_who_lived_beside_it(
    neighbour: RunLabel, scratch: Path, tmp_path: Path, begins: str
) -> None:
    told: list[str] = []
    if begins == "before":
        scratch.mkdir()
    with Run(Settings(engine="reference", results=tmp_path), progress=told.append, expectations=EXPECTATIONS) as run:
        if begins == "after":
            scratch.mkdir()
    stored = json.loads((run.directory / "run.json").read_text())
    assert f"{neighbour.token} (process {neighbour.owner_pid})" in stored["machine"]["other_runs"]
    assert stored["is_complete"]
    assert [line for line in told if f"run {neighbour.token}" in line]


def test_a_run_alone_notes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.machine.other_runs", lambda _: ())
    told: list[str] = []
    with Run(Settings(engine="reference", results=tmp_path), progress=told.append, expectations=EXPECTATIONS) as run:
        assert os.getpid() == run.label.owner_pid
    assert "other_runs" not in json.loads((run.directory / "run.json").read_text())["machine"]
    assert not [line for line in told if "another run" in line]
