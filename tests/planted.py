"""Runs of short scenarios on reference engines that misbehave from a chosen start on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness import Scenario, after_detection, at, faults, load, models, rollout, then
from harness.engine.launch import Launch
from harness.engine.process_child import ProcessEngine
from harness.engine.reference_starter import ReferenceStarter
from harness.judge.claim import Claim
from harness.judge.expectations import record_start
from harness.judge.moments import Layer
from harness.judge.verdict import Finding, Verdict, combine
from harness.load.shape import RequestLimits
from harness.report.store import ScenarioRecord
from harness.run import Run
from harness.settings import Settings

DEFECT = "ROLLOUT_REFERENCE_DEFECT"
STEP_MS = "ROLLOUT_REFERENCE_STEP_MS"
LIMITS = RequestLimits(first_token_s=1.5, total_s=3.0)
LOAD = load.steady(rate_rps=10.0, canary_ratio=0.5, tail_s=0.5, output_tokens=4, limits=LIMITS)
UNSEEN = faults.launch_environment("ROLLOUT_TEST_WITHOUT_MEANING", "1")

Planted = Mapping[str, Mapping[str, str]]  # incarnation → environment of that start


class PlantingStarter(ReferenceStarter):
    """Starts reference engines, each with what was planted for its incarnation; remembers every start."""

    def __init__(self, planted: Planted) -> None:
        super().__init__()
        self.planted = planted
        self.started: list[ProcessEngine] = []

    def start(self, launch: Launch, *, incarnation: str) -> ProcessEngine:
        environment = (*launch.environment, *self.planted.get(incarnation, {}).items())
        engine = super().start(replace(launch, environment=environment), incarnation=incarnation)
        self.started.append(engine)
        return engine


def defect(*names: str) -> faults.Fault:
    """Return the fault that starts the new engine with planted defects; the remedy starts it without."""
    return faults.launch_environment(DEFECT, ",".join(names))


def short(name: str, *injected: faults.Fault, claims: tuple[Claim, ...], **changes: Any) -> Scenario:
    """Return a scenario of a few seconds in which nobody is ever without an engine, claiming the same in both modes."""
    fields: dict[str, Any] = {
        "old": models.tiny_llama(seed=1),
        "new": models.tiny_llama(seed=2),
        "load": LOAD,
        "rollout": rollout.blue_green(ready_limit_s=30.0),
        "guarded_rollout": rollout.blue_green(ready_limit_s=30.0),
        "timeline": (at(0.7).publish("new"), then().start_rollout(), after_detection(limit_s=20.0).remedy()),
        "limit_s": 60.0,
        "about": "A planted defect.",
        **changes,
    }
    return Scenario(name=name, faults=injected, unguarded=claims, guarded=claims, **fields)


def expect(directory: Path, scenario: str, layer: Layer, *, starts: int = 3) -> Path:
    """Write down that the reference engine was seen to notice at this layer, and return the directory."""
    label = ReferenceStarter().identity().label
    for number in range(starts):
        record_start(directory, label, scenario, layer=layer, run=f"start-{number}", seen="by hand")
    return directory


def run_on(starter: ReferenceStarter, directory: Path, *, expectations: Path | None = None) -> Run:
    """Return a run, to be used as a context manager, whose engines come from `starter`."""
    settings = Settings(engine="reference", results=directory / "results")
    known = directory / "expectations" if expectations is None else expectations
    return Run(settings, progress=lambda _: None, expectations=known, starter=starter)


def finding(record: ScenarioRecord, claim: str) -> Finding:
    """Return what was found about the one claim with this name."""
    found = [each for each in record.findings if each.claim.startswith(f"{claim}(")]
    assert len(found) == 1, f"{claim}: {len(found)} findings"
    return found[0]


def verdicts(record: ScenarioRecord) -> dict[str, Verdict]:
    """Return the verdict of every claim by its name."""
    return {each.claim.partition("(")[0]: each.verdict for each in record.findings}


def verdict(record: ScenarioRecord) -> Verdict:
    """Return the verdict as it is when the load was as planned, which a machine that others use cannot promise."""
    return combine(each for each in record.findings if not each.claim.startswith("load_valid("))


def require(record: ScenarioRecord, **expected: Verdict) -> None:
    """Fail with everything that was found unless each named claim has its verdict."""
    seen = verdicts(record)
    wrong = {name: seen.get(name) for name in expected if seen.get(name) is not expected[name]}
    if wrong:
        said = "\n".join(f"{each.verdict}: {each.claim}: {each.because}" for each in record.findings)
        pytest.fail(f"{wrong}, expected {expected}\n{said}", pytrace=False)
