"""Who notices what comes from recorded starts, and from starts of the candidate where they are missing."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.errors import UsageError
from harness.judge.expectations import Start, record_start
from harness.judge.moments import Layer
from harness.judge.qualification import DETECTION
from harness.judge.verdict import Verdict
from harness.qualify import qualify
from harness.qualify.side import parse_side
from harness.recording import Measured
from harness.settings import Settings
from tests.qualify.asked import EXPECTATIONS, Absent, part, record, request, side, store_guarded


def test_recorded_starts_of_both_are_enough_for_detection(suite: Path) -> None:
    record("1.0", *[Layer.STARTUP] * 3)
    record("2.0", *[Layer.STARTUP] * 3)
    sides = {
        name: parse_side(f"reference-{version}", Settings(), EXPECTATIONS)
        for name, version in (("candidate", "2.0"), ("baseline", "1.0"))
    }
    found = qualify(request(suite, **sides, required=(DETECTION,)), lambda _: None)
    assert found.verdict is Verdict.HELD
    assert found.sources[DETECTION] == ("recorded starts of reference-2.0", "recorded starts of reference-1.0")
    record("2.0", *[Layer.STARTUP] * 3, Layer.CANARY)
    sides["candidate"] = parse_side(str(EXPECTATIONS / "reference-2.0.toml"), Settings(), EXPECTATIONS)
    found = qualify(request(suite, **sides, required=(DETECTION,)), lambda _: None)
    assert found.verdict is Verdict.BROKEN


def test_a_file_of_recorded_starts_is_the_one_that_was_given(suite: Path) -> None:
    """A file next to it that only its name leads to is not read in its place."""
    record("2.0", *[Layer.STARTUP] * 3)
    file = EXPECTATIONS / "reference-2.0.toml"
    for name in ("reference-2.0.txt", "reference-2.0 .toml", "reference 2.0.toml", "reference-2.0"):
        shutil.copy(file, EXPECTATIONS / name)
    shutil.copy(file, EXPECTATIONS / "reference_2.0.toml")
    asked = request(suite, required=(DETECTION,), may_run=False)
    found = qualify(replace(asked, matrix_runs=(file,)), lambda _: None)
    assert len(part(found, DETECTION).findings[0].evidence) == 3
    for name, said in (
        ("reference-2.0.txt", "is neither the directory of a run nor a .toml file of recorded starts"),
        ("reference-2.0", "is neither the directory of a run nor a .toml file of recorded starts"),
        ("reference-9.9.toml", "is neither the directory of a run nor a .toml file of recorded starts"),
        ("reference 2.0.toml", '"reference_2.0.toml" would be'),
    ):
        with pytest.raises(UsageError, match=said):
            qualify(replace(asked, matrix_runs=(EXPECTATIONS / name,)), lambda _: None)
        if name.endswith(".toml"):
            with pytest.raises(UsageError, match=said):
                parse_side(str(EXPECTATIONS / name), Settings(), EXPECTATIONS)


def test_as_many_starts_as_were_asked_for_must_be_there(suite: Path) -> None:
    record("1.0", *[Layer.STARTUP] * 3)
    record("2.0", *[Layer.STARTUP] * 4)
    sides = {
        name: parse_side(f"reference-{version}", Settings(), EXPECTATIONS)
        for name, version in (("candidate", "2.0"), ("baseline", "1.0"))
    }
    asked = request(suite, **sides, required=(DETECTION,), may_run=False)
    assert qualify(replace(asked, starts=4), lambda _: None).verdict is Verdict.HELD
    found = qualify(replace(asked, starts=5), lambda _: None)
    assert found.verdict is Verdict.UNKNOWN
    assert "the candidate has 4 starts, at least 5 are needed" in part(found, DETECTION).findings[0].because


def test_a_start_that_proves_nothing_is_left_out_and_says_why(suite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store_guarded(Path("out/candidate/one"))
    declared = Path("out/candidate/one/scenarios/missing-guarded")
    declared.rename(declared.with_name("missing-unguarded"))
    file = declared.with_name("missing-unguarded") / "scenario.json"
    file.write_text(file.read_text().replace('"guarded"', '"unguarded"'))
    found = qualify(request(suite, required=(DETECTION,), may_run=False), lambda _: None)
    assert part(found, DETECTION).missing[0].because.startswith("its start in one proves nothing: ")


def test_starts_are_made_until_there_are_as_many_as_were_asked_for(
    suite: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept of an earlier call counts; what a round failed at says why."""
    asked: list[list[str]] = []

    def measured(*_: object, names: list[str], **__: object) -> Measured:
        asked.append(names)
        return Measured(label="reference-2.0", made=0, failed=(("missing", "it hung"),))

    monkeypatch.setattr("harness.qualify.starts.measure_starts", measured)
    wanted = request(suite, required=(DETECTION,))
    found = qualify(wanted, lambda _: None)
    assert part(found, DETECTION).missing[0].because == "it hung"
    for number in range(3):
        record_start(
            Path("out/starts"), "reference-2.0", "missing", layer=Layer.STARTUP, run=f"own-{number}", seen="it"
        )
        qualify(wanted, lambda _: None)
    assert asked == [["missing"]] * 3
    qualify(replace(wanted, starts=4), lambda _: None)
    assert len(asked) == 4


@pytest.mark.parametrize("kind", ["failed", "skipped"])
def test_a_start_that_could_not_be_made_says_why(suite: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    fields: dict[str, Any] = {"label": "reference-2.0", "made": 0, "failed": (), kind: (("missing", "no compiler"),)}
    monkeypatch.setattr("harness.qualify.starts.measure_starts", lambda *_, **__: Measured(**fields))
    found = qualify(request(suite, required=(DETECTION,)), lambda _: None)
    assert part(found, DETECTION).missing[0].because == "no compiler"
    fields["label"] = "reference-3.0"
    with pytest.raises(UsageError, match=r"is reference-2\.0, and a run of it is on reference-3\.0"):
        qualify(request(suite, required=(DETECTION,)), lambda _: None)


def test_starts_that_are_given_are_of_the_candidate_and_no_others_are_made(
    suite: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.qualify.starts.measure_starts", Absent)
    told: list[str] = []
    for version in ("2.0", "3.0"):
        record(version, Layer.STARTUP)
    given = request(suite, required=(DETECTION,), matrix_runs=(EXPECTATIONS / "reference-2.0.toml",))
    found = qualify(given, told.append)
    assert "candidate noticed at startup" in part(found, DETECTION).findings[0].because
    assert "docker" not in str(found.as_json())
    with pytest.raises(UsageError, match=r"is reference-2\.0, and a run of it is on reference-3\.0"):
        qualify(replace(given, matrix_runs=(EXPECTATIONS / "reference-3.0.toml",)), told.append)


def test_the_baseline_is_started_where_that_is_asked_for_and_only_then(
    suite: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three starts of it are needed; they are kept apart from the candidate's, which may go by the same label."""
    made: list[tuple[Path, int, list[str], object]] = []

    def measured(_: object, settings: Settings, into: Path, **asked: Any) -> Measured:
        made.append((into, asked["starts"], asked["names"], asked["starter"]))
        for number in range(asked["starts"]):
            record_start(into, "reference-2.0", "missing", layer=Layer.STARTUP, run=f"own-{number}", seen="it said so")
        return Measured(label="reference-2.0", made=asked["starts"], failed=())

    monkeypatch.setattr("harness.qualify.starts.measure_starts", measured)
    baseline = side("2.0")
    record("2.0", Layer.STARTUP)
    candidate = replace(side("2.0"), expectations=Path("none"))
    wanted = request(suite, candidate=candidate, baseline=baseline, required=(DETECTION,), starts=4)
    found = qualify(wanted, lambda _: None)
    assert [into for into, *_ in made] == [Path("out/starts")]
    assert found.verdict is Verdict.UNKNOWN
    assert [note for note in found.notes if "--start-baseline makes them here" in note]

    found = qualify(replace(wanted, start_baseline=True), lambda _: None)
    assert made[1:] == [(Path("out/baseline-starts"), 3, ["missing"], baseline.starter)]
    assert found.verdict is Verdict.HELD, found.because
    assert "out/baseline-starts/reference-2.0.toml" in found.sources[DETECTION]
    assert not [note for note in found.notes if "--start-baseline" in note]
    assert qualify(wanted, lambda _: None).verdict is Verdict.HELD, "what is there is not made again"
    assert len(made) == 2


def test_the_baseline_is_not_started_where_nothing_may_be_run_or_nothing_is_lacking(
    suite: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.qualify.starts.measure_starts", Absent)
    record("2.0", *[Layer.STARTUP] * 3)
    candidate = parse_side("reference-2.0", Settings(), EXPECTATIONS)
    wanted = request(suite, candidate=candidate, required=(DETECTION,), start_baseline=True)
    told: list[str] = []
    assert qualify(replace(wanted, may_run=False), told.append).verdict is Verdict.UNKNOWN
    assert qualify(replace(wanted, required=("latency",)), told.append).verdict is Verdict.UNKNOWN
    assert not [line for line in told if "the baseline is started" in line]
    found = qualify(wanted, told.append)
    assert [line for line in told if "the baseline is started on 1 faults" in line]
    assert [note for note in found.notes if note.startswith("the baseline cannot be started for detection: docker")]
    record("1.0", *[Layer.STARTUP] * 3)
    assert qualify(wanted, lambda _: None).verdict is Verdict.HELD


@pytest.mark.parametrize(
    ("given", "may_run", "because"),
    [
        ("reference-1.0", True, "reference-1.0 names what is recorded, not what can be started"),
        ("reference", False, "nothing may be run"),
    ],
)
def test_it_is_said_why_no_start_of_the_baseline_was_made(
    given: str, may_run: bool, because: str, suite: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asked for them would look for them in vain."""
    monkeypatch.setattr("harness.qualify.starts.measure_starts", Absent)
    record("1.0", Layer.STARTUP)
    sides = {"candidate": side("2.0"), "baseline": parse_side(given, Settings(), EXPECTATIONS)}
    wanted = request(suite, **sides, required=(DETECTION,), may_run=may_run, matrix_runs=(), start_baseline=True)
    found = qualify(wanted, lambda _: None)
    assert f"--start-baseline makes no start: {because}" in found.notes
    assert found.verdict is Verdict.UNKNOWN
    found = qualify(replace(wanted, start_baseline=False), lambda _: None)
    assert not [note for note in found.notes if "--start-baseline" in note]


def test_a_start_of_the_baseline_that_failed_is_noted(suite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = Measured(label="reference-1.0", made=0, failed=(("missing", "it hung"),))
    monkeypatch.setattr("harness.qualify.starts.measure_starts", lambda *_, **__: failed)
    record("2.0", *[Layer.STARTUP] * 3)
    candidate = parse_side("reference-2.0", Settings(), EXPECTATIONS)
    found = qualify(request(suite, candidate=candidate, required=(DETECTION,), start_baseline=True), lambda _: None)
    assert "a start of the baseline on missing is not recorded: it hung" in found.notes
    assert part(found, DETECTION).findings[0].verdict is Verdict.UNKNOWN


def test_a_baseline_is_asked_who_it_is_for_what_is_recorded_of_it(suite: Path) -> None:
    """An image has no label before it is asked; one that cannot be asked is noted."""
    record("1.0", *[Layer.STARTUP] * 3)
    record("2.0", *[Layer.STARTUP] * 3)
    candidate = parse_side("reference-2.0", Settings(), EXPECTATIONS)
    unnamed = replace(side("1.0"), label=None)
    wanted = request(suite, candidate=candidate, baseline=unnamed, required=(DETECTION,), may_run=False)
    assert qualify(wanted, lambda _: None).verdict is Verdict.HELD
    absent = parse_side("acme/never-built:9", Settings(), EXPECTATIONS)
    found = qualify(replace(wanted, baseline=absent), lambda _: None)
    assert found.verdict is Verdict.UNKNOWN
    assert [note for note in found.notes if note.startswith("the baseline cannot be asked who it is: docker")]


def test_what_runs_of_the_baseline_saw_without_guards_counts(suite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store_guarded(Path("out/baseline/one"))
    file = Path("out/baseline/one/run.json")
    file.write_text(file.read_text().replace("reference-2.0", "reference-1.0"))
    record("2.0", *[Layer.STARTUP] * 3)
    seen = [
        Start(scenario="missing", run=f"one/{number}", layer=Layer.STARTUP, seen="it said so") for number in range(3)
    ]
    monkeypatch.setattr("harness.qualify.starts.acceptable_starts", lambda _: seen)
    candidate = parse_side("reference-2.0", Settings(), EXPECTATIONS)
    found = qualify(request(suite, candidate=candidate, required=(DETECTION,), may_run=False), lambda _: None)
    assert found.verdict is Verdict.HELD, found.because


def test_starts_recorded_under_a_moving_tag_are_noted(suite: Path) -> None:
    record("next", *[Layer.STARTUP] * 3)
    record("2.0", *[Layer.STARTUP] * 3)
    tagged = replace(side("next"), label=None)
    found = qualify(request(suite, baseline=tagged, required=(DETECTION,), may_run=False), lambda _: None)
    assert [note for note in found.notes if '"reference-next" is named after a tag, which may have moved' in note]
    found = qualify(request(suite, baseline=side("2.0"), required=(DETECTION,), may_run=False), lambda _: None)
    assert not [note for note in found.notes if "tag" in note]
