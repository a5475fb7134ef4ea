"""What holds for every damage: it proves itself, it says when it did not happen, and it touches nothing else."""

from __future__ import annotations

import json
import os
from pathlib import Path
from random import Random
from typing import Any

import pytest
from damage_cases import DAMAGES, SILENT_FOR_THE_LIBRARY, Pair, contents, tree
from safetensors import SafetensorError, safe_open

from harness.checkpoint.copy import RawTensor
from harness.errors import FaultNotApplicable
from harness.faults import FAULTS, Damage
from harness.faults.target import Target

BY_REMOVAL_OR_CONFIG = {"drop", "drop_fused_part", "missing_shard", "config_intermediate", "config_rope"}

every_damage = pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())


@every_damage
def test_proves_itself_and_changes_the_target(damage: Damage, pair: Pair, target: Path) -> None:
    before = contents(target)

    injected = damage.damage(target, old=pair.old, random=Random(1))

    assert injected.proved, injected.because
    assert contents(target) != before
    assert injected.before != injected.after
    assert injected.fault == damage.name
    assert injected.fault_id == damage.fault_id


@every_damage
def test_is_not_proved_when_its_writes_are_lost(
    damage: Damage, pair: Pair, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(target)
    for change in ("replace_tensors", "write", "bring", "rename", "remove", "truncate", "zero_from"):
        monkeypatch.setattr(Target, change, lambda *arguments: None)

    injected = damage.damage(target, old=pair.old, random=Random(1))

    assert contents(target) == before
    assert not injected.proved, injected.because


@pytest.mark.parametrize("name", sorted(set(DAMAGES) - BY_REMOVAL_OR_CONFIG))
def test_is_not_proved_when_something_else_was_written(
    name: str, pair: Pair, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_tensors, bring, write, truncate, zero_from = (
        Target.replace_tensors,
        Target.bring,
        Target.write,
        Target.truncate,
        Target.zero_from,
    )

    def replace_others(own: Target, shard: str, changes: dict[str, RawTensor]) -> None:
        others = {
            tensor: RawTensor(raw.dtype, raw.shape, raw.data[:-1] + bytes([raw.data[-1] ^ 1]))
            for tensor, raw in changes.items()
        }
        replace_tensors(own, shard, others)

    def bring_another(own: Target, source: Path, file: str) -> None:
        bring(own, source, file)
        content = (own.path / file).read_bytes()
        is_json = file.endswith(".json")
        (own.path / file).write_bytes(
            content.replace(b"silu", b"gelu") if is_json else content[:-1] + bytes([content[-1] ^ 1])
        )

    def write_another(own: Target, file: str, data: bytes) -> None:
        write(own, file, data if file.endswith(".json") else data + b"\n")

    monkeypatch.setattr(Target, "replace_tensors", replace_others)
    monkeypatch.setattr(Target, "bring", bring_another)
    monkeypatch.setattr(Target, "write", write_another)
    monkeypatch.setattr(Target, "truncate", lambda own, file, size: truncate(own, file, size - 1))
    monkeypatch.setattr(Target, "zero_from", lambda own, file, begin: zero_from(own, file, begin + 100))

    assert not DAMAGES[name].damage(target, old=pair.old, random=Random(1)).proved


@every_damage
def test_leaves_both_checkpoints_as_they_were(damage: Damage, pair: Pair, target: Path) -> None:
    before = tree(pair.old), tree(pair.new)

    damage.damage(target, old=pair.old, random=Random(1))

    assert (tree(pair.old), tree(pair.new)) == before


@every_damage
@pytest.mark.parametrize("kind", ["hard links", "symlinks"])
def test_refuses_files_that_are_not_its_own(damage: Damage, kind: str, pair: Pair, tmp_path: Path) -> None:
    target = tmp_path / "linked"
    target.mkdir()
    original = tmp_path / "original"
    original.mkdir()
    for file in pair.new.iterdir():
        (original / file.name).write_bytes(file.read_bytes())
        link = os.link if kind == "hard links" else os.symlink
        link(original / file.name, target / file.name)
    before = contents(original)

    with pytest.raises(FaultNotApplicable, match=r"hard links|not a regular file"):
        damage.damage(target, old=pair.old, random=Random(1))

    assert contents(original) == before


@every_damage
def test_refuses_the_old_checkpoint_itself(damage: Damage, pair: Pair) -> None:
    before = tree(pair.old)

    with pytest.raises(FaultNotApplicable, match="overlap"):
        damage.damage(pair.old, old=pair.old, random=Random(1))

    assert tree(pair.old) == before


@every_damage
def test_same_seed_gives_the_same_files(damage: Damage, pair: Pair) -> None:
    seen = []
    for _ in range(2):
        with pair.copy() as target:
            damage.damage(target, old=pair.old, random=Random(7))
            seen.append(contents(target))

    assert seen[0] == seen[1]


@pytest.mark.parametrize("name", DAMAGES)
def test_the_library_refuses_what_one_file_can_show(name: str, pair: Pair, target: Path) -> None:
    DAMAGES[name].damage(target, old=pair.old, random=Random(1))

    refused = []
    for file in sorted(target.glob("*.safetensors")):
        try:
            with safe_open(file, framework="np") as shard:
                list(shard.keys())
        except SafetensorError as error:
            refused.append(str(error))

    is_loud = bool(refused) or len(list(target.glob("*.safetensors"))) < 2
    assert is_loud == (name not in SILENT_FOR_THE_LIBRARY), refused


@every_damage
def test_a_damage_is_declared_by_name_and_parameters(damage: Damage) -> None:
    declared: dict[str, Any] = json.loads(json.dumps(damage.parameters()))

    assert isinstance(damage, Damage)
    assert damage.name in FAULTS
    assert FAULTS[damage.name](**_as_arguments(declared)) == damage


def _as_arguments(declared: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in declared.items()}


def test_every_damage_of_the_module_is_among_the_cases() -> None:
    tried = {damage.name for damage in DAMAGES.values()}
    elsewhere = {
        "late_purge",
        "launch_argument",
        "launch_dtype",
        "launch_environment",
        "nested_move",
        "overwrite_in_place",
        "rsync_in_place",
        "slow_sync",
        "stale_weight_cache",
    }
    assert tried | elsewhere == set(FAULTS)
