"""Latency comes from a comparison that is about these two sides, or from one of its own."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness import cli
from harness.engine.reference_starter import ReferenceStarter
from harness.errors import UsageError
from harness.judge.moments import Layer
from harness.judge.qualification import SCENARIOS
from harness.judge.verdict import Verdict
from harness.qualify import qualify
from harness.qualify.side import parse_side
from harness.settings import Settings
from tests.judge.stored import store_comparison
from tests.qualify.asked import (
    EXPECTATIONS,
    NIGHTLY,
    Absent,
    edit_arms,
    part,
    record,
    request,
    side,
    store_guarded,
)

SIDES = ("candidate", "baseline")


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


@pytest.mark.parametrize(
    ("arm", "build", "given"), [("candidate", "b2", "scenarios_runs"), ("baseline", "b1", "baseline_runs")]
)
def test_a_comparison_must_be_of_the_build_whose_runs_were_given(
    suite: Path, tmp_path: Path, arm: str, build: str, given: str
) -> None:
    """A label may stay while the image is built anew."""
    store_comparison(tmp_path / "compared", factor=1.0, pairs=16)
    edit_arms(tmp_path / "compared", only="old", engine="reference-1.0", build="b1")
    edit_arms(tmp_path / "compared", only="new", engine="reference-2.0", build="b2")
    store_guarded(tmp_path / "run")
    file = tmp_path / "run" / "run.json"
    stored = {
        **json.loads(file.read_text()),
        "engine_label": "reference-2.0" if arm == "candidate" else "reference-1.0",
    }
    asked = request(suite, comparison=tmp_path / "compared", **{given: (tmp_path / "run",)}, **NIGHTLY)
    file.write_text(json.dumps({**stored, "engine_build": build}))
    assert qualify(asked, lambda _: None).verdict is Verdict.HELD
    file.write_text(json.dumps({**stored, "engine_build": "b3"}))
    with pytest.raises(UsageError, match=f'side is of build "{build}", the {arm} is of "b3"'):
        qualify(asked, lambda _: None)


def test_a_comparison_is_about_no_side_of_two_builds(
    suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The image was built anew since the runs that were given: the comparison is of one of both alone."""
    monkeypatch.setattr("harness.qualify.starts.measure_starts", Absent)
    store_comparison(tmp_path / "compared", factor=1.0, pairs=16)
    edit_arms(tmp_path / "compared", only="old", engine="reference-1.0")
    edit_arms(tmp_path / "compared", only="new", engine="reference-2.0", build="b2")
    store_guarded(tmp_path / "run")
    file = tmp_path / "run" / "run.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "engine_build": "b2"}))
    asked = request(suite, comparison=tmp_path / "compared", scenarios_runs=(tmp_path / "run",), profile="nightly")
    assert qualify(replace(asked, required=("latency",)), lambda _: None).verdict is Verdict.HELD
    with pytest.raises(UsageError, match=r'is of build "b2", the candidate is of "b2", "python'):
        qualify(replace(asked, required=("detection", "latency")), lambda _: None)


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


def test_a_comparison_may_serve_another_model_than_the_scenarios(
    suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own runs count for the model that is asked for, and for no other."""
    store_comparison(tmp_path / "compared", factor=1.0, pairs=24, profile="release", fresh=True)
    edit_arms(tmp_path / "compared", engine="reference-1.0", build=ReferenceStarter().identity().build)
    made: list[str | None] = []

    def compare(settings: Settings, options: Any, **others: Any) -> tuple[Path, None]:
        run = settings.results / f"run-{len(made)}"
        shutil.copytree(tmp_path / "compared", run)
        (run / "run.json").write_text(json.dumps({"settings": settings.as_json()}, default=str))
        (run / "verdict.json").write_text(json.dumps({"answer": "no"}))
        made.append(settings.model)
        assert settings.old is None
        return run, None

    monkeypatch.setattr("harness.compare.compare", compare)
    (tmp_path / "mine").mkdir()
    of_mine = Settings(engine="reference", old=tmp_path / "mine", new=tmp_path / "mine")
    old = replace(side("1.0"), settings=of_mine)
    new = replace(old, settings=Settings(engine="process", python=Path("/bin/true")))
    for model in ("smollm2", "smollm2", "tiny", "smollm2"):
        asked = request(suite, candidate=new, baseline=old, required=("latency",), compare_model=model)
        assert qualify(asked, lambda _: None).verdict is Verdict.HELD
    assert made == ["smollm2", "tiny"]
    recorded = {"baseline": replace(old, settings=None, starter=None), "may_run": False}  # no settings to compare with
    for model, counted in (("smollm2", 1), ("tiny", 1)):
        asked = request(suite, candidate=new, required=("latency",), compare_model=model, **recorded)
        assert len(qualify(asked, lambda _: None).sources["latency"]) == counted
    shutil.rmtree("out/comparison/run-1")
    found = qualify(
        request(suite, candidate=new, required=("latency",), compare_model="tiny", **recorded), lambda _: None
    )
    assert (found.verdict, found.sources["latency"]) == (Verdict.UNKNOWN, ())
    assert any("it served another model than is asked for" in note for note in found.notes)
    with pytest.raises(UsageError, match="give either it or a model to compare with"):
        request(suite, compare_model="tiny", comparison=tmp_path / "compared")
    with pytest.raises(UsageError, match='model "huge" is unknown; models: tiny, smollm2'):
        request(suite, compare_model="huge")


def test_a_side_that_a_comparison_cannot_start_is_said(suite: Path) -> None:
    found = qualify(request(suite, required=("latency",)), lambda _: None)
    assert found.verdict is Verdict.UNKNOWN
    assert "is an image or an interpreter, and reference 2.0 is neither" in found.parts[3].missing[0].because


@pytest.mark.parametrize("arm", ["candidate", "baseline"])
def test_nothing_is_compared_where_a_side_is_only_recorded(
    suite: Path, monkeypatch: pytest.MonkeyPatch, arm: str
) -> None:
    monkeypatch.setattr("harness.compare.compare", Absent)
    record("1.0", *[Layer.STARTUP] * 3)
    sides = {
        name: replace(side("1.0"), settings=Settings(engine="process", python=Path("/bin/true"))) for name in SIDES
    }
    sides[arm] = parse_side("reference-1.0", Settings(), EXPECTATIONS)
    found = qualify(request(suite, **sides, required=("latency",)), lambda _: None)
    assert found.verdict is Verdict.UNKNOWN
    assert part(found, "latency").missing[0].because == (
        "reference-1.0 names what is recorded, not what can be started"
    )


def test_nothing_is_compared_where_latency_latency_is_not_required(
    suite: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_the_newest_of_its_own_comparisons_counts(suite: Path) -> None:
    both = {"candidate": side("1.0"), "baseline": side("1.0")}
    for name, factor in (("run-1", 1.0), ("run-2", 1.5)):
        run = Path("out/comparison") / name
        store_comparison(run, factor=factor, pairs=16, fresh=True)
        edit_arms(run, engine="reference-1.0")
        (run / "run.json").write_text("{}")
        (run / "verdict.json").write_text(json.dumps({"answer": "no"}))
    (Path("out/comparison") / "run-3").symlink_to("run-1")  # such as "latest"
    found = qualify(request(suite, **both, **NIGHTLY), lambda _: None)
    assert (found.verdict, found.sources["latency"]) == (Verdict.BROKEN, ("out/comparison/run-2",))


def test_what_is_no_comparison_is_refused_and_one_of_other_engines_made_here_is_not_judged(
    suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    with pytest.raises(UsageError, match='run" is not a comparison: harness compare makes one'):
        qualify(request(suite, comparison=tmp_path / "run", **NIGHTLY), lambda _: None)
    store_comparison(tmp_path / "compared", factor=1.0, pairs=16, fresh=True)
    edit_arms(tmp_path / "compared", engine="reference-0.9")
    monkeypatch.setattr("harness.compare.compare", lambda *_, **__: (tmp_path / "compared", None))
    candidate = replace(side("2.0"), settings=Settings(engine="process", python=Path("/bin/true")))
    asked = request(suite, candidate=candidate, **{**NIGHTLY, "may_run": True})
    found = qualify(asked, lambda _: None)
    assert found.verdict is Verdict.UNKNOWN
    assert "its old side is reference-0.9" in part(found, "latency").missing[0].because
