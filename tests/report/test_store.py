"""A run is declared, observed and judged in three steps, so that no crash loses what the step before has written."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from harness import cli
from harness.errors import HarnessError, UsageError
from harness.judge import claims
from harness.judge.claim import Claim, Context
from harness.judge.moments import Layer
from harness.judge.verdict import Verdict
from harness.observe.history import EventKind, History, Recorder
from harness.report import store
from harness.report.junit import write_junit
from harness.report.store import create_run, declare, finish_run, judge_scenario, load_run
from tests.judge.histories import S, before, canary, ended, history, load, remedy, rollout

WRONG = [canary(6.3 + at * 0.5, "new-1", "neither", took_s=0.05) for at in range(4)]
USERS = [load(6.2 + at * 0.25, "new-1", took_s=0.05) for at in range(8)]
WHOLE = history(*before(), *rollout(), *USERS, *WRONG, *remedy(), *ended())
UNPROVED = History(WHOLE.requests, tuple(each for each in WHOLE.events if each.kind is not EventKind.FAULT_INJECTED))
HELD = (claims.detected_by("canary"), claims.recovered(within_s=3))
BROKEN = (claims.exposed_at_most(0), claims.recovered(within_s=3))
CONTEXT = Context(scenario="s", engine_label="reference-1", expected_layers=(Layer.CANARY,) * 3)
FIELDS = {
    "engine_label": "reference-1",
    "engine_kind": "reference",
    "seed": 1,
    "command": "harness run",
    "commit": "c",
    "started_at": "2026-01-01T00:00:00+00:00",
    "machine": {"processor": "p"},
    "settings": {},
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Give the directory of a run that has just begun."""
    return create_run(tmp_path / "results", "2026-01-01-a", FIELDS)


def observed(run: Path, name: str, seen: History, claimed: tuple[Claim, ...], mode: str = "unguarded") -> Path:
    """Declare a scenario and write down its history as a runner does."""
    place = declare(run, {"name": name, "about": "a", "faults": []}, mode, claimed, CONTEXT)
    recorder = Recorder(place / "history.jsonl")
    for request in seen.requests:
        recorder.request(request)
    for event in seen.events:
        recorder.event(event.source, event.kind, at_ns=event.at_ns, **event.data)
    recorder.close()
    return place


def outcome(place: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((place / "outcome.json").read_text())
    return found


def test_a_run_is_known_from_its_first_moment_and_says_when_it_was_finished(run: Path) -> None:
    assert not load_run(run).is_complete
    assert (run.parent / "latest").resolve() == run
    finish_run(run)
    assert load_run(run).is_complete
    assert load_run(run).machine == {"processor": "p"}


def test_what_is_claimed_is_written_before_anything_is_seen(run: Path) -> None:
    place = declare(run, {"name": "s", "about": "a"}, "unguarded", BROKEN, CONTEXT)
    stored = json.loads((place / "scenario.json").read_text())
    assert [claim["name"] for claim in stored["claims"]] == ["exposed_at_most", "recovered"]
    assert stored["context"]["expected_layers"] == ["canary"] * 3
    record = judge_scenario(place)  # a runner that died before the first event
    assert record.verdict is Verdict.UNKNOWN


def test_the_same_scenario_twice_has_two_directories_and_a_hostile_name_stays_inside(run: Path) -> None:
    names = ["s", "s", "../../outside"]
    places = [declare(run, {"name": name}, "unguarded", (), CONTEXT) for name in names]
    assert [place.name for place in places][:2] == ["s-unguarded", "s-unguarded-2"]
    assert all(place.parent == run / "scenarios" for place in places)


def test_a_crash_in_judging_loses_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = observed(run, "s", WHOLE, BROKEN)
    seen = (place / "history.jsonl").read_bytes()

    def crash(*_: object) -> None:
        raise RuntimeError("a bug in judging")

    with monkeypatch.context() as patched:
        patched.setattr(store, "judge", crash)
        with pytest.raises(RuntimeError, match="a bug in judging"):
            judge_scenario(place)
        assert not (place / "outcome.json").exists()
        assert (place / "history.jsonl").read_bytes() == seen
    assert judge_scenario(place).verdict is Verdict.BROKEN
    assert outcome(place)["verdict"] == "broken"


@pytest.mark.parametrize("kept_ratio", [0.05, 0.5, 0.99])
def test_a_history_cut_in_its_last_line_is_judged(run: Path, kept_ratio: float) -> None:
    place = observed(run, "s", WHOLE, BROKEN)
    path = place / "history.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][: int(len(lines[-1]) * kept_ratio)])
    record = judge_scenario(place)
    assert len(record.history.requests) + len(record.history.events) == len(lines) - 1
    # The last line says that nothing was left over: without it the rest is found all the same.
    findings = {finding.claim.partition("(")[0]: finding.verdict for finding in record.findings}
    assert findings["exposed_at_most"] is Verdict.BROKEN
    assert findings["nothing_left_over"] is Verdict.UNKNOWN


def test_a_history_cut_while_under_load_is_unknown(run: Path) -> None:
    place = observed(run, "s", WHOLE, HELD)
    path = place / "history.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[: len(lines) // 2]) + b'{"type": "requ')
    assert judge_scenario(place).verdict is Verdict.UNKNOWN


def test_a_history_spoilt_in_the_middle_is_named_with_its_line(run: Path) -> None:
    place = observed(run, "s", WHOLE, HELD)
    path = place / "history.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:2], "spoilt\n", *lines[3:]]))
    with pytest.raises(HarnessError, match=r'history\.jsonl" line 3 is not a request or an event'):
        judge_scenario(place)


def test_a_stored_run_is_judged_anew_with_the_same_verdicts(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = [
        observed(run, "right", WHOLE, HELD),
        observed(run, "wrong", WHOLE, BROKEN),
        observed(run, "unsure", UNPROVED, BROKEN, "guarded"),
    ]
    first = [judge_scenario(place) for place in places]
    assert [record.verdict for record in first] == [Verdict.HELD, Verdict.BROKEN, Verdict.UNKNOWN]
    outcomes = [outcome(place) for place in places]

    assert cli.main(["judge", str(run)]) == 1
    assert [outcome(place) for place in places] == outcomes
    said = capsys.readouterr().out
    for verdict, name in (("held", "right"), ("broken", "wrong"), ("unknown", "unsure")):
        assert any(line.startswith(verdict) and f" {name} [" in line for line in said.splitlines())
    assert "exposed_at_most(answers=0): broken: between" in said
    assert (run / "report.html").is_file()


@pytest.mark.parametrize(
    ("stories", "code"),
    [
        ((), 2),
        (((WHOLE, HELD),), 0),
        (((WHOLE, HELD), (UNPROVED, HELD)), 2),
        (((WHOLE, HELD), (UNPROVED, HELD), (WHOLE, BROKEN)), 1),
    ],
    ids=["nothing", "held", "unknown", "broken"],
)
def test_judging_says_by_its_exit_code_what_it_found(
    run: Path, stories: tuple[tuple[History, tuple[Claim, ...]], ...], code: int
) -> None:
    for number, (seen, claimed) in enumerate(stories):
        observed(run, f"s{number}", seen, claimed)
    finish_run(run)
    assert cli.main(["judge", str(run)]) == code


@pytest.mark.parametrize(("claimed", "code"), [(HELD, 2), (BROKEN, 1)], ids=["held", "broken"])
def test_a_run_that_did_not_come_to_its_end_is_never_held(
    run: Path, claimed: tuple[Claim, ...], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    observed(run, "s", WHOLE, claimed)
    assert cli.main(["judge", str(run)]) == code
    assert "unknown: the run did not come to its end" in capsys.readouterr().out


def test_a_scenario_without_its_declaration_does_not_vanish(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    observed(run, "s", WHOLE, HELD)
    (observed(run, "other", WHOLE, BROKEN) / "scenario.json").unlink()
    (run / "scenarios/notes.txt").write_text("of a user")
    finish_run(run)
    record = load_run(run)
    assert (record.is_complete, record.undeclared) == (False, ("other-unguarded",))
    assert [each.name for each in record.scenarios] == ["s"]
    assert cli.main(["judge", str(run)]) == 2
    assert 'unknown: "other-unguarded" has no scenario.json' in capsys.readouterr().out


def test_what_is_no_run_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="is not a run"):
        load_run(tmp_path)
    assert cli.main(["judge", str(tmp_path)]) == 3
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["name", "engine_label"])
def test_a_run_that_is_recorded_under_no_text_is_named(run: Path, name: str) -> None:
    fields = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**fields, name: 1}))
    with pytest.raises(UsageError, match=f"is not a run of this harness: {name} must be a string, got 1"):
        load_run(run)


def test_results_that_cannot_be_written_are_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "results").write_text("a file")
    with pytest.raises(UsageError, match="cannot be written"):
        create_run(tmp_path / "results", "a", FIELDS)


def test_junit_has_failures_and_errors_in_the_right_places(run: Path) -> None:
    observed(run, "right", WHOLE, HELD)
    observed(run, "wrong", WHOLE, BROKEN)
    observed(run, "unsure\x00<&>", UNPROVED, BROKEN, "guarded")
    finish_run(run)
    write_junit(load_run(run), run / "junit.xml")

    root = ElementTree.parse(run / "junit.xml").getroot()
    (suite,) = root
    assert {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")} == {
        "tests": "3",
        "failures": "1",
        "errors": "1",
        "skipped": "0",
    }
    cases = {str(case.get("name")).partition("[")[0][:6]: case for case in suite.iter("testcase")}
    problems = {
        name: [each.tag for each in case if each.tag in ("failure", "error", "skipped")] for name, case in cases.items()
    }
    assert problems == {"right": [], "wrong": ["failure"], "unsure": ["error"]}
    failure, error = cases["wrong"].find("failure"), cases["unsure"].find("error")
    assert failure is not None
    assert error is not None
    assert "exposed_at_most(answers=0) is broken" in str(failure.get("message"))
    assert "faults_proved() is unknown" in str(error.get("message"))
    assert "held: recovered(within_s=3)" in str(failure.text)
    verdicts = {each.get("name"): each.get("value") for each in cases["wrong"].iter("property")}
    assert verdicts["verdict"] == "broken"
    assert verdicts["layer"] == "canary"
    expected_s = (WHOLE.of(EventKind.LOAD_ENDED)[0].at_ns - WHOLE.of(EventKind.LOAD_STARTED)[0].at_ns) / S
    assert float(str(cases["wrong"].get("time"))) == pytest.approx(expected_s)
