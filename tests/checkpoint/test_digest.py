"""A checkpoint is identified by what it holds: not by path, file name, sharding or time."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from harness.checkpoint import digest, models
from harness.checkpoint.adapter import ADAPTER, ADAPTER_CONFIG, ADAPTER_WEIGHTS
from harness.checkpoint.copy import RawTensor, load_shard, private_copy, save_shard
from harness.checkpoint.hashing import Part
from harness.checkpoint.manifest import checkpoint_id, weights_id
from harness.errors import CheckpointDefect

SMALL = {"hidden": 32, "intermediate": 32, "layers": 1}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.tiny_llama(seed=1, **SMALL).build(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def copied(built: Path, tmp_path: Path) -> Path:
    return private_copy(built, tmp_path / "copied")


def test_same_content_same_id_whatever_the_files(built: Path, copied: Path, tmp_path: Path) -> None:
    assert weights_id(built).startswith("w-")
    assert len(weights_id(built)) == 18
    (copied / "model.safetensors").rename(copied / "other.safetensors")
    assert weights_id(copied) == weights_id(built)
    sharded = models.tiny_llama(seed=1, shards=3, **SMALL).build(tmp_path)
    assert weights_id(sharded) == weights_id(built)
    assert checkpoint_id(sharded) == checkpoint_id(built)


@pytest.mark.parametrize("what", ["byte", "dtype", "shape", "name", "absent"])
def test_any_difference_in_tensors_is_another_id(built: Path, copied: Path, what: str) -> None:
    tensors = load_shard(copied / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    old = tensors.pop(name)
    if what == "byte":
        tensors[name] = RawTensor(old.dtype, old.shape, bytes([old.data[0] ^ 1]) + old.data[1:])
    elif what == "dtype":
        tensors[name] = RawTensor("F16", old.shape, old.data)
    elif what == "shape":
        tensors[name] = RawTensor(old.dtype, (16, 64), old.data)
    elif what == "name":
        tensors[name + "s"] = old
    save_shard(copied / "model.safetensors", tensors)
    assert weights_id(copied) != weights_id(built)


def test_the_config_of_an_adapter_that_cannot_be_read_is_a_defect_in_words(tmp_path: Path) -> None:
    adapted = private_copy(models.adapted_llama(1).build(tmp_path), tmp_path / "copied")
    config = adapted / ADAPTER / ADAPTER_CONFIG
    config.unlink()
    config.symlink_to("/proc/self/mem")  # a file whose first byte cannot be read, not by root either
    with pytest.raises(CheckpointDefect, match=f'unreadable_file: "{ADAPTER_CONFIG}": Input/output error'):
        weights_id(adapted)


def test_an_adapter_that_nobody_may_look_for_is_a_defect_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapted = models.adapted_llama(1).build(tmp_path)
    look = Path.stat

    def refused(path: Path, **how: bool) -> os.stat_result:
        if path.parent.name == ADAPTER:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return look(path, **how)

    monkeypatch.setattr(Path, "stat", refused)
    with pytest.raises(CheckpointDefect, match=f'unreadable_file: "{ADAPTER_WEIGHTS}": Permission denied'):
        weights_id(adapted)


def test_swapped_tensors_of_equal_layout_are_another_id(built: Path, copied: Path) -> None:
    tensors = load_shard(copied / "model.safetensors")
    up, gate = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_proj.weight"
    tensors[up], tensors[gate] = tensors[gate], tensors[up]
    save_shard(copied / "model.safetensors", tensors)
    assert weights_id(copied) != weights_id(built)


def test_a_write_in_place_is_noticed_by_time_and_digests_are_not_repeated(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest, "SETTLED_NS", -1)  # as if it had been written long ago
    before = weights_id(copied)
    read: list[str] = []
    original = digest.hash_parts

    def counted(parts: list[Part]) -> list[bytes]:
        read.extend(part.path.name for part in parts)
        return original(parts)

    monkeypatch.setattr(digest, "hash_parts", counted)
    assert weights_id(copied) == before
    assert read == []
    path = copied / "model.safetensors"
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7b")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # as a copy that keeps times does
    assert weights_id(copied) != before
    assert read


def test_a_file_that_takes_over_name_number_size_and_time_of_another_is_another(built: Path, copied: Path) -> None:
    """A file that was just written is not remembered: file systems stamp times in steps, and reuse numbers of files."""
    path = copied / "model.safetensors"
    before, status = weights_id(copied), path.stat()
    tensors = load_shard(path)
    up, gate = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_proj.weight"
    tensors[up], tensors[gate] = tensors[gate], tensors[up]
    save_shard(copied / "other.safetensors", tensors)
    path.write_bytes((copied / "other.safetensors").read_bytes())  # the same inode
    (copied / "other.safetensors").unlink()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_ino == status.st_ino
    assert path.stat().st_size == status.st_size
    assert weights_id(copied) != before


def test_config_and_tokenizer_belong_to_the_checkpoint_but_not_to_the_weights(built: Path, copied: Path) -> None:
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        content = json.loads((copied / name).read_text())
        before = checkpoint_id(copied)
        (copied / name).write_text(json.dumps(content | {"more": 1}))
        assert checkpoint_id(copied) != before
    (copied / "README.md").write_text("not served")
    before = checkpoint_id(copied)
    (copied / "README.md").unlink()
    assert checkpoint_id(copied) == before
    assert weights_id(copied) == weights_id(built)


def test_broken_file_has_no_id_but_a_missing_shard_has_another(tmp_path: Path, built: Path) -> None:
    sharded = private_copy(models.tiny_llama(seed=1, shards=2, **SMALL).build(tmp_path / "c"), tmp_path / "sharded")
    second = sharded / "model-00002-of-00002.safetensors"
    content = second.read_bytes()
    second.write_bytes(content[:-1])
    with pytest.raises(CheckpointDefect, match="data_section_short"):
        weights_id(sharded)
    second.unlink()
    assert weights_id(sharded) != weights_id(built)
    with pytest.raises(CheckpointDefect, match="directory_absent"):
        weights_id(tmp_path / "none")
