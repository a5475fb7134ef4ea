"""Each way in which a release can be worse is broken, and each way in which something is lacking is unknown."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from harness.judge.expectations import Expectation
from harness.judge.moments import Layer
from harness.judge.qualification import (
    DETECTION,
    LATENCY,
    RECOVERY,
    SCENARIOS,
    Part,
    Qualification,
    judge_detection,
    judge_latency,
    judge_recovery,
    judge_scenarios,
)
from harness.judge.verdict import Finding, Verdict

NAMES = ("widened", "missing")
OLD = (30.1, 31.4, 29.8, 30.9, 32.0)


def starts(*layers: Layer, seen: str = "it said so") -> Expectation:
    return Expectation(layers=layers, runs=tuple(f"run-{number}" for number in range(len(layers))), seen=seen)


def ran(verdict: Verdict, because: str = "noticed at preflight") -> Finding:
    return Finding(claim="widened", verdict=verdict, because=because, evidence=("run/widened-guarded",))


THREE_AT_START = starts(Layer.STARTUP, Layer.STARTUP, Layer.STARTUP)
NOT_SLOWER = Finding(claim="latency_not_regressed()", verdict=Verdict.HELD, because="slower: no")


def qualification(**changed: Part) -> Qualification:
    """Return a qualification in which everything held but what is changed."""
    parts = {
        SCENARIOS: judge_scenarios(NAMES, {name: [ran(Verdict.HELD)] for name in NAMES}, {}),
        DETECTION: judge_detection(
            NAMES, dict.fromkeys(NAMES, THREE_AT_START), dict.fromkeys(NAMES, THREE_AT_START), {}
        ),
        RECOVERY: judge_recovery({"a": OLD}, {"a": OLD}, {}),
        LATENCY: judge_latency(NOT_SLOWER, ""),
        **changed,
    }
    return Qualification(candidate="c-2", baseline="c-1", parts=tuple(parts.values()), sources={}, notes=())


def test_everything_there_and_no_worse_is_held() -> None:
    found = qualification()
    assert found.verdict is Verdict.HELD
    assert [part.ran for part in found.parts] == [2, 2, 2, 1]


@pytest.mark.parametrize(
    ("old", "new", "verdict", "said"),
    [
        ((Layer.STARTUP,) * 3, (Layer.STARTUP,) * 3, Verdict.HELD, "candidate startup, baseline startup"),
        ((Layer.CANARY,) * 3, (Layer.STARTUP,) * 3, Verdict.HELD, "noticed earlier"),
        ((Layer.STARTUP,) * 3, (Layer.CANARY,) * 3, Verdict.BROKEN, "noticed later: candidate canary"),
        ((Layer.STARTUP,) * 3, (Layer.STARTUP, Layer.NEVER), Verdict.BROKEN, "candidate never"),  # one start is enough
        ((Layer.STARTUP, Layer.CANARY, Layer.STARTUP), (Layer.CANARY,) * 3, Verdict.HELD, "baseline canary"),
        ((Layer.STARTUP,) * 2, (Layer.CANARY,) * 3, Verdict.UNKNOWN, "the baseline has 2 recorded starts"),
        ((), (Layer.STARTUP,) * 3, Verdict.UNKNOWN, "the baseline has 0 recorded starts"),
        ((Layer.STARTUP,) * 3, (Layer.STARTUP,) * 2, Verdict.UNKNOWN, "the candidate has 2 starts"),
        ((Layer.STARTUP,) * 3, (Layer.HARMLESS,) * 3, Verdict.UNKNOWN, "nobody noticed anything where startup"),
        ((Layer.HARMLESS,) * 3, (Layer.HARMLESS,) * 3, Verdict.HELD, "candidate harmless"),
        ((Layer.HARMLESS,) * 3, (Layer.STARTUP,) * 3, Verdict.BROKEN, "candidate startup, baseline harmless"),
    ],
)
def test_detection(old: tuple[Layer, ...], new: tuple[Layer, ...], verdict: Verdict, said: str) -> None:
    baseline = {"widened": starts(*old)} if old else {}
    part = judge_detection(["widened"], baseline, {"widened": starts(*new)}, {})
    assert part.verdict is verdict
    assert said in part.findings[0].because


def test_a_fault_that_the_candidate_was_not_started_on_is_missing_with_the_reason() -> None:
    part = judge_detection(
        NAMES, dict.fromkeys(NAMES, THREE_AT_START), {"widened": THREE_AT_START}, {"missing": "no GPU"}
    )
    assert part.verdict is Verdict.UNKNOWN
    assert (part.required, part.ran) == (2, 1)
    assert [(each.name, each.because) for each in part.missing] == [("missing", "no GPU")]
    assert qualification(detection=part).verdict is Verdict.UNKNOWN


@pytest.mark.parametrize(
    ("runs", "verdict"),
    [
        ((Verdict.HELD,), Verdict.HELD),
        ((Verdict.HELD, Verdict.BROKEN), Verdict.BROKEN),
        ((Verdict.UNKNOWN, Verdict.HELD), Verdict.HELD),
        ((Verdict.UNKNOWN,), Verdict.UNKNOWN),
    ],
)
def test_guarded_scenarios(runs: tuple[Verdict, ...], verdict: Verdict) -> None:
    part = judge_scenarios(["widened"], {"widened": [ran(each) for each in runs]}, {})
    assert part.verdict is verdict
    assert qualification(scenarios=part).verdict is verdict


def test_a_scenario_that_was_not_run_is_never_a_pass() -> None:
    part = judge_scenarios(NAMES, {"widened": [ran(Verdict.HELD)]}, {})
    assert part.verdict is Verdict.UNKNOWN
    assert part.missing[0].because == "it was not run"
    assert judge_scenarios((), {}, {}).verdict is Verdict.UNKNOWN


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        (OLD, OLD, Verdict.HELD),
        (OLD, tuple(2 * time for time in OLD), Verdict.BROKEN),
        (OLD[:3], OLD[:3], Verdict.UNKNOWN),
        ((), OLD, Verdict.UNKNOWN),
    ],
)
def test_recovery(old: tuple[float, ...], new: tuple[float, ...], verdict: Verdict) -> None:
    part = judge_recovery({"a": old}, {"a": new}, {"baseline": "it is only recorded"})
    assert part.verdict is verdict
    assert qualification(recovery=part).verdict is verdict
    if not old:
        assert part.missing[0].because == "it is only recorded"


def test_recoveries_that_were_given_up_on_are_neither_missing_nor_a_pass() -> None:
    part = judge_recovery({"a": OLD}, {}, {}, candidate_beyond={"a": (1.0,) * 5})
    assert (part.missing, part.verdict) == ((), Verdict.UNKNOWN)
    assert "5 of the candidate were not watched to their end" in part.because


@pytest.mark.parametrize("verdict", list(Verdict))
def test_latency(verdict: Verdict) -> None:
    part = judge_latency(Finding(claim="latency", verdict=verdict, because="slower: perhaps"), "")
    assert qualification(latency=part).verdict is verdict


def test_no_comparison_is_unknown_unless_none_is_required() -> None:
    part = judge_latency(None, "there is no image")
    assert qualification(latency=part).verdict is Verdict.UNKNOWN
    assert "such as paired comparison" in qualification(latency=part).because
    assert qualification(latency=judge_latency(None, "", is_required=False)).verdict is Verdict.HELD


def test_what_is_not_required_and_broken_is_still_broken() -> None:
    part = judge_scenarios(["widened"], {"widened": [ran(Verdict.BROKEN)]}, {}, is_required=False)
    assert qualification(scenarios=part).verdict is Verdict.BROKEN


def test_nothing_required_is_unknown() -> None:
    nothing = judge_latency(NOT_SLOWER, "", is_required=False)
    assert Qualification(candidate="c", baseline="b", parts=(nothing,), sources={}).verdict is Verdict.UNKNOWN


def test_json_says_what_was_required_what_ran_and_what_could_not() -> None:
    part = judge_detection(NAMES, {}, {}, {"missing": "no GPU"})
    stored = json.loads(json.dumps(qualification(detection=part).as_json()))
    assert stored["verdict"] == "unknown"
    coverage = stored["parts"][1]["coverage"]
    assert (coverage["is_required"], coverage["required"], coverage["ran"]) == (True, 2, 0)
    assert coverage["missing"][1] == {"name": "missing", "because": "no GPU"}


def test_a_part_with_one_finding_says_what_it_is() -> None:
    finding = Finding(claim="all scenarios together", verdict=Verdict.HELD, because="1.02 times as long")
    part = Part(name="recovery", is_required=True, required=2, findings=(finding,), missing=())
    assert part.because == "all scenarios together: 1.02 times as long"
    assert replace(part, findings=(finding, finding)).because == "all 2 held"
