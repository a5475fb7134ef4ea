"""Guarded scenarios come from finished runs, and from a run of its own for what is missing in them."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from harness.errors import UsageError
from harness.judge.qualification import SCENARIOS
from harness.judge.verdict import Finding, Verdict
from harness.qualify import qualify
from harness.qualify.evidence import RecoveryTimes, recovery_times
from harness.qualify.side import parse_side
from harness.report.store import RunRecord
from harness.settings import Settings
from tests.qualify.asked import EXPECTATIONS, Absent, add_unmarked, part, request, store_guarded


@pytest.mark.parametrize(("held", "verdict"), [(1, Verdict.UNKNOWN), (2, Verdict.HELD)])
def test_as_many_runs_as_were_asked_for_must_have_held(
    suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: int, verdict: Verdict
) -> None:
    """Also of runs that are given; one that could not tell is none of them."""
    run = tmp_path / "run"
    store_guarded(run)
    seen = [Finding(claim="missing", verdict=each, because="") for each in [Verdict.HELD] * held + [Verdict.UNKNOWN]]
    monkeypatch.setattr("harness.qualify.judged.guarded", lambda _: {"missing": seen})
    candidate = parse_side("run", Settings(), EXPECTATIONS)
    asked = request(suite, candidate=candidate, required=(SCENARIOS,), may_run=False)
    assert qualify(asked, lambda _: None).verdict is Verdict.HELD
    found = qualify(replace(asked, repeat=2), lambda _: None)
    assert found.verdict is verdict
    assert ("held in 1 of at least 2 runs" in found.because) is (held == 1)


def ran(
    took_s: float | None, verdict: Verdict, *, proved: Verdict = Verdict.HELD, watched_s: float | None = None
) -> Any:
    findings = (
        Finding(claim="faults_proved()", verdict=proved, because="", is_precondition=True),
        Finding(claim="recovered(within_s=9)", verdict=verdict, because=""),
    )
    measured = {"recovered_after_s": took_s, "recovery_watched_s": watched_s}
    return SimpleNamespace(name="missing", mode="guarded", findings=findings, measured=measured)


def test_only_recoveries_that_are_worth_something_count() -> None:
    silent = SimpleNamespace(name="missing", mode="guarded", findings=(), measured={"recovered_after_s": 1.0})
    records = (
        ran(3.5, Verdict.HELD),
        ran(12.0, Verdict.BROKEN),  # too late, but it came
        ran(None, Verdict.BROKEN),  # never
        ran(0.1, Verdict.HELD, proved=Verdict.UNKNOWN),
        silent,
    )
    run = cast(RunRecord, SimpleNamespace(scenarios=records))
    times = recovery_times([run], ["missing"])
    assert times.seen == {"missing [guarded]": [3.5, 12.0, math.inf]}
    assert (times.beyond, times.note("baseline")) == ({}, "")
    assert recovery_times([run], ["another"]).seen == {}


def test_recoveries_that_were_not_watched_to_their_end_are_kept_and_noted() -> None:
    """Without them only the fast ones would be compared."""
    records = (
        ran(3.5, Verdict.HELD),
        ran(None, Verdict.UNKNOWN, watched_s=12.25),
        ran(None, Verdict.UNKNOWN, watched_s=8.0),
        ran(None, Verdict.UNKNOWN, watched_s=7.0, proved=Verdict.BROKEN),
    )
    times = recovery_times([cast(RunRecord, SimpleNamespace(scenarios=records))], ["missing"])
    assert times.seen == {"missing [guarded]": [3.5]}
    assert times.beyond == {"missing [guarded]": [12.25, 8.0]}
    assert times.note("candidate").startswith(
        "2 recoveries were not watched to the end on the candidate (missing [guarded]: longer than 8 s and 12.25 s)"
    )


@pytest.mark.parametrize(("side_cut", "arm"), [("candidate", "candidate"), ("baseline", "baseline")])
def test_the_verdict_names_whose_recoveries_were_not_watched_to_their_end(
    suite: Path, monkeypatch: pytest.MonkeyPatch, side_cut: str, arm: str
) -> None:
    """Five seen recoveries of either would be held; one that was not seen to its end may be the slow one."""
    seen = {"missing [guarded]": [30.0, 30.1, 30.2, 30.3, 30.4]}
    cut = {"missing [guarded]": [1.0] * 3}
    given = iter([cut if side_cut == "baseline" else {}, cut if side_cut == "candidate" else {}])
    monkeypatch.setattr(
        "harness.qualify.judged.recovery_times", lambda *_: RecoveryTimes(seen=seen, beyond=next(given))
    )
    found = qualify(request(suite, required=("recovery",), may_run=False), lambda _: None)
    assert part(found, "recovery").verdict is Verdict.UNKNOWN
    assert "not watched to their end" in part(found, "recovery").because
    assert [note for note in found.notes if f"on the {arm} (missing [guarded]: longer than 1 s" in note]


def test_a_scenario_that_could_not_tell_is_due_again_and_one_that_could_is_not(
    suite: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As often as is asked for, of those that told: broken ones too."""
    store_guarded(Path("out/candidate/one"))
    told: list[str] = []

    def due(verdict: Verdict, **changes: Any) -> str:
        monkeypatch.setattr("harness.report.store.combine", lambda _: verdict)
        told.clear()
        asked = request(suite, required=(SCENARIOS,), **changes)
        monkeypatch.setattr("harness.qualify.guarded_runs.Run", Absent)
        qualify(asked, told.append)
        return told[0] if told else ""

    assert due(Verdict.UNKNOWN) == "1 guarded scenario on the candidate"
    assert due(Verdict.HELD) == ""
    assert due(Verdict.BROKEN) == ""
    assert due(Verdict.HELD, repeat=3) == "2 guarded scenarios on the candidate"
    file = Path("out/candidate/one/scenarios/missing-guarded/scenario.json")
    file.write_text(file.read_text().replace('"guarded"', '"unguarded"'))
    assert due(Verdict.HELD) == "1 guarded scenario on the candidate"


def test_what_is_given_is_never_completed_by_runs_of_its_own(suite: Path, tmp_path: Path) -> None:
    store_guarded(tmp_path / "run")
    told: list[str] = []
    found = qualify(request(suite, scenarios_runs=(tmp_path / "run",), required=(SCENARIOS,), repeat=9), told.append)
    assert (told, found.verdict) == ([], Verdict.UNKNOWN)


def test_a_scenario_that_cannot_be_run_says_why_and_keeps_no_other_back(
    suite: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_unmarked(suite)
    tried: list[str] = []

    class Refusing:
        directory = Path("out/candidate/one")

        def __init__(self, *_: object, **__: object) -> None:
            store_guarded(self.directory)
            shutil.rmtree(self.directory / "scenarios/missing-guarded")

        def __enter__(self) -> Refusing:
            return self

        def __exit__(self, *_: object) -> None: ...

        def scenario(self, scenario: Any, _: object) -> None:
            tried.append(scenario.name)
            raise UsageError(f"{scenario.name} needs another rate")

    monkeypatch.setattr("harness.qualify.guarded_runs.Run", Refusing)
    found = qualify(request(suite, marked="", required=(SCENARIOS,)), lambda _: None)
    assert tried == ["missing", "other"]
    assert [each.because for each in part(found, SCENARIOS).missing] == [
        "missing needs another rate",
        "other needs another rate",
    ]


def test_what_ran_without_guards_answers_for_no_guarded_scenario(suite: Path, tmp_path: Path) -> None:
    store_guarded(tmp_path / "run")
    file = tmp_path / "run/scenarios/missing-guarded/scenario.json"
    file.write_text(file.read_text().replace('"guarded"', '"unguarded"'))
    given = request(suite, scenarios_runs=(tmp_path / "run",), required=(SCENARIOS,), may_run=False)
    assert [each.name for each in part(qualify(given, lambda _: None), SCENARIOS).missing] == ["missing"]


def test_a_run_on_the_reference_engine_says_that_it_is_none_on_vllm(suite: Path, tmp_path: Path) -> None:
    store_guarded(tmp_path / "run")
    given = request(suite, scenarios_runs=(tmp_path / "run",), may_run=False)
    assert not any("not vLLM" in note for note in qualify(given, lambda _: None).notes)
    file = tmp_path / "run/run.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "engine_kind": "reference"}))
    assert any("not vLLM" in note for note in qualify(given, lambda _: None).notes)


def test_a_side_that_cannot_be_started_recovers_from_nothing_and_says_why(suite: Path) -> None:
    found = qualify(request(suite, may_run=False), lambda _: None)
    assert [(each.name, each.because) for each in part(found, "recovery").missing] == [
        (f"recoveries of the {arm}", f"no run of the {arm} was given, and nothing may be run")
        for arm in ("baseline", "candidate")
    ]
