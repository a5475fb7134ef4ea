"""From planted records to the verdict file, and once end to end on two reference engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness import cli
from harness.judge.expectations import load_expectations
from harness.judge.moments import Layer
from harness.judge.qualification import DETECTION, SCENARIOS
from harness.judge.verdict import Verdict
from harness.qualify import qualify
from harness.report.qualification_page import write_qualification
from tests.qualify.asked import EXPECTATIONS, part, record, request, side


def test_a_candidate_that_notices_later_is_broken(suite: Path) -> None:
    """End to end: the new release serves a missing tensor, which the old one was three times seen to refuse."""
    record("1.0", *[Layer.STARTUP] * 3)
    told: list[str] = []
    asked = request(suite, candidate=side("2.0", "ignores_missing_tensor"), required=(SCENARIOS, DETECTION))
    found = qualify(asked, told.append)
    assert found.verdict is Verdict.BROKEN, found.because
    assert (found.candidate, found.baseline) == ("reference-2.0", "reference-1.0")
    assert "noticed later: candidate canary, baseline startup" in part(found, DETECTION).findings[0].because
    assert "recorded starts of reference-1.0" in found.sources[DETECTION]
    assert part(found, SCENARIOS).ran == 1
    assert any(line.startswith("start 2 of 3: missing (about ") for line in told), told
    assert any("not vLLM" in note for note in found.notes)

    page = write_qualification(found, asked.out, judged_at="now", commit="c", command="harness qualify")
    stored = json.loads((asked.out / "qualification.json").read_text())
    assert stored["verdict"] == "broken"
    assert [each["verdict"] for each in stored["parts"]][1] == "broken"
    assert "noticed later" in page.read_text()
    assert "://" not in page.read_text()

    # Called again, nothing is run again: whatever was seen is still there.
    told.clear()
    again = qualify(asked, told.append)
    assert again.verdict is Verdict.BROKEN
    assert not any(line.startswith("start ") for line in told)
    if (
        part(found, SCENARIOS).verdict is not Verdict.UNKNOWN
    ):  # on a busy machine the load may void the run: it is due again
        assert told == []
    assert load_expectations(asked.out / "starts", "reference-2.0")["missing"].layers == (Layer.CANARY,) * 3


def test_what_nothing_is_given_of_and_nothing_may_be_run_for_is_unknown(suite: Path) -> None:
    found = qualify(request(suite, may_run=False), lambda _: None)
    assert found.verdict is Verdict.UNKNOWN
    assert [each.ran for each in found.parts] == [0, 0, 0, 0]
    assert part(found, SCENARIOS).missing[0].because == "no run of the candidate was given, and nothing may be run"


def test_command_ends_with_the_verdict(suite: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record("1.0", *[Layer.STARTUP] * 3)
    record("2.0", *[Layer.STARTUP] * 3)
    arguments = ["qualify", "rollouts", "--candidate", "reference-2.0", "--baseline", "reference-1.0", "--no-run"]
    arguments += ["--expectations", str(EXPECTATIONS)]
    assert cli.main([*arguments, "--require", "detection"]) == 0
    assert "reference-2.0 over reference-1.0: held" in capsys.readouterr().out
    assert cli.main(arguments) == 2
    told = capsys.readouterr().out
    assert "unknown scenarios  0 of 1: 1 of 1 are missing" in told
    assert "        missing: no run of the candidate was given, and nothing may be run: missing\n" in told
    place = Path("results/qualifications/reference-2.0-over-reference-1.0")
    assert json.loads((place / "qualification.json").read_text())["verdict"] == "unknown"
    assert (place / "qualification.html").is_file()
    record("2.0", *[Layer.STARTUP] * 3, Layer.CANARY)
    assert cli.main(arguments) == 1
    assert "        missing: noticed later" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--candidate", "nothing", "--baseline", "reference"], '"nothing" names no side of a qualification'),
        (["--candidate", "reference", "--baseline", "reference", "--require", "luck"], 'part "luck" is unknown'),
        (["--candidate", "reference", "--baseline", "reference", "--repeat", "0"], "repeat must be at least 1"),
        (["--candidate", "reference", "--baseline", "reference", "--starts", "2"], "starts at least 3, got 1 and 2"),
        (
            ["--candidate", "reference", "--baseline", "reference", "--require", ","],
            "no part is required; parts: scenarios",
        ),
        (
            ["--candidate", "reference", "--baseline", "reference", "-k", "zzz"],
            'is selected by -k "zzz"; --all takes every one',
        ),
        (["--candidate", "reference", "--baseline", "reference", "-m", "gpu"], 'is selected by -m "gpu"; --all takes'),
        (["--candidate", "reference", "--baseline", "reference", "-m", "a b"], '"a b" cannot be read as markers'),
        (["--candidate", "~nosuchuser/run", "--baseline", "reference"], '"~nosuchuser/run" is no path here: '),
        (["--candidate", "reference", "--baseline", "reference", "--profile", "x"], 'profile "x" is unknown'),
        (["--candidate", "reference", "--baseline", "reference", "--compare-model", "x"], 'model "x" is unknown'),
        (["--candidate", "reference", "--baseline", "reference", "--profile", "screen"], "a screen is half of a comp"),
        (["--candidate", "reference", "--baseline", "reference", "--profile", "confirm"], "a confirm is half of a"),
    ],
)
def test_mistakes_are_named(suite: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert cli.main(["qualify", "rollouts", *arguments]) == 3
    errors = capsys.readouterr().err
    assert said in errors
    assert errors.count("\n") == 1
