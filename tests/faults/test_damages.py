"""What holds for every damage: it proves itself, it says when it did not happen, and it touches nothing else."""

from __future__ import annotations

import json
import os
from pathlib import Path
from random import Random
from typing import Any

import pytest
from damage_cases import DAMAGES, SILENT_FOR_THE_LIBRARY, Pair, contents, seen, tree
from safetensors import SafetensorError, safe_open

from harness.checkpoint.copy import RawTensor
from harness.errors import FaultNotApplicable
from harness.faults import FAULTS, Damage
from harness.faults.documents import is_damage
from harness.faults.target import Target

# Damages whose proof is that something is absent, or that reads whatever was written as config: not for the test below.
BY_REMOVAL_OR_CONFIG = {
    "drop",
    "drop_fused_part",
    "missing_shard",
    "missing_tokenizer",
    "missing_config",
    "missing_chat_template",
    "dangling_link",
    "cut_config",
    "cut_index",
    "cut_tokenizer",
    "ref_without_weights",
    "incomplete_blob",
    "extend_byte",
    "extend_page",
    "damage_header",
}
CHANGES = (
    "add_shard",
    "bring",
    "extend",
    "link",
    "overwrite",
    "remove",
    "rename",
    "rename_tensors",
    "replace_tensors",
    "set_mode",
    "truncate",
    "write",
    "write_torch_file",
    "zero_from",
)

INDEX = "model.safetensors.index.json"
ADDS_FILES_ALONE = ("leftover_consolidated",)

every_damage = pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())


@every_damage
def test_proves_itself_and_changes_the_target(damage: Damage, pair: Pair, target: Path) -> None:
    before = contents(target)

    injected = damage.damage(target, old=pair.old_for(damage), random=Random(1))

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
    for change in CHANGES:
        monkeypatch.setattr(Target, change, lambda *arguments, **named: None)

    injected = damage.damage(target, old=pair.old_for(damage), random=Random(1))

    assert contents(target) == before
    assert not injected.proved, injected.because


@pytest.mark.parametrize("name", sorted(set(DAMAGES) - BY_REMOVAL_OR_CONFIG))
def test_is_not_proved_when_something_else_was_written(
    name: str, pair: Pair, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_tensors, bring, write, truncate = Target.replace_tensors, Target.bring, Target.write, Target.truncate
    zero_from, add_shard, write_torch_file = Target.zero_from, Target.add_shard, Target.write_torch_file

    def other(raw: RawTensor) -> RawTensor:
        return RawTensor(raw.dtype, raw.shape, bytes(raw.data[:-1]) + bytes([raw.data[-1] ^ 1]))

    def replace_others(own: Target, shard: str, changes: dict[str, RawTensor | None]) -> None:
        replace_tensors(own, shard, {name: None if raw is None else other(raw) for name, raw in changes.items()})

    def bring_another(own: Target, source: Path, file: str) -> None:
        bring(own, source, file)
        content = (own.path / file).read_bytes()
        is_json = file.endswith(".json")
        (own.path / file).write_bytes(
            content.replace(b"silu", b"gelu") if is_json else content[:-1] + bytes([content[-1] ^ 1])
        )

    def write_another(own: Target, file: str, data: bytes) -> None:
        if not file.endswith(".json"):
            return write(own, file, data[:-1] + bytes([data[-1] ^ 1]) if data else b"x")
        decoded = json.loads(data)
        if isinstance(decoded, dict) and file != INDEX:
            decoded["one_more"] = True
            if "model" in decoded:
                decoded["model"]["vocab"] = {**decoded["model"]["vocab"], "one more": 10**6}
        return write(own, file, json.dumps(decoded).encode())

    monkeypatch.setattr(Target, "replace_tensors", replace_others)
    monkeypatch.setattr(Target, "bring", bring_another)
    monkeypatch.setattr(Target, "write", write_another)
    monkeypatch.setattr(
        Target, "add_shard", lambda own, file, tensors: add_shard(own, file, {n: other(t) for n, t in tensors.items()})
    )
    monkeypatch.setattr(
        Target,
        "write_torch_file",
        lambda own, file, tensors: write_torch_file(own, file, [(name, other(raw)) for name, raw in tensors]),
    )
    monkeypatch.setattr(Target, "truncate", lambda own, file, size: truncate(own, file, size - 1))
    monkeypatch.setattr(Target, "zero_from", lambda own, file, begin: zero_from(own, file, begin + 300))

    assert not DAMAGES[name].damage(target, old=pair.old_for(DAMAGES[name]), random=Random(1)).proved


@every_damage
def test_leaves_both_checkpoints_as_they_were(damage: Damage, pair: Pair, target: Path) -> None:
    before = tree(pair.old), tree(pair.new)

    damage.damage(target, old=pair.old_for(damage), random=Random(1))

    assert (tree(pair.old), tree(pair.new)) == before


@every_damage
def test_never_writes_to_files_that_have_another_name(damage: Damage, pair: Pair, target: Path, tmp_path: Path) -> None:
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in target.iterdir():
        os.link(file, linked / file.name)
    before = seen(target)

    injected = damage.damage(linked, old=pair.old_for(damage), random=Random(1))

    assert injected.proved, injected.because
    assert seen(target) == before
    assert contents(linked) != contents(target)


@every_damage
def test_refuses_symlinks(damage: Damage, pair: Pair, target: Path, tmp_path: Path) -> None:
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in target.iterdir():
        os.symlink(file, linked / file.name)
    before, links = seen(target), {file: os.readlink(file) for file in linked.iterdir()}

    if damage.name in ADDS_FILES_ALONE:
        assert damage.damage(linked, old=pair.old_for(damage), random=Random(1)).proved
    else:
        with pytest.raises(FaultNotApplicable, match="not a regular file"):
            damage.damage(linked, old=pair.old_for(damage), random=Random(1))

    assert seen(target) == before
    assert {file: os.readlink(file) for file in links} == links


@every_damage
def test_refuses_the_old_checkpoint_itself(damage: Damage, pair: Pair) -> None:
    before = tree(pair.old)

    with pytest.raises(FaultNotApplicable, match="overlap"):
        damage.damage(pair.old, old=pair.old, random=Random(1))

    assert tree(pair.old) == before


@every_damage
def test_same_seed_gives_the_same_files(damage: Damage, pair: Pair) -> None:
    made = []
    for _ in range(2):
        with pair.copy() as target:
            damage.damage(target, old=pair.old_for(damage), random=Random(7))
            made.append(contents(target))

    assert made[0] == made[1]


@pytest.mark.parametrize("name", DAMAGES)
def test_the_library_refuses_what_one_file_can_show(name: str, pair: Pair, target: Path) -> None:
    DAMAGES[name].damage(target, old=pair.old_for(DAMAGES[name]), random=Random(1))

    refused = []
    for file in sorted(target.glob("*.safetensors")):
        try:
            with safe_open(file, framework="np") as shard:
                list(shard.keys())
        except (SafetensorError, OSError) as error:
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
    assert {damage.name for damage in DAMAGES.values()} == {name for name in FAULTS if is_damage(name)}
