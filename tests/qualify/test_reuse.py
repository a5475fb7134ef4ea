"""What an earlier call left behind counts only for what is asked now."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness import models
from harness.checkpoint.stamp import stamp, stamps_of
from harness.engine.engine import EngineIdentity
from harness.errors import EnvironmentMissing
from harness.judge.expectations import load_expectations, record_start
from harness.judge.moments import Layer
from harness.judge.qualification import DETECTION, RECOVERY, SCENARIOS
from harness.judge.verdict import Verdict
from harness.qualify import Request, qualify
from harness.qualify.evidence import unlike_in
from harness.qualify.guarded_runs import Run
from harness.report.store import load_run
from harness.scenario import Mode
from harness.settings import Settings
from harness.suite import collect
from tests.judge.stored import store_comparison
from tests.qualify.asked import Absent, Labelled, edit_arms, part, request, side, store_guarded


class Tagged(Labelled):
    """A name that means a build, which may be another one tomorrow."""

    def __init__(self, build: str) -> None:
        super().__init__("2.0")
        self._build = build

    def identity(self) -> EngineIdentity:
        if not self._build:
            raise EnvironmentMissing("docker", "it does not answer")
        return replace(super().identity(), build=self._build)


def tagged(build: str, **settings: Any) -> Any:
    return replace(
        side("2.0"), label=None, starter=Tagged(build), settings=replace(Settings(engine="reference"), **settings)
    )


def of(run: Path, **fields: Any) -> None:
    stored = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**stored, **fields}))


@pytest.fixture
def earlier(suite: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a run that an earlier call made of the build "monday", in which the scenario held; no other can be made."""
    run = Path("out/candidate/one")
    store_guarded(run)
    of(run, engine_build="monday", settings=json.loads(json.dumps(Settings(engine="reference").as_json(), default=str)))
    monkeypatch.setattr("harness.report.store.combine", lambda _: Verdict.HELD)
    monkeypatch.setattr("harness.qualify.guarded_runs.Run", Absent)
    return run


def asked(suite: Path, candidate: Any, **changes: Any) -> Request:
    return request(suite, candidate=candidate, required=(SCENARIOS,), **changes)


def test_a_tag_that_means_another_build_does_not_get_the_verdict_of_the_build_before(
    suite: Path, earlier: Path
) -> None:
    found = qualify(asked(suite, tagged("monday")), lambda _: None)
    assert (found.verdict, found.builds["candidate"]) == (Verdict.HELD, ["monday"])
    found = qualify(asked(suite, tagged("tuesday")), lambda _: None)
    assert (found.verdict, found.builds["candidate"]) == (Verdict.UNKNOWN, ["tuesday"])
    assert [note for note in found.notes if 'it is of build "monday", and "tuesday" is there now' in note]
    found = qualify(asked(suite, tagged("")), lambda _: None)
    assert found.verdict is Verdict.UNKNOWN
    assert [note for note in found.notes if "is now cannot be asked: docker is not available: it does" in note]


def test_a_release_whose_image_was_built_anew_is_run_anew(suite: Path, earlier: Path) -> None:
    """It is asked only where something is to be run; then nothing of the build before is mixed in."""
    release = replace(tagged("tuesday"), label="reference-2.0")
    assert qualify(asked(suite, release), lambda _: None).verdict is Verdict.HELD
    told: list[str] = []
    found = qualify(asked(suite, release, repeat=2), told.append)
    assert (found.verdict, told) == (Verdict.UNKNOWN, ["2 guarded scenarios on the candidate"])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_model_len": 512}, "its max_model_len is 256, and 512 is asked for"),
        (
            {"engine_arguments": ("--enforce-eager",)},
            'its engine_arguments is [], and ["--enforce-eager"] is asked for',
        ),
        ({"model": "smollm2"}, 'its model is null, and "smollm2" is asked for'),
        ({"seed": 2}, "its seed is 1, and 2 is asked for"),
    ],
)
def test_other_settings_ask_another_question(suite: Path, earlier: Path, settings: dict[str, Any], said: str) -> None:
    found = qualify(asked(suite, tagged("monday", **settings)), lambda _: None)
    assert found.verdict is Verdict.UNKNOWN
    assert [note for note in found.notes if said in note], found.notes


def test_checkpoints_that_were_written_since_ask_another_question(suite: Path, earlier: Path, tmp_path: Path) -> None:
    both = Settings(engine="reference", old=suite, new=suite)
    of(earlier, checkpoints=stamps_of(both), settings=both.as_json())
    candidate = tagged("monday", old=suite, new=suite)
    assert qualify(asked(suite, candidate), lambda _: None).verdict is Verdict.HELD
    (suite / "model.safetensors").write_bytes(b"new")
    found = qualify(asked(suite, candidate), lambda _: None)
    assert found.verdict is Verdict.UNKNOWN
    assert [note for note in found.notes if "its checkpoints have been written since" in note]


def test_a_stamp_changes_with_name_size_and_time(tmp_path: Path) -> None:
    file = tmp_path / "part" / "a.safetensors"
    file.parent.mkdir()
    file.write_bytes(b"12")
    seen = [stamp(tmp_path)]
    assert stamp(tmp_path) == seen[0]
    os.utime(file, ns=(1, 1))
    seen.append(stamp(tmp_path))
    file.write_bytes(b"123")
    os.utime(file, ns=(1, 1))
    seen.append(stamp(tmp_path))
    file.rename(file.with_name("b.safetensors"))
    seen.append(stamp(tmp_path))
    (tmp_path / "link").symlink_to("nothing")
    seen.append(stamp(tmp_path))
    assert len(set(seen)) == 5


def test_a_scenario_that_is_declared_otherwise_now_is_run_anew(suite: Path, earlier: Path) -> None:
    [scenario] = collect([suite])
    declared = earlier / "scenarios/missing-guarded/scenario.json"
    stored = json.loads(declared.read_text())
    claims = [{"name": claim.name, "parameters": dict(claim.parameters)} for claim in scenario.claims(Mode.GUARDED)]
    declaration = json.loads(json.dumps({**scenario.declaration(), "old": "the other way round", "about": "before"}))
    declared.write_text(json.dumps({**stored, "declaration": declaration, "claims": claims}))
    assert qualify(asked(suite, tagged("monday")), lambda _: None).verdict is Verdict.HELD
    file = suite / "test_missing.py"
    file.write_text(file.read_text().replace("exposed_at_most(0)", "exposed_at_most(1)"))
    found = qualify(asked(suite, tagged("monday")), lambda _: None)
    assert (found.verdict, part(found, SCENARIOS).ran) == (Verdict.UNKNOWN, 0)
    assert "missing of run one does not count: it was declared otherwise then" in found.notes


def test_starts_of_another_build_are_made_anew(suite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, had = Path("out/starts"), []
    for number, build in enumerate(("monday", "monday", "tuesday")):
        store_guarded(place / f"r{number}")
        of(place / f"r{number}", engine_build=build)
        record_start(
            place, "reference-2.0", "missing", layer=Layer.STARTUP, run=f"r{number}/missing-start-1", seen="it"
        )

    def measured(*_: object, **__: object) -> None:
        had.append(load_expectations(place, "reference-2.0")["missing"].runs)
        raise EnvironmentMissing("docker", "not now")

    monkeypatch.setattr("harness.qualify.starts.measure_starts", measured)
    wanted = request(suite, candidate=tagged("monday"), required=(DETECTION,))
    qualify(wanted, lambda _: None)
    assert had == [("r0/missing-start-1", "r1/missing-start-1")]
    assert [len(load_expectations(place, each.stem)) for each in place.glob("*.toml")] == [1]
    assert list(place.glob("reference-2.0.toml.*"))


def store_start(place: Path, number: int, **fields: Any) -> None:
    run = place / f"r{number}"
    store_guarded(run)
    of(run, **fields)
    record_start(place, "reference-2.0", "missing", layer=Layer.STARTUP, run=f"{run.name}/missing-start-1", seen="it")


def test_starts_of_the_build_before_do_not_count_once_a_release_has_said_which_it_is(
    suite: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, had = Path("out/starts"), []
    for number in range(2):
        store_start(place, number, engine_build="monday")

    def measured(*_: object, **__: object) -> None:
        had.append(load_expectations(place, "reference-2.0"))
        raise EnvironmentMissing("docker", "not now")

    monkeypatch.setattr("harness.qualify.starts.measure_starts", measured)
    release = replace(tagged("tuesday"), label="reference-2.0")
    found = qualify(request(suite, candidate=release, required=(DETECTION,)), lambda _: None)
    assert had == [{}]
    assert not [source for source in found.sources[DETECTION] if "starts" in source], "none of them counts"


def test_starts_of_a_baseline_that_was_built_anew_are_made_anew(suite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store_start(Path("out/baseline-starts"), 0, engine_build="monday")
    had: dict[str, Any] = {}

    def measured(_: object, __: object, into: Path, **___: object) -> None:
        had[into.name] = load_expectations(into, "reference-2.0")
        raise EnvironmentMissing("docker", "not now")

    monkeypatch.setattr("harness.qualify.starts.measure_starts", measured)
    release = replace(tagged("tuesday"), label="reference-2.0")
    qualify(
        request(suite, candidate=release, baseline=release, required=(DETECTION,), start_baseline=True), lambda _: None
    )
    assert had["baseline-starts"] == {}


def test_starts_that_all_count_are_left_where_they_are(suite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Path("out/starts")
    store_start(place, 0, engine_build="monday")
    before = (place / "reference-2.0.toml").read_bytes()

    def measured(*_: object, **__: object) -> None:
        raise EnvironmentMissing("docker", "not now")

    monkeypatch.setattr("harness.qualify.starts.measure_starts", measured)
    qualify(request(suite, candidate=tagged("monday"), required=(DETECTION,)), lambda _: None)
    assert [each.name for each in place.glob("*.toml*")] == ["reference-2.0.toml"]
    assert (place / "reference-2.0.toml").read_bytes() == before


def test_starts_on_other_checkpoints_than_scenarios_declare_do_not_count(
    suite: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(engine="reference", model="smollm2").as_json()
    store_start(Path("out/starts"), 0, engine_build="monday", settings=json.loads(json.dumps(settings, default=str)))
    release = replace(tagged("monday", model="smollm2"), label="reference-2.0")
    found = qualify(request(suite, candidate=release, required=(DETECTION,), may_run=False), lambda _: None)
    assert [note for note in found.notes if 'its model is "smollm2", and null is asked for' in note], found.notes


def test_a_release_that_was_built_anew_goes_on_with_the_runs_of_its_build(suite: Path, earlier: Path) -> None:
    """Runs of both builds lie there after the first call on the new one."""
    later = earlier.with_name("two")
    shutil.copytree(earlier, later)
    of(later, engine_build="tuesday")
    release = replace(tagged("tuesday"), label="reference-2.0")
    found = qualify(asked(suite, release), lambda _: None)
    assert (found.verdict, found.builds["candidate"]) == (Verdict.HELD, ["tuesday"])


def test_a_stamp_reads_linked_directories_and_comes_to_an_end(tmp_path: Path) -> None:
    inner, whole = tmp_path / "inner", tmp_path / "whole"
    inner.mkdir()
    whole.mkdir()
    (inner / "file").write_bytes(b"1")
    (whole / "adapter").symlink_to(inner)
    (inner / "loop").symlink_to(whole)
    before = stamp(whole)
    (inner / "file").write_bytes(b"12")
    assert stamp(whole) != before
    with pytest.raises(OSError, match="absent"):
        stamp(tmp_path / "absent")


def test_starts_are_of_what_scenarios_declare(suite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those recorded are: a tiny checkpoint refused by one release says nothing of another model on the next."""
    given: list[Settings] = []

    def measured(_: object, settings: Settings, *__: object, **___: object) -> None:
        given.append(settings)
        raise EnvironmentMissing("docker", "not now")

    monkeypatch.setattr("harness.qualify.starts.measure_starts", measured)
    candidate = tagged("monday", model="smollm2", engine_arguments=("--enforce-eager",))
    found = qualify(request(suite, candidate=candidate, required=(DETECTION,)), lambda _: None)
    assert [each.replaced for each in given] == [()]
    assert [note for note in found.notes if "model, engine-arguments say nothing about it" in note]


def test_an_own_comparison_with_another_model_is_not_used_again(
    suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = {"candidate": side("1.0"), "baseline": side("1.0")}
    run = Path("out/comparison/run-1")
    store_comparison(run, factor=1.0, pairs=16, fresh=True)
    edit_arms(run, engine="reference-1.0")
    (run / "run.json").write_text(json.dumps({"settings": {"model": "smollm2"}}))
    (run / "verdict.json").write_text(json.dumps({"answer": "no"}))
    latency = {"required": ("latency",), "may_run": False, "profile": "nightly"}
    found = qualify(request(suite, **both, **latency), lambda _: None)
    assert (found.verdict, found.sources["latency"]) == (Verdict.UNKNOWN, ())
    (run / "run.json").write_text(json.dumps({"settings": {"model": None}}))
    assert qualify(request(suite, **both, **latency), lambda _: None).verdict is Verdict.HELD


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"settings": {"model": "smollm2"}}, 'differ in model: "smollm2", null'),
        ({"settings": {"engine_arguments": ["-O0"]}}, 'differ in engine_arguments: ["-O0"], []'),
        ({"machine": {"processor": "another, 8 cores"}}, 'made on "a processor, 1 cores" and on "another, 8 cores"'),
        ({"settings": {"seed": 2}}, ""),
        ({"machine": {}, "settings": {}}, ""),
    ],
)
def test_recoveries_of_unlike_runs_are_not_compared(
    suite: Path, tmp_path: Path, fields: dict[str, Any], said: str
) -> None:
    runs = [tmp_path / "old", tmp_path / "new"]
    for run in runs:
        store_guarded(run)
        of(run, machine={"processor": "a processor, 1 cores"}, settings={"model": None, "engine_arguments": []})
    of(runs[1], **fields)
    assert unlike_in([load_run(run) for run in runs]).endswith(said)
    of(runs[0], engine_label="reference-1.0")
    given = {"baseline_runs": (runs[0],), "scenarios_runs": (runs[1],), "required": (RECOVERY,), "may_run": False}
    because = part(qualify(request(suite, **given), lambda _: None), RECOVERY).missing[0].because
    assert said in because
    assert ("cannot be compared" in because) is bool(said)


def test_a_run_says_which_files_a_users_checkpoints_had(suite: Path, tmp_path: Path) -> None:
    old, new = (models.tiny_llama(seed=seed).build(tmp_path / "models") for seed in (1, 2))
    settings = Settings(engine="reference", old=old, new=new, results=Path("results"))
    with Run(settings, progress=lambda _: None, expectations=suite) as run:
        stored = json.loads((run.directory / "run.json").read_text())
    assert stored["checkpoints"] == {"old": stamp(old), "new": stamp(new)}
    assert stamp(old) != stamp(new)
