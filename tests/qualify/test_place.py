"""One call at a time works in a directory, and the verdict there is never of an earlier call."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from harness import cli
from harness.errors import HarnessError
from harness.judge.moments import Layer
from harness.qualify.place import held
from tests.qualify.asked import EXPECTATIONS, record

ARGUMENTS = ["qualify", "rollouts", "--candidate", "reference-2.0", "--baseline", "reference-1.0", "--no-run"]
DETECTION = ["--require", "detection", "--expectations", str(EXPECTATIONS), "--out", "out"]


@pytest.fixture
def verdict(suite: Path) -> Path:
    """Give the file of a verdict that held."""
    record("1.0", *[Layer.STARTUP] * 3)
    record("2.0", *[Layer.STARTUP] * 3)
    assert cli.main([*ARGUMENTS, *DETECTION]) == 0
    assert json.loads(Path("out/qualification.json").read_text())["verdict"] == "held"
    return Path("out/qualification.json")


@pytest.mark.parametrize(
    ("broken", "more", "code"),
    [
        ("expectations/reference-2.0.toml", [], 2),
        ("rollouts/test_missing.py", [], 3),
        ("", ["-k", "nothing"], 3),
        ("", ["--comparison", "rollouts"], 3),
    ],
)
def test_a_call_that_came_to_no_verdict_leaves_none_that_held(
    verdict: Path, broken: str, more: list[str], code: int
) -> None:
    if broken:
        Path(broken).write_text("not (")
    assert cli.main([*ARGUMENTS, *DETECTION, *more]) == code
    stored = json.loads(verdict.read_text())
    assert stored["verdict"] == "unknown"
    assert "has not come to its end" in stored["notes"][0]
    assert "has not come to its end" in verdict.with_suffix(".html").read_text()


def test_a_call_that_is_refused_leaves_the_verdict_of_the_one_that_works_there(verdict: Path) -> None:
    before = verdict.read_bytes()
    with held(verdict.parent):
        assert cli.main([*ARGUMENTS, *DETECTION]) == 2
    assert verdict.read_bytes() == before


def test_a_call_that_was_interrupted_leaves_none_that_held(verdict: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("harness.qualify.qualify", interrupted)
    assert cli.main([*ARGUMENTS, *DETECTION]) == 2
    assert json.loads(verdict.read_text())["verdict"] == "unknown"
    monkeypatch.undo()


def test_a_second_call_in_the_same_directory_names_the_first(suite: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record("1.0", *[Layer.STARTUP] * 3)
    record("2.0", *[Layer.STARTUP] * 3)
    with held(Path("out")):
        assert cli.main([*ARGUMENTS, *DETECTION]) == 2
        assert f'"out" is worked in by process {os.getpid()} on ' in capsys.readouterr().err
        assert not Path("out/qualification.json").exists()
        with pytest.raises(HarnessError, match="is worked in by"), held(Path("out")):
            raise AssertionError("both hold it")
    assert cli.main([*ARGUMENTS, *DETECTION]) == 0


def test_a_directory_that_cannot_be_written_is_said_before_anything_is_run(
    suite: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record("1.0", Layer.STARTUP)
    record("2.0", Layer.STARTUP)
    Path("out").write_text("a file")
    assert cli.main([*ARGUMENTS[:-1], *DETECTION]) == 3
    assert capsys.readouterr().err == 'harness: the verdict cannot be written to "out": File exists\n'


def test_expectations_that_are_not_there_are_a_wrong_call(suite: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Taken for empty, they would cost hours of starts."""
    assert cli.main([*ARGUMENTS, "--expectations", "mistyped"]) == 3
    assert capsys.readouterr().err == 'harness: the expectations "mistyped" are not a directory\n'
