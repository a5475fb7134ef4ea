from __future__ import annotations

import hashlib
import json
from pathlib import Path
from random import Random

import pytest
from damage_cases import Pair
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from harness import faults
from harness.checkpoint.copy import private_copy
from harness.checkpoint.digest import weights_id
from harness.checkpoint.manifest import find_defects, read_shard
from harness.errors import FaultNotApplicable
from harness.faults import Damage, Injected
from harness.faults.target import Target

INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def inject(damage: Damage, target: Path, pair: Pair) -> Injected:
    return damage.damage(target, old=pair.old, random=Random(3))


def library_opens(path: Path) -> bool:
    try:
        with safe_open(path, framework="np") as shard:
            return bool(list(shard.keys()))
    except SafetensorError:
        return False


@settings(deadline=None)
@given(data=st.data())
def test_truncation_at_any_byte_is_proved_and_refused_by_the_library(data: st.DataObject, pair: Pair) -> None:
    size = (pair.new / FIRST).stat().st_size
    cut = data.draw(st.integers(1, size) | st.integers(size - 200, size))
    with pair.copy() as target:
        injected = inject(faults.truncate_shard(FIRST, cut_bytes=cut), target, pair)

        assert injected.proved, injected.because
        assert injected.after["size_bytes"] == size - cut
        assert not library_opens(target / FIRST)
        assert FIRST in {defect.path.name for defect in find_defects(target)}


def test_truncation_of_more_than_the_file_is_refused(pair: Pair, target: Path) -> None:
    with pytest.raises(FaultNotApplicable, match="cannot keep"):
        inject(faults.truncate_shard(FIRST, cut_bytes=10**9), target, pair)


@settings(deadline=None)
@given(keep_ratio=st.floats(0, 1, exclude_max=True))
def test_a_zero_tail_is_silent_or_not_applicable(keep_ratio: float, pair: Pair) -> None:
    size = (pair.new / FIRST).stat().st_size
    with pair.copy() as target:
        if int(size * keep_ratio) < read_shard(target / FIRST).data_start_byte:
            with pytest.raises(FaultNotApplicable, match="would zero the header too"):
                inject(faults.zero_tail(FIRST, keep_ratio=keep_ratio), target, pair)
            return
        injected = inject(faults.zero_tail(FIRST, keep_ratio=keep_ratio), target, pair)
        content = (target / FIRST).read_bytes()
        begin = int(size * keep_ratio)
        assert content[:begin] == (pair.new / FIRST).read_bytes()[:begin]
        assert content[begin:] == bytes(size - begin)
        assert library_opens(target / FIRST)
        assert find_defects(target) == ()
        assert injected.proved == (content != (pair.new / FIRST).read_bytes()), injected.because


def test_a_tail_that_was_zero_already_is_not_proved(pair: Pair, target: Path) -> None:
    assert inject(faults.zero_tail(), target, pair).proved
    assert not inject(faults.zero_tail(), target, pair).proved


def test_a_missing_shard_is_still_named_in_the_weight_index(pair: Pair, target: Path) -> None:
    injected = inject(faults.missing_shard(), target, pair)

    assert injected.before["shard"] == SECOND
    assert SECOND in json.loads((target / INDEX).read_text())["weight_map"].values()
    assert "index_names_absent_shard" in {str(defect.reason) for defect in find_defects(target)}


def test_the_only_weight_file_can_be_missing(single: Pair, tmp_path: Path) -> None:
    target = private_copy(single.new, tmp_path / "target")

    assert inject(faults.missing_shard(), target, single).proved
    assert not list(target.glob("*.safetensors"))


@pytest.mark.parametrize("shard", [2, -3, "model.safetensors", "../config.json"])
def test_a_shard_that_is_not_there_is_refused(shard: int | str, pair: Pair, target: Path) -> None:
    with pytest.raises(FaultNotApplicable, match=rf"there are: \"{FIRST}\", \"{SECOND}\""):
        inject(faults.missing_shard(shard), target, pair)


def test_the_pointer_is_the_one_git_lfs_would_write(pair: Pair, target: Path) -> None:
    inject(faults.pointer_file(FIRST), target, pair)

    whole = (pair.new / FIRST).read_bytes()
    assert (target / FIRST).read_text().splitlines() == [
        "version https://git-lfs.github.com/spec/v1",
        f"oid sha256:{hashlib.sha256(whole).hexdigest()}",
        f"size {len(whole)}",
    ]
    assert "pointer_file" in {str(defect.reason) for defect in find_defects(target)}


def test_new_config_over_old_weights(pair: Pair, target: Path) -> None:
    injected = inject(faults.new_config_old_weights(), target, pair)

    assert weights_id(target) == weights_id(pair.old) != weights_id(pair.new)
    assert (target / "config.json").read_bytes() == (pair.new / "config.json").read_bytes()
    assert injected.after["config_differs_from_old"] is True


def test_new_config_over_old_weights_says_when_the_configs_are_the_same(single: Pair, tmp_path: Path) -> None:
    target = private_copy(single.new, tmp_path / "target")

    injected = inject(faults.new_config_old_weights(), target, single)

    assert injected.proved
    assert injected.after["config_differs_from_old"] is False


def test_old_weights_that_are_the_new_ones_are_not_proved(pair: Pair, target: Path) -> None:
    same = Pair(old=pair.new, new=pair.new)

    assert not inject(faults.new_config_old_weights(), target, same).proved
    assert not inject(faults.stale_index(), target, same).proved
    assert not inject(faults.old_config_new_weights(), target, same).proved


def test_old_config_over_new_weights(pair: Pair, target: Path) -> None:
    injected = inject(faults.old_config_new_weights(), target, pair)

    assert (target / "config.json").read_bytes() == (pair.old / "config.json").read_bytes()
    assert weights_id(target) == weights_id(pair.new)
    assert injected.before["differing_keys"] == ["intermediate_size"]


def test_old_config_is_not_proved_where_the_configs_are_the_same(single: Pair, tmp_path: Path) -> None:
    target = private_copy(single.new, tmp_path / "target")

    injected = inject(faults.old_config_new_weights(), target, single)

    assert not injected.proved
    assert "differs from the new one's in nothing" in injected.because


def test_old_config_is_not_proved_where_the_weights_are_the_same(pair: Pair, target: Path, tmp_path: Path) -> None:
    old = private_copy(pair.new, tmp_path / "old")
    (old / "config.json").write_bytes((pair.old / "config.json").read_bytes())

    assert not inject(faults.old_config_new_weights(), target, Pair(old=old, new=pair.new)).proved


@pytest.mark.parametrize(("old_shards", "new_shards"), [(1, 1), (2, 1), (1, 2), (2, 2), (3, 2)])
def test_a_stale_index_makes_the_old_weights_win(
    old_shards: int, new_shards: int, built: object, tmp_path: Path
) -> None:
    pair = Pair(old=built(1, shards=old_shards), new=built(2, shards=new_shards))  # type: ignore[operator]
    target = private_copy(pair.new, tmp_path / "target")

    injected = inject(faults.stale_index(), target, pair)

    assert injected.proved, injected.because
    assert weights_id(target) == weights_id(pair.old)
    assert len(list(target.glob("*.safetensors"))) == old_shards + new_shards
    assert len(injected.after["new_weight_files"]) == new_shards


def test_a_stale_index_is_not_proved_when_the_old_shards_replaced_the_new(
    pair: Pair, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Target, "rename", lambda own, name, new_name: None)

    assert not inject(faults.stale_index(), target, pair).proved


def test_config_keys_are_changed_at_any_depth_and_nothing_else(pair: Pair, target: Path) -> None:
    before = json.loads((target / "config.json").read_text())
    before["rope_scaling"] = {"factor": 2.0, "rope_type": "linear"}
    (target / "config.json").write_text(json.dumps(before))

    damage = faults.mismatched_config(changes={"rope_scaling.factor": 8.0, "num_hidden_layers": 3})
    injected = inject(damage, target, pair)

    after = json.loads((target / "config.json").read_text())
    assert injected.proved
    assert {**injected.before, "config": ""} == {"rope_scaling.factor": 2.0, "num_hidden_layers": 2, "config": ""}
    assert after == {**before, "num_hidden_layers": 3, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}


def test_config_changes_of_which_one_was_lost_are_not_proved(
    pair: Pair, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Target.write
    monkeypatch.setattr(Target, "write", lambda own, name, data: write(own, name, data.replace(b": 3,", b": 2,")))

    damage = faults.mismatched_config(changes={"intermediate_size": 48, "num_hidden_layers": 3})

    assert not inject(damage, target, pair).proved


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"intermediate_sise": 1}, 'no key "intermediate_sise"; nearest: intermediate_size'),
        ({"rope_theta.factor": 1}, 'no key "rope_theta.factor"; nearest: none'),
        ({"num_hidden_layers": 2}, '"num_hidden_layers" is 2 already'),
    ],
)
def test_config_keys_that_cannot_be_changed_are_refused(
    changes: dict[str, int], message: str, pair: Pair, target: Path
) -> None:
    with pytest.raises(FaultNotApplicable, match=message):
        inject(faults.mismatched_config(changes=changes), target, pair)


@pytest.mark.parametrize(
    ("key", "row"),
    [("num_hidden_layers", "C01"), ("hidden_size", "C02"), ("vocab_size", "C03"), ("rope_scaling.factor", "C05")],
)
def test_config_change_names_its_row_of_the_taxonomy(key: str, row: str) -> None:
    assert faults.mismatched_config(changes={key: 1}).fault_id == row


def test_a_config_that_is_no_json_object_is_refused(pair: Pair, target: Path) -> None:
    (target / "config.json").write_text("[]")

    with pytest.raises(FaultNotApplicable, match="not a JSON object"):
        inject(faults.mismatched_config(changes={"vocab_size": 1}), target, pair)
