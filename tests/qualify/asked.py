"""A suite of one scenario, sides of two versions of the reference engine, and records of both, written by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.engine.engine import EngineIdentity
from harness.engine.reference_starter import ReferenceStarter
from harness.errors import EnvironmentMissing
from harness.judge.expectations import record_start
from harness.judge.moments import Layer
from harness.judge.qualification import Qualification
from harness.qualify import Request
from harness.qualify.side import Side
from harness.settings import Settings

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


class Absent:
    """A run that cannot be made here."""

    def __init__(self, *_: object, **__: object) -> None:
        raise EnvironmentMissing("docker", "not now")
