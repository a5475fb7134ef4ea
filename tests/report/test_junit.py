"""JUnit XML is green only if the whole run was: what did not run is an error, and the file is always XML."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from harness.judge.verdict import Verdict
from harness.listing import Took, last_times
from harness.observe.history import EventKind
from harness.report.junit import write_junit
from harness.report.store import measure


def suite(run, path: Path) -> ElementTree.Element:
    write_junit(run, path)
    (found,) = ElementTree.parse(path).getroot()
    return found


def test_a_whole_run_in_which_all_was_held_is_green(guarded, make_scenario, make_run, tmp_path) -> None:
    run = make_run(make_scenario(guarded(), verdict=Verdict.HELD))
    found = suite(run, tmp_path / "junit.xml")
    assert (found.get("tests"), found.get("errors"), len(found.findall("testcase"))) == ("1", "0", 1)


@pytest.mark.parametrize("undeclared", [(), ("other-unguarded",)])
def test_a_run_that_did_not_come_to_its_end_is_an_error(undeclared, guarded, make_scenario, make_run, tmp_path) -> None:
    held = make_scenario(guarded(), verdict=Verdict.HELD)
    found = suite(make_run(held, is_complete=False, undeclared=undeclared), tmp_path / "junit.xml")
    assert (found.get("tests"), found.get("failures"), found.get("errors")) == ("2", "0", "1")
    problems = [case.find("error") for case in found.iter("testcase")]
    [problem] = [each for each in problems if each is not None]
    assert "did not come to its end" in str(problem.get("message"))
    assert all(name in str(problem.get("message")) for name in undeclared)


def test_a_figure_that_is_not_known_is_left_out(guarded, make_scenario, make_run, tmp_path) -> None:
    run = make_run(make_scenario(guarded(), measured={"recovered_after_s": None, "requests": 0}))
    shown = {each.get("name"): each.get("value") for each in suite(run, tmp_path / "junit.xml").iter("property")}
    assert "recovered_after_s" not in shown
    assert shown["requests"] == "0"


def test_hostile_words_in_a_stored_run_leave_it_xml(guarded, make_scenario, make_run, tmp_path) -> None:
    run = make_run(make_scenario(guarded()), engine_label="vllm\x00\x1b[31m<&>", started_at="2026\x08")
    assert "vllm" in str(suite(run, tmp_path / "junit.xml").get("name"))


def test_the_file_says_how_long_a_scenario_took_with_the_starts_of_its_engines(
    guarded, make_scenario, make_run, tmp_path
) -> None:
    """`harness list` reads it there: the time of a test case is the load alone."""
    story = guarded()
    story.event(1.0, EventKind.PHASE_ENDED, phase="engine", took_s=60.5)
    story.event(2.0, EventKind.PHASE_ENDED, phase="load", took_s=20)
    (tmp_path / "results" / "2026-01").mkdir(parents=True)
    run = make_run(make_scenario(story, name="cached", mode="guarded", measured=measure(story.history())))
    write_junit(run, tmp_path / "results" / "2026-01" / "junit.xml")
    (took,) = last_times(tmp_path / "results")["cached"].values()
    assert took.whole_s is not None
    assert took.whole_s >= 80.5
    assert 0 < took.load_s < took.whole_s
    assert str(Took(load_s=20.0, whole_s=80.5)) == "80 s (20 s under load)"
