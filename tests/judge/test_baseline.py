"""Accepted blocks are found by what decides an engine's speed, and refused when any of it differs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.errors import UsageError
from harness.judge.baseline import accept, changes, find, load
from harness.judge.blocks import KEY_FIELDS, Arm, load_blocks, load_declaration
from tests.judge.measured import declaration
from tests.judge.stored import store_comparison

KEY = dict(declaration().arms[1].key)


def test_accepted_blocks_are_found_by_their_key(tmp_path: Path) -> None:
    store_comparison(tmp_path / "run", factor=1.0, pairs=4)
    place = accept(tmp_path / "run", tmp_path / "kept", arm="new")
    found = find(tmp_path / "kept", KEY)
    assert found.directory == place
    assert (found.run, found.arm, len(found.blocks)) == ("made-up", "new", 4)
    assert {block.arm for block in found.blocks} == {"new"}
    assert [path.name for path in (tmp_path / "kept").iterdir()] == [place.name]
    declared = load_declaration(tmp_path / "run")
    seen = {c.metric: c for c in changes(found, load_blocks(tmp_path / "run", declared))}
    assert seen["ttft_ms_p50"].ratio == pytest.approx(1.0, rel=0.05)


def test_accepting_again_replaces(tmp_path: Path) -> None:
    for pairs in (4, 6):
        store_comparison(tmp_path / str(pairs), factor=1.0, pairs=pairs)
        place = accept(tmp_path / str(pairs), tmp_path / "kept", arm="old")
    assert len(load(place).blocks) == 6
    assert [path.name for path in (tmp_path / "kept").iterdir()] == [place.name]


@pytest.mark.parametrize("name", KEY_FIELDS)
def test_other_key_is_refused_with_what_differs(tmp_path: Path, name: str) -> None:
    store_comparison(tmp_path / "run", factor=1.0, pairs=4)
    accept(tmp_path / "run", tmp_path / "kept", arm="new")
    with pytest.raises(UsageError, match=f'differs in {name}: "this {name}" there, "other" here$'):
        find(tmp_path / "kept", {**KEY, name: "other"})


def test_nearest_of_several_is_named(tmp_path: Path) -> None:
    for model in ("one", "two"):
        key = {**KEY, "model": model, "driver": model}
        arms = tuple(Arm(name=arm, key=key) for arm in ("old", "new"))
        store_comparison(tmp_path / model, factor=1.0, pairs=4, arms=arms)
        accept(tmp_path / model, tmp_path / "kept", arm="new")
    with pytest.raises(UsageError, match='differs in model: "two" there, "three" here'):
        find(tmp_path / "kept", {**KEY, "model": "three", "driver": "two"})


@pytest.mark.parametrize(
    ("factor", "pairs", "arm", "said"),
    [
        (1.3, 4, "new", "cannot be a baseline: slower is yes"),
        (1.0, 2, "new", "cannot be a baseline: slower is invalid"),
        (1.0, 4, "third", 'has no arm "third"; arms: old, new, null'),
    ],
)
def test_what_may_not_be_a_baseline_is_refused(tmp_path: Path, factor: float, pairs: int, arm: str, said: str) -> None:
    store_comparison(tmp_path / "run", factor=factor, pairs=pairs)
    with pytest.raises(UsageError, match=said):
        accept(tmp_path / "run", tmp_path / "kept", arm=arm)
    assert not (tmp_path / "kept").exists()


def test_old_arm_of_a_regression_may_be_one(tmp_path: Path) -> None:
    store_comparison(tmp_path / "run", factor=1.3, pairs=4)
    assert load(accept(tmp_path / "run", tmp_path / "kept", arm="old")).arm == "old"


def test_no_baseline_at_all_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="make one: harness baseline accept RUN"):
        find(tmp_path, KEY)


@pytest.mark.parametrize("content", ["{", "[]", json.dumps({"key": {}})])
def test_directory_that_is_none_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "baseline.json").write_text(content)
    with pytest.raises(UsageError, match='kept" is not a baseline'):
        load(tmp_path / "kept")
    with pytest.raises(UsageError, match="there is no baseline in"):
        find(tmp_path, KEY)


@pytest.mark.parametrize(
    ("pairs", "spread", "gating"),
    [
        (16, 0.1, ("ttft_ms_p50", "tpot_ms_p50", "ttft_ms_p95", "e2e_ms_p95")),
        (16, 0.6, ("ttft_ms_p50", "tpot_ms_p50")),
        (4, 0.1, ("ttft_ms_p50", "tpot_ms_p50")),  # too few blocks to know
    ],
)
def test_p95_decides_only_where_it_is_known_to_be_steady(
    tmp_path: Path, pairs: int, spread: float, gating: tuple[str, ...]
) -> None:
    declared: dict[str, Any] = {"failure_budget": 0.5}
    store_comparison(tmp_path / "run", factor=1.0, pairs=pairs, requests=400, spread=spread, **declared)
    assert load(accept(tmp_path / "run", tmp_path / "kept", arm="old")).gating() == gating


def test_a_baseline_that_took_no_time_is_named(tmp_path: Path) -> None:
    store_comparison(tmp_path / "run", factor=1.0, pairs=4)
    kept = load(accept(tmp_path / "run", tmp_path / "kept", arm="new"))
    stopped = tuple(replace(block, values={**block.values, "tpot_ms_p50": 0.0}) for block in kept.blocks)
    for blocks, said in ((stopped, "has 0 ms as tpot_ms_p50, so nothing can be compared"), ((), "has no blocks")):
        with pytest.raises(UsageError, match=said):
            changes(replace(kept, blocks=blocks), kept.blocks)
    assert all(change.ratio == 1 for change in changes(kept, kept.blocks))
