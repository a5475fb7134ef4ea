"""`harness list` shows what is there, and times only from runs that were made."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import cli
from harness.faults import FAULTS
from harness.listing import Took, last_times, listing

SUITE = """
import pytest
from harness import Scenario, faults, models
from scenarios.defences import BITES, LOAD, contained

CACHED = Scenario(
    name="cached",
    old=models.tiny_llama(seed=1),
    new=models.tiny_llama(seed=2),
    faults=(faults.parallel_size(),),
    load=LOAD,
    unguarded=BITES,
    guarded=contained("preflight"),
)

@pytest.mark.gpu
@pytest.mark.qualification
def test_it(run_scenario):
    run_scenario(CACHED)
"""


def junit(engine: str, seconds: float, *, whole_s: float | None = None) -> str:
    known = "" if whole_s is None else f'<properties><property name="whole_s" value="{whole_s}" /></properties>'
    return (
        f'<testsuites><testsuite name="rollout on {engine}">'
        f'<testcase classname="cached" name="cached[guarded]" time="{seconds:.3f}">{known}</testcase>'
        "</testsuite></testsuites>"
    )


@pytest.fixture
def results(tmp_path: Path) -> Path:
    for run, engine, seconds in (
        ("2026-01", "reference-1.0", 9),
        ("2026-02", "reference-1.0", 5),
        ("2026-03", "v-1", 70),
    ):
        (tmp_path / "results" / run).mkdir(parents=True)
        (tmp_path / "results" / run / "junit.xml").write_text(junit(engine, seconds))
    (tmp_path / "results" / "2026-04").mkdir()
    (tmp_path / "results" / "2026-04" / "junit.xml").write_bytes(b"\xff\x00 not XML")
    return tmp_path / "results"


def test_times_are_those_of_the_newest_run_on_each_engine(results: Path) -> None:
    assert last_times(results) == {
        "cached": {"guarded on reference-1.0": Took(load_s=5.0), "guarded on v-1": Took(load_s=70.0)}
    }
    assert last_times(results / "absent") == {}


def test_a_time_that_is_no_number_is_none(results: Path) -> None:
    broken = junit("v-2", 7, whole_s=8.0)
    (results / "2026-04" / "junit.xml").write_text(broken.replace('value="8.0"', 'value="8.0.0"'))
    assert last_times(results)["cached"]["guarded on v-2"] == Took(load_s=7.0)
    (results / "2026-04" / "junit.xml").write_text(broken.replace('time="7.000"', 'time="..."'))
    assert "guarded on v-2" not in last_times(results)["cached"]


def test_every_fault_and_scenario_is_listed_with_what_it_needs(results: Path, tmp_path: Path) -> None:
    suite = tmp_path / "rollouts" / "test_cached.py"
    suite.parent.mkdir()
    suite.write_text(SUITE)

    lines = list(listing([suite.parent], results))

    assert {line.split()[0] for line in lines if line.startswith("  ")} >= set(FAULTS)
    widen = next(line for line in lines if "widen_tensor" in line)
    assert widen.split()[1:3] == ["damage", "D08"]
    below = lines[next(i for i, line in enumerate(lines) if line.startswith("  stale_weight_cache")) + 1]
    assert below.strip() == "needs an engine with the weight cache"
    assert f"{suite}:" in lines
    assert "  cached: parallel_size (qualification, gpu)" in lines
    assert "    took 5 s under load guarded on reference-1.0, 70 s under load guarded on v-1" in lines


def test_scenarios_that_exchange_adapters_say_that_they_need_an_engine_that_has_them(results: Path) -> None:
    lines = list(listing([Path(__file__).parents[1] / "scenarios" / "test_adapters.py"], results))
    own = [line for line in lines if line.startswith("  adapter_of_unknown_names:")]
    assert own == ["  adapter_of_unknown_names: adapter_prefix (nightly)"]
    assert lines[lines.index(own[0]) + 1] == "    needs vLLM, which serves adapters"


def test_the_command_lists_faults_where_there_are_no_scenarios(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["list"]) == 0
    assert f"faults ({len(FAULTS)};" in capsys.readouterr().out


def test_who_qualification_requires_is_listed_with_how_long_a_side_takes(results: Path, tmp_path: Path) -> None:
    suite = tmp_path / "rollouts" / "test_cached.py"
    suite.parent.mkdir()
    suite.write_text(f'{SUITE}\nfrom dataclasses import replace\n\nOTHER = replace(CACHED, name="other")\n')
    assert not any(line.startswith("  other") for line in _of_qualification(suite, results))

    suite.write_text(
        f"{suite.read_text()}\n@pytest.mark.qualification\ndef test_other(run_scenario):\n    run_scenario(OTHER)\n"
    )
    timed = results / "qualifications" / "a-over-b" / "candidate" / "2026-05"
    timed.mkdir(parents=True)
    (timed / "junit.xml").write_text(junit("v-1", 130, whole_s=180.4))
    assert _of_qualification(suite, results) == [
        "qualification (the 2 scenarios whose guarded runs harness qualify requires):",
        "  on reference-1.0: 1 of them took 0.1 min, 0.1 of it under load; all would, at that pace, 0.2 (of 1 only the load is "
        "known, not the starts of their engines)",
        "  on v-1: 1 of them took 3.0 min, 2.2 of it under load; all would, at that pace, 6.0",
        "  cached                                    5 s under load on reference-1.0, 180 s (130 s under load) on v-1",
        "  other                                     not timed",
    ]
    assert _of_qualification(suite, tmp_path / "absent")[1] == "  how long they take is known once they were run here"


def test_nothing_is_said_of_qualification_where_nothing_is_marked(results: Path, tmp_path: Path) -> None:
    suite = tmp_path / "rollouts" / "test_cached.py"
    suite.parent.mkdir()
    suite.write_text(SUITE.replace("@pytest.mark.qualification\n", ""))
    assert _of_qualification(suite, results) == []


def _of_qualification(suite: Path, results: Path) -> list[str]:
    lines = list(listing([suite], results))
    begin = next((number for number, line in enumerate(lines) if line.startswith("qualification (")), len(lines))
    return lines[begin:]
