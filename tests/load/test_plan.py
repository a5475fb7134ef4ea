"""The same seed gives the same plan, byte for byte, and nothing impossible is planned."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import harness.load
from harness.errors import HarnessError, ScenarioInvalid
from harness.load.arrivals import Rate
from harness.load.capacity import FIXED
from harness.load.loaders import choose_loaders, require_keepable
from harness.load.plan import FIRST_ORDINARY_TOKEN, LoadPlan, make_plan
from harness.load.shape import (
    NONCE_TOKENS,
    LoadShape,
    RequestLimits,
    constant,
    gamma,
    poisson,
    ramp,
    spike,
    steady,
    trace,
)

CANARIES = ((3, 4, 5), (6, 7, 8))
VOCABULARY = 64


def plan_for(shape: LoadShape, seed: int = 1, horizon_s: float = 60.0, **options: int) -> LoadPlan:
    return make_plan(
        shape, seed=seed, horizon_s=horizon_s, vocabulary_size=VOCABULARY, canary_prompts=CANARIES, **options
    )


def load_times(plan: LoadPlan) -> list[float]:
    return [arrival.at_s for arrival in plan.arrivals if arrival.kind == "load"]


def variation(times: list[float]) -> float:
    """Return the spread of the gaps over their mean: 1 for Poisson arrivals."""
    gaps = [later - earlier for earlier, later in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    return math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) / mean


def recorded(tmp_path: Path) -> LoadShape:
    path = tmp_path / "trace.jsonl"
    rows = [{"at_s": 0.0}, {"at_s": 0.5, "prompt_tokens": 30, "output_tokens": 7}, {"at_s": 0.5}, {"at_s": 4.0}]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return trace(path)


def shapes(tmp_path: Path) -> dict[str, LoadShape]:
    return {
        "steady": steady(rate_rps=5.0),
        "poisson": poisson(rate_rps=5.0),
        "constant": constant(rate_rps=5.0, keep_alive_ratio=0.3),
        "gamma": gamma(rate_rps=5.0, burstiness=0.4),
        "ramp": ramp([(0, 0), (20, 10.0)]),
        "spike": spike(rate_rps=2.0, peak_rps=20.0, at_s=10.0, for_s=5.0),
        "trace": recorded(tmp_path),
    }


@pytest.mark.parametrize("name", ["steady", "poisson", "constant", "gamma", "ramp", "spike", "trace"])
def test_the_same_seed_gives_the_same_bytes_and_survives_the_disk(tmp_path: Path, name: str) -> None:
    shape = shapes(tmp_path)[name]
    for copy in ("a", "b"):
        plan_for(shape).save(tmp_path / copy)
    plan_for(shape, seed=2).save(tmp_path / "other")

    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert (tmp_path / "a").read_bytes() != (tmp_path / "other").read_bytes()
    assert LoadPlan.load(tmp_path / "a") == plan_for(shape)
    assert getattr(harness.load, name)


def test_a_known_seed_gives_a_known_plan() -> None:
    # Fails when the way plans are made changes: stored baselines were made with other arrivals then.
    plan = plan_for(steady(rate_rps=2.0), seed=7, horizon_s=4.0)

    assert plan.sha256 == "d328967bc7b8d0b868d5983d528115d9fafca725bc7bcd1ce7787eb033a178c3"


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

    assert abs(len(load) - 4000) < 4 * math.sqrt(4000)
    assert variation(load) == pytest.approx(1.0, abs=0.1)
    assert canaries == [pytest.approx(number * 0.2) for number in range(1000)]
    assert [arrival.at_s for arrival in plan.arrivals] == sorted(arrival.at_s for arrival in plan.arrivals)


@pytest.mark.parametrize(("burstiness", "expected"), [(0.25, 2.0), (1.0, 1.0), (16.0, 0.25)])
def test_gamma_arrivals_vary_as_their_shape_says(burstiness: float, expected: float) -> None:
    times = load_times(plan_for(gamma(rate_rps=20.0, burstiness=burstiness, canary_ratio=0.0), horizon_s=300.0))

    assert variation(times) == pytest.approx(expected, rel=0.15)
    assert len(times) == pytest.approx(6000, rel=0.12)


def test_constant_arrivals_are_evenly_spaced() -> None:
    times = load_times(plan_for(constant(rate_rps=4.0), horizon_s=10.0))

    assert times == [pytest.approx(0.125 + number / 4) for number in range(40)]


def test_a_ramp_follows_its_rate() -> None:
    times = load_times(plan_for(ramp([(0, 0), (100, 40.0), (200, 40.0), (200, 10.0)]), horizon_s=300.0))
    counts = [sum(start <= at_s < start + 50 for at_s in times) for start in range(0, 300, 50)]

    for seen, expected in zip(counts, [500, 1500, 2000, 2000, 500, 500], strict=True):
        assert abs(seen - expected) < 4 * math.sqrt(expected), counts


def test_a_spike_is_where_it_was_put() -> None:
    shape = spike(rate_rps=5.0, peak_rps=50.0, at_s=20.0, for_s=10.0)
    times = load_times(plan_for(shape))
    inside = sum(20 <= at_s < 30 for at_s in times)

    assert abs(inside - 500) < 4 * math.sqrt(500)
    assert abs(len(times) - inside - 250) < 4 * math.sqrt(250)
    assert shape.peak_rps == 50.0
    assert shape.in_flight_limit == math.ceil(1.2 * (50.0 + 1.25) * 30.0)


RATES = st.lists(st.tuples(st.floats(0.1, 20), st.floats(0.0, 3.0)), min_size=1, max_size=5)


@settings(deadline=None)
@given(steps=RATES, at_s=st.floats(0, 100))
@example(steps=[(1.5, 0.0), (1.0, 2.4e-299)], at_s=2.0)
def test_when_undoes_until(steps: list[tuple[float, float]], at_s: float) -> None:
    times = list(accumulate(gap for gap, _ in steps))
    rate = Rate(4.0, tuple(zip(times, (share for _, share in steps), strict=True)))
    expected = rate.until(at_s)

    assert rate.until(rate.when(expected)) == pytest.approx(expected, abs=1e-6)
    assert rate.when(expected) <= at_s + 1e-6 or expected == pytest.approx(rate.until(rate.when(expected)))


@pytest.mark.parametrize(
    "shape",
    [steady(rate_rps=7.0), constant(rate_rps=7.0), gamma(rate_rps=7.0, burstiness=0.3), ramp([(0, 1.0), (60, 9.0)])],
)
def test_exactly_so_many_arrive(shape: LoadShape) -> None:
    for seed in range(5):
        times = load_times(plan_for(shape, seed=seed, exactly=300))

        assert len(times) == 300
        assert times == sorted(times)
        assert times[0] >= 0
        assert times[-1] < 60


def test_a_longer_horizon_continues_the_same_plan() -> None:
    short, long = plan_for(steady(rate_rps=5.0), horizon_s=20.0), plan_for(steady(rate_rps=5.0), horizon_s=60.0)

    assert long.arrivals[: len(short.arrivals)] == short.arrivals


def test_blocks_share_everything_but_their_nonces() -> None:
    first, second = (plan_for(steady(rate_rps=20.0), block=block) for block in (0, 1))
    prompts = [[a.prompt for a in plan.arrivals if a.kind == "load"] for plan in (first, second)]

    assert first.schedule_sha256 == second.schedule_sha256
    assert first.sha256 != second.sha256
    assert [p[NONCE_TOKENS:] for p in prompts[0]] == [p[NONCE_TOKENS:] for p in prompts[1]]
    assert not {p[:NONCE_TOKENS] for p in prompts[0]} & {p[:NONCE_TOKENS] for p in prompts[1]}
    assert plan_for(steady(rate_rps=20.0), seed=2).schedule_sha256 != first.schedule_sha256
    assert plan_for(steady(rate_rps=20.0, output_tokens=17)).schedule_sha256 != first.schedule_sha256


def test_a_trace_arrives_when_it_was_recorded_and_as_long(tmp_path: Path) -> None:
    plan = plan_for(recorded(tmp_path))
    load = [arrival for arrival in plan.arrivals if arrival.kind == "load"]

    assert [(a.at_s, len(a.prompt), a.max_tokens) for a in load] == [
        (0.0, 24, 16),
        (0.5, 30, 7),
        (0.5, 24, 16),
        (4.0, 24, 16),
    ]
    assert plan.shape.rate_rps == pytest.approx(0.75)
    assert [a.at_s for a in plan_for(plan.shape.at_rate(1.5)).arrivals if a.kind == "load"] == [0.0, 0.25, 0.25, 2.0]


def test_another_rate_stretches_what_has_times() -> None:
    changed = spike(rate_rps=2.0, peak_rps=6.0, at_s=10.0, for_s=5.0, tail_s=4.0).at_rate(4.0)

    assert changed.profile == ((5.0, 1.0), (5.0, 3.0), (7.5, 3.0), (7.5, 1.0))
    assert (changed.rate_rps, changed.peak_rps, changed.tail_s) == (4.0, 12.0, 2.0)


def test_a_share_of_the_requests_keeps_its_connection() -> None:
    load = [a for a in plan_for(steady(rate_rps=10.0, keep_alive_ratio=0.25)).arrivals if a.kind == "load"]

    assert sum(arrival.keep_alive for arrival in load) == len(load) // 4
    assert [arrival.keep_alive for arrival in load[:8]] == [False, False, False, True] * 2
    assert not any(a.keep_alive for a in plan_for(steady(rate_rps=10.0)).arrivals)


def test_shards_are_the_whole_plan_and_nothing_twice() -> None:
    plan = plan_for(steady(rate_rps=10.0))
    shards = [plan.shard(loader, 3) for loader in range(3)]

    assert sorted((a for shard in shards for a in shard), key=lambda a: (a.at_s, a.id)) == list(plan.arrivals)
    assert sum(plan.due(0, 10**10, loader=loader, loaders=3) for loader in range(3)) == plan.due(0, 10**10)
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


@pytest.mark.parametrize(
    ("shape", "cores", "loaders"),
    [
        (constant(rate_rps=10.0), 4, 1),
        (constant(rate_rps=100.0, output_tokens=120), 4, 3),
        (constant(rate_rps=900.0, output_tokens=1, canary_ratio=0.0), 4, 2),
        (constant(rate_rps=10.0, loaders=3), 1, 3),
        (constant(rate_rps=60.0, output_tokens=50), 0, 1),
    ],
)
def test_as_many_loaders_as_the_plan_needs(shape: LoadShape, cores: int, loaders: int) -> None:
    assert choose_loaders(plan_for(shape), cores=cores, capacity=FIXED) == loaders
    require_keepable(shape, seed=1, horizon_s=60.0, cores=cores, capacity=FIXED)


@pytest.mark.parametrize(
    ("shape", "cores"),
    [
        (constant(rate_rps=110.0, output_tokens=50), 1),
        (constant(rate_rps=900.0, output_tokens=1), 1),
        (constant(rate_rps=220.0, output_tokens=50, loaders=2), 8),
        (spike(rate_rps=10.0, peak_rps=120.0, at_s=10.0, for_s=20.0, output_tokens=50), 1),
    ],
)
def test_a_plan_that_cannot_be_kept_is_refused_by_name(shape: LoadShape, cores: int) -> None:
    with pytest.raises(ScenarioInvalid, match=r"the plan cannot be kept: rate_rps = .* events per second"):
        choose_loaders(plan_for(shape), cores=cores, capacity=FIXED)
    with pytest.raises(ScenarioInvalid, match=r"the plan cannot be kept: rate_rps = .* events per second"):
        require_keepable(shape, seed=1, horizon_s=60.0, cores=cores, capacity=FIXED)


def test_canaries_do_not_move_the_load() -> None:
    def load_of(plan: LoadPlan) -> list[object]:
        return [arrival for arrival in plan.arrivals if arrival.kind == "load"]

    assert load_of(plan_for(steady(rate_rps=5.0))) == load_of(plan_for(steady(rate_rps=5.0, canary_ratio=0.0)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ramp([]), "zero arrivals: no point"),
        (lambda: ramp([(0, 0.0), (10, 0.0)]), "zero arrivals: no point"),
        (lambda: ramp([(10, 1.0), (5, 2.0)]), "profile times decrease: 5 s comes after 10 s"),
        (lambda: ramp([(0, 1.0), (5, -2.0)]), r"points\[1\] rate is -2.0"),
        (lambda: spike(rate_rps=1.0, peak_rps=-5.0, at_s=1.0, for_s=1.0), "peak_rps is -5.0"),
        (lambda: spike(rate_rps=1.0, peak_rps=5.0, at_s=1.0, for_s=0.0), "for_s is 0.0"),
        (lambda: gamma(rate_rps=1.0, burstiness=0.0), "burstiness is 0.0"),
        (lambda: steady(rate_rps=1e9), "rate_rps is 1000000000.0: it must be at most 100,000"),
        (lambda: steady(rate_rps=1.0, keep_alive_ratio=1.5), "keep_alive_ratio is 1.5"),
        (lambda: steady(rate_rps=1.0, loaders=0), "loaders is 0"),
        (lambda: steady(rate_rps=1.0, late_s=0.0), "late_s is 0.0"),
        (lambda: LoadShape(rate_rps=1.0, process="burst"), 'process is "burst"'),
        (lambda: LoadShape(rate_rps=1.0, process="trace"), "0 rows of a trace"),
        (lambda: plan_for(steady(rate_rps=50_000.0)), "rate_rps = 50000 for horizon_s = 60 s means 3,750,000 arrivals"),
        (lambda: plan_for(steady(rate_rps=1.0), exactly=0), "exactly 0 arrivals"),
        (lambda: plan_for(steady(rate_rps=1.0), block=-1), "block is -1"),
        (lambda: plan_for(ramp([(100, 0.0), (101, 5.0)])), "zero arrivals: no request arrives within horizon_s = 60"),
    ],
)
def test_what_cannot_be_a_load_is_refused_by_name(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ScenarioInvalid, match=message):
        make()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.jsonl", '{"at_s": 1}\n{"at_s": 0.5}', "line 2: times decrease, 0.5 s comes after 1 s"),
        ("t.csv", "at_s,prompt_tokens\n1,5\n0.5,5", "line 3: times decrease"),
        ("t.jsonl", "", "has zero arrivals"),
        ("t.csv", "at_s\n", "has zero arrivals"),
        ("t.jsonl", '{"at_s": -1}', 'line 1: "at_s" is -1, before the start'),
        ("t.jsonl", '{"at_s": NaN}', 'line 1: "at_s" is nan, it must be a number'),
        ("t.jsonl", '{"at_s": true}', 'line 1: "at_s" is True'),
        ("t.jsonl", '{"when": 1}', 'line 1: no "at_s" and no "timestamp", only when'),
        ("t.jsonl", '{"at_s": 1, "output_tokens": 0}', 'line 1: "output_tokens" is 0'),
        ("t.jsonl", '{"at_s": 1, "prompt_tokens": 1.5}', 'line 1: "prompt_tokens" is 1.5'),
        ("t.jsonl", "[1]", "line 1 is not a JSON object"),
        ("t.jsonl", "{", "line 1 is not JSON"),
        ("t.csv", "at_s\nsoon", "\"at_s\" is 'soon'"),
    ],
)
def test_a_bad_trace_is_refused_by_its_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)

    with pytest.raises(ScenarioInvalid, match=message):
        trace(tmp_path / name)


def test_a_trace_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ScenarioInvalid, match=r"none\.csv.* cannot be read"):
        trace(tmp_path / "none.csv")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("t.csv", "at_s,prompt_tokens,output_tokens\n10,30,7\n10.5,,\n"),
        (
            "t.jsonl",
            '{"timestamp": 10000, "input_length": 30, "output_length": 7, "hash_ids": [1]}\n\n{"timestamp": 10500}',
        ),
    ],
)
def test_traces_are_read_in_either_form(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    rows = trace(tmp_path / name).trace

    assert [(row.at_s, row.prompt_tokens, row.output_tokens) for row in rows] == [(0.0, 30, 7), (0.5, None, None)]


def test_no_two_prompts_begin_alike() -> None:
    plan = plan_for(steady(rate_rps=50.0, prompt_tokens=9))
    prompts = [arrival.prompt for arrival in plan.arrivals if arrival.kind == "load"]

    assert len({prompt[:NONCE_TOKENS] for prompt in prompts}) == len(prompts) > 1000
    assert {len(prompt) for prompt in prompts} == {9}
    assert {token for prompt in prompts for token in prompt} == set(range(FIRST_ORDINARY_TOKEN, VOCABULARY))


def test_prompts_share_their_beginnings_where_that_is_asked_for() -> None:
    shape = steady(rate_rps=50.0, prompt_tokens=20, shared_tokens=12, shared_prompts=3)
    prompts = [arrival.prompt for arrival in plan_for(shape).arrivals if arrival.kind == "load"]
    beginnings = [prompt[:12] for prompt in prompts]

    assert len(set(beginnings)) == 3
    assert beginnings == [beginnings[number % 3] for number in range(len(beginnings))]
    assert len({prompt[12 : 12 + NONCE_TOKENS] for prompt in prompts}) == len(prompts) > 1000
    assert {len(prompt) for prompt in prompts} == {20}


def test_blocks_share_a_schedule_with_shared_beginnings_too() -> None:
    shape = steady(rate_rps=5.0, prompt_tokens=20, shared_tokens=12)
    one, other = plan_for(shape, block=0), plan_for(shape, block=1)

    assert one.schedule_sha256 == other.schedule_sha256
    assert one.sha256 != other.sha256
    assert one.schedule_sha256 != plan_for(replace(shape, shared_tokens=11)).schedule_sha256


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
        ("shared_tokens", -1),
        ("shared_prompts", 0),
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
