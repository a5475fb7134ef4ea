"""The same seed gives the same plan, byte for byte, and nothing impossible is planned."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import harness.load
from harness.errors import HarnessError, ScenarioInvalid
from harness.load.plan import FIRST_ORDINARY_TOKEN, NONCE_TOKENS, LoadPlan, LoadShape, RequestLimits, make_plan, steady

CANARIES = ((3, 4, 5), (6, 7, 8))
VOCABULARY = 64


def plan_for(shape: LoadShape, seed: int = 1, horizon_s: float = 60.0) -> LoadPlan:
    return make_plan(shape, seed=seed, horizon_s=horizon_s, vocabulary_size=VOCABULARY, canary_prompts=CANARIES)


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        plan_for(steady(rate_rps=5.0)).save(tmp_path / name)
    plan_for(steady(rate_rps=5.0), seed=2).save(tmp_path / "other")

    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert (tmp_path / "a").read_bytes() != (tmp_path / "other").read_bytes()


def test_a_known_seed_gives_a_known_plan() -> None:
    # Fails when the way plans are made changes: stored baselines were made with other arrivals then.
    plan = plan_for(steady(rate_rps=2.0), seed=7, horizon_s=4.0)

    assert plan.sha256 == "38f6387d64a2f8a649715ae3d317d678dae9fba41d59d9ed50637cc4502fff8a"


def test_a_plan_survives_the_disk(tmp_path: Path) -> None:
    plan = plan_for(steady(rate_rps=5.0, limits=RequestLimits(total_s=7.0), in_flight_max=3))
    plan.save(tmp_path / "plan.json")

    assert LoadPlan.load(tmp_path / "plan.json") == plan


def test_a_changed_plan_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan_for(steady(rate_rps=5.0)).save(path)
    fields = json.loads(path.read_text())
    fields["arrivals"][3]["at_s"] += 0.5
    path.write_text(json.dumps(fields))

    with pytest.raises(HarnessError, match="was changed"):
        LoadPlan.load(path)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"seed": 1, "shape": {"rate_rps": 0}}'])
def test_what_is_no_plan_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)

    with pytest.raises(HarnessError, match="is not a load plan"):
        LoadPlan.load(tmp_path / "plan.json")


def test_load_is_poisson_and_canaries_are_evenly_spaced() -> None:
    plan = plan_for(steady(rate_rps=20.0, canary_ratio=0.25), horizon_s=200.0)
    load = [arrival.at_s for arrival in plan.arrivals if arrival.kind == "load"]
    canaries = [arrival.at_s for arrival in plan.arrivals if arrival.kind == "canary"]
    gaps = [later - earlier for earlier, later in pairwise(load)]
    mean = sum(gaps) / len(gaps)
    spread = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))

    assert abs(len(load) - 4000) < 4 * math.sqrt(4000)
    assert spread / mean == pytest.approx(1.0, abs=0.1)  # of an exponential distribution it is 1
    assert canaries == [pytest.approx(number * 0.2) for number in range(1000)]
    assert [arrival.at_s for arrival in plan.arrivals] == sorted(arrival.at_s for arrival in plan.arrivals)


def test_canaries_do_not_move_the_load() -> None:
    def load_of(plan: LoadPlan) -> list[object]:
        return [arrival for arrival in plan.arrivals if arrival.kind == "load"]

    assert load_of(plan_for(steady(rate_rps=5.0))) == load_of(plan_for(steady(rate_rps=5.0, canary_ratio=0.0)))


def test_no_two_prompts_begin_alike() -> None:
    plan = plan_for(steady(rate_rps=50.0, prompt_tokens=9))
    prompts = [arrival.prompt for arrival in plan.arrivals if arrival.kind == "load"]

    assert len({prompt[:NONCE_TOKENS] for prompt in prompts}) == len(prompts) > 1000
    assert {len(prompt) for prompt in prompts} == {9}
    assert {token for prompt in prompts for token in prompt} == set(range(FIRST_ORDINARY_TOKEN, VOCABULARY))


PLAN = plan_for(steady(rate_rps=5.0))


@settings(deadline=None)
@given(until_s=st.floats(0, 60))
def test_due_counts_what_is_planned_until_then(until_s: float) -> None:
    plan, until_ns = PLAN, round(until_s * 1e9)

    assert plan.due(1000, 1000 + until_ns) == sum(round(arrival.at_s * 1e9) <= until_ns for arrival in plan.arrivals)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rate_rps", 0.0),
        ("rate_rps", -1.0),
        ("rate_rps", math.nan),
        ("rate_rps", math.inf),
        ("canary_ratio", -0.1),
        ("tail_s", -1.0),
        ("output_tokens", 0),
        ("prompt_tokens", 3),
        ("in_flight_max", 0),
    ],
)
def test_an_impossible_shape_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ScenarioInvalid, match=f"{name} is {value!r}"):
        LoadShape(**{"rate_rps": 1.0, name: value})


@pytest.mark.parametrize("name", ["connect_s", "first_token_s", "gap_s", "total_s"])
def test_a_limit_of_nothing_is_refused_by_name(name: str) -> None:
    with pytest.raises(ScenarioInvalid, match=rf"limits.{name} is 0: it must be a number of s above zero"):
        RequestLimits(**{name: 0})


def test_a_plan_without_arrivals_is_refused() -> None:
    with pytest.raises(ScenarioInvalid, match=r"no request arrives within horizon_s = 0\.001 s"):
        plan_for(steady(rate_rps=0.5), horizon_s=0.001)


def test_canaries_without_prompts_are_refused() -> None:
    with pytest.raises(ScenarioInvalid, match="no canary prompts"):
        make_plan(steady(rate_rps=1.0), seed=1, horizon_s=60.0, vocabulary_size=64, canary_prompts=())


def test_a_vocabulary_too_small_for_the_nonce_is_refused() -> None:
    with pytest.raises(ScenarioInvalid, match="vocabulary_size is 5"):
        make_plan(steady(rate_rps=9.0), seed=1, horizon_s=60.0, vocabulary_size=5, canary_prompts=CANARIES)


def test_the_in_flight_limit_covers_requests_that_take_their_whole_time() -> None:
    shape = steady(rate_rps=10.0, canary_ratio=0.5, limits=RequestLimits(total_s=20.0))

    assert shape.in_flight_limit == 360
    assert harness.load.steady is steady
