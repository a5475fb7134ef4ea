"""A private copy may be written to; the original must stay byte for byte what it was."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from harness.checkpoint import copy, models
from harness.checkpoint.copy import RawTensor, load_shard, private_copy, rewrite_shard, save_shard
from harness.errors import HarnessError, UsageError


@pytest.fixture
def original(tmp_path: Path) -> Path:
    return models.tiny_llama(hidden=32, intermediate=32, layers=1).build(tmp_path / "cache")


def content(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.rglob("*") if file.is_file()}


@pytest.mark.parametrize("share", [True, False])
def test_writing_to_a_copy_in_place_leaves_the_original(original: Path, tmp_path: Path, share: bool) -> None:
    before = content(original)
    target = private_copy(original, tmp_path / "deep" / "copy", share=share)
    assert content(target) == before
    for file in target.iterdir():
        assert file.stat().st_nlink == 1
        assert not file.is_symlink()
        with file.open("r+b") as writer:
            writer.write(b"overwritten")
    assert content(original) == before
    assert content(target) != before


def test_links_are_followed_and_replaced_by_files(original: Path, tmp_path: Path) -> None:
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in original.iterdir():
        (linked / file.name).symlink_to(file)
    target = private_copy(linked, tmp_path / "copy")
    assert content(target) == content(original)
    assert not any(file.is_symlink() for file in target.iterdir())


def test_sub_directories_are_copied(original: Path, tmp_path: Path) -> None:
    source = private_copy(original, tmp_path / "source")
    (source / "inner").mkdir()
    (source / "inner" / "file").write_text("x")
    assert (private_copy(source, tmp_path / "copy") / "inner" / "file").read_text() == "x"


def test_hard_links_only_when_asked_and_never_written_in_place(original: Path, tmp_path: Path) -> None:
    before = content(original)
    target = private_copy(original, tmp_path / "copy", link_unchanged=True)
    shard = target / "model.safetensors"
    assert shard.samefile(original / "model.safetensors")
    with pytest.raises(UsageError, match="2 hard links, expected 1"):
        rewrite_shard(shard, lambda tensors: tensors)
    assert content(original) == before


def test_a_source_that_cannot_be_copied_leaves_nothing(original: Path, tmp_path: Path) -> None:
    source = private_copy(original, tmp_path / "source")
    (source / "zzz").symlink_to("absent")
    with pytest.raises(UsageError, match="zzz"):
        private_copy(source, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    with pytest.raises(UsageError, match="is not a directory"):
        private_copy(tmp_path / "none", tmp_path / "copy")
    with pytest.raises(UsageError, match="exists already"):
        private_copy(original, source)


def test_rewriting_replaces_the_file_and_a_reader_keeps_the_old_one(original: Path, tmp_path: Path) -> None:
    target = private_copy(original, tmp_path / "copy")
    shard = target / "model.safetensors"
    old = shard.read_bytes()

    def drop_norm(tensors: dict[str, RawTensor]) -> Mapping[str, RawTensor]:
        return {name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"}

    with shard.open("rb") as reader:
        rewrite_shard(shard, drop_norm)
        assert reader.read() == old
    assert "model.norm.weight" not in load_shard(shard)
    assert not [file for file in target.iterdir() if "partial" in file.name]
    assert load_shard(shard) == drop_norm(load_shard(original / "model.safetensors"))


def test_a_shard_that_cannot_be_written_leaves_the_old_one(original: Path, tmp_path: Path) -> None:
    shard = private_copy(original, tmp_path / "copy") / "model.safetensors"
    old = shard.read_bytes()
    with pytest.raises(HarnessError, match="cannot write"):
        save_shard(shard, {"x": RawTensor("BF16", (2, 2), b"too short")})
    with pytest.raises(UsageError, match='dtype "F3"'):
        save_shard(shard, {"x": RawTensor("F3", (1,), b"x")})
    assert shard.read_bytes() == old
    assert not [file for file in shard.parent.iterdir() if "partial" in file.name]


def test_symlink_is_never_rewritten(original: Path, tmp_path: Path) -> None:
    link = tmp_path / "model.safetensors"
    link.symlink_to(original / "model.safetensors")
    with pytest.raises(UsageError, match="not a regular file"):
        rewrite_shard(link, lambda tensors: tensors)


def test_copies_are_real_where_there_are_no_reflinks(
    original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy, "_reflink", lambda source, target: False)
    assert copy.copy_file(original / "config.json", tmp_path / "config.json") is False
    assert (tmp_path / "config.json").read_bytes() == (original / "config.json").read_bytes()
    assert os.access(tmp_path / "config.json", os.W_OK)
