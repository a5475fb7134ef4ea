"""What a directory holds and everything that is wrong with it, without reading tensors."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.checkpoint import models
from harness.checkpoint.copy import RawTensor, load_shard, private_copy, save_shard
from harness.checkpoint.manifest import Defect, find_defects, read_checkpoint
from harness.checkpoint.survey import survey
from harness.errors import CheckpointDefect

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def whole(cache: Path, tmp_path: Path) -> Path:
    """A private copy of a sound checkpoint in two shards."""
    return private_copy(models.tiny_llama(shards=2, hidden=32, intermediate=32).build(cache), tmp_path / "checkpoint")


def edit_index(path: Path, edit: Callable[[dict[str, str]], object]) -> None:
    content = json.loads((path / INDEX).read_text())
    edit(content["weight_map"])
    (path / INDEX).write_text(json.dumps(content))


def names(path: Path) -> list[tuple[str, str]]:
    return [(defect.reason, defect.path.name) for defect in find_defects(path)]


def loaded_names(path: Path) -> list[str]:
    """The tensors that an engine would load, whatever else is wrong."""
    return [tensor.name for tensor in survey(path)[0].tensors]


def test_a_sound_checkpoint_has_no_defects(whole: Path) -> None:
    assert find_defects(whole) == ()
    checkpoint = read_checkpoint(whole)
    assert [shard.name for shard in checkpoint.shards] == [FIRST, SECOND]
    assert len(checkpoint.tensors) == 21
    assert checkpoint.tensor("lm_head.weight").shape == (512, 32)
    assert checkpoint.config["hidden_size"] == 32
    assert checkpoint.index is not None
    assert checkpoint.index.total_size_bytes == sum(tensor.size_bytes for tensor in checkpoint.tensors)
    with pytest.raises(KeyError, match="no tensor"):
        checkpoint.tensor("absent")


def test_absent_directory(tmp_path: Path) -> None:
    assert names(tmp_path / "none") == [(Defect.DIRECTORY_ABSENT, "none")]
    assert names(tmp_path) == [(Defect.CONFIG_ABSENT, "config.json"), (Defect.NO_WEIGHTS, tmp_path.name)]


def test_config(whole: Path) -> None:
    (whole / "config.json").write_text('{"hidden_size": 32')
    assert names(whole) == [(Defect.CONFIG_NOT_JSON, "config.json")]
    (whole / "config.json").write_text("[1]")
    assert names(whole) == [(Defect.CONFIG_NOT_JSON, "config.json")]
    (whole / "config.json").unlink()
    assert names(whole) == [(Defect.CONFIG_ABSENT, "config.json")]
    with pytest.raises(CheckpointDefect, match="config_absent"):
        read_checkpoint(whole)


def test_every_defect_is_found_not_only_the_first(whole: Path) -> None:
    (whole / FIRST).write_bytes(b"")
    (whole / SECOND).write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert names(whole) == [(Defect.EMPTY_FILE, FIRST), (Defect.POINTER_FILE, SECOND)]


def test_links_and_permissions(whole: Path) -> None:
    (whole / FIRST).unlink()
    (whole / FIRST).symlink_to("elsewhere")
    os.mkfifo(whole / "model.safetensors")
    (whole / SECOND).unlink()
    (whole / SECOND).mkdir()
    assert set(names(whole)) == {
        (Defect.SHARD_NOT_IN_INDEX, "model.safetensors"),
        (Defect.DANGLING_LINK, FIRST),
        (Defect.NOT_A_REGULAR_FILE, SECOND),
    }


def test_a_named_pipe_as_shard_does_not_block(whole: Path) -> None:
    (whole / FIRST).unlink()
    os.mkfifo(whole / FIRST)
    assert names(whole) == [(Defect.NOT_A_REGULAR_FILE, FIRST)]


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable(whole: Path) -> None:
    (whole / FIRST).chmod(0)
    assert names(whole) == [(Defect.UNREADABLE_FILE, FIRST)]


def test_missing_shard_with_and_without_index(whole: Path) -> None:
    (whole / SECOND).unlink()
    assert names(whole) == [(Defect.INDEX_NAMES_ABSENT_SHARD, INDEX)]
    (whole / INDEX).unlink()
    assert names(whole) == [(Defect.MISSING_SHARD_OF_SERIES, SECOND)]


def test_a_name_that_claims_many_shards_is_not_enumerated(whole: Path) -> None:
    (whole / INDEX).unlink()
    (whole / FIRST).rename(whole / "model-00001-of-99999.safetensors")
    (whole / SECOND).unlink()
    assert len(find_defects(whole)) == 16


def test_index_against_files(whole: Path) -> None:
    edit_index(whole, lambda weight_map: weight_map.update({"lm_head.weight": FIRST, "ghost.weight": FIRST}))
    edit_index(whole, lambda weight_map: weight_map.pop("model.norm.weight"))
    found = {(defect.reason, defect.tensor) for defect in find_defects(whole)}
    assert found == {
        (Defect.TENSOR_IN_OTHER_SHARD, "lm_head.weight"),
        (Defect.INDEX_NAMES_ABSENT_TENSOR, "ghost.weight"),
        (Defect.TENSOR_NOT_IN_INDEX, "model.norm.weight"),
    }


@pytest.mark.parametrize("shard", ["../../etc/passwd", "/etc/passwd", "", "..", 3, None, "a/b.safetensors", "a\0b"])
def test_an_index_cannot_name_files_elsewhere(whole: Path, shard: object) -> None:
    content = json.loads((whole / INDEX).read_text())
    content["weight_map"]["lm_head.weight"] = shard
    (whole / INDEX).write_text(json.dumps(content))
    assert (Defect.INDEX_ENTRY_INVALID, INDEX) in names(whole)


@pytest.mark.parametrize("content", ["{", "[]", "", '"x"', "[" * 100_000])
def test_index_not_json(whole: Path, content: str) -> None:
    (whole / INDEX).write_text(content)
    assert (Defect.INDEX_NOT_JSON, INDEX) in names(whole)


def test_new_single_file_beside_a_stale_index_is_not_loaded(whole: Path) -> None:
    save_shard(whole / "model.safetensors", {"x": RawTensor("U8", (1,), b"x")})
    assert names(whole) == [(Defect.SHARD_NOT_IN_INDEX, "model.safetensors")]
    assert "x" not in loaded_names(whole)


def test_old_shards_beside_a_new_file_without_index_mix(whole: Path) -> None:
    (whole / INDEX).unlink()
    save_shard(whole / "model.safetensors", load_shard(whole / SECOND))
    found = find_defects(whole)
    assert {defect.reason for defect in found} == {Defect.DUPLICATE_TENSOR}
    assert {defect.path.name for defect in found} == {"model.safetensors"}  # read last, so it wins


def test_consolidated_wins_and_the_other_family_is_named(whole: Path) -> None:
    save_shard(whole / "consolidated.safetensors", {"x": RawTensor("U8", (1,), b"x")})
    assert names(whole) == [(Defect.MIXED_WEIGHT_FAMILIES, FIRST), (Defect.MIXED_WEIGHT_FAMILIES, SECOND)]
    assert loaded_names(whole) == ["x"]


def test_pickled_weights_beside_safetensors(whole: Path) -> None:
    (whole / "training_args.bin").write_bytes(b"x")
    assert find_defects(whole) == ()
    (whole / "pytorch_model.bin").write_bytes(b"x")
    assert names(whole) == [(Defect.MIXED_WEIGHT_FAMILIES, "pytorch_model.bin")]


def test_nested_checkpoint_and_partial_files(whole: Path) -> None:
    (whole / "onnx").mkdir()
    (whole / "onnx" / "model.onnx").touch()
    assert find_defects(whole) == ()
    private_copy(whole, whole.parent / "again").rename(whole / "new")
    (whole / f".{FIRST}.Ab12Cd").touch()
    (whole / "model.safetensors.incomplete").touch()
    assert names(whole) == [
        (Defect.PARTIAL_DOWNLOAD_FILE, f".{FIRST}.Ab12Cd"),
        (Defect.PARTIAL_DOWNLOAD_FILE, "model.safetensors.incomplete"),
        (Defect.NESTED_CHECKPOINT, "new"),
    ]


def test_duplicate_key_in_one_header_is_named_though_the_library_accepts_it(whole: Path) -> None:
    (whole / INDEX).unlink()
    (whole / SECOND).unlink()
    (whole / FIRST).unlink()
    header = (
        b'{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    )
    (whole / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"x")
    assert [(defect.reason, defect.tensor) for defect in find_defects(whole)] == [(Defect.DUPLICATE_KEY, "x")]


def write_sparse(path: Path, *, shards: int, tensors: int, tensor_bytes: int) -> None:
    (path / "config.json").write_text("{}")
    weight_map = {}
    for number in range(1, shards + 1):
        name = f"model-{number:05d}-of-{shards:05d}.safetensors"
        header, end = {}, 0
        for tensor in range(number - 1, tensors, shards):
            header[f"model.layers.{tensor}.mlp.down_proj.weight"] = {
                "dtype": "BF16",
                "shape": [tensor_bytes // 2],
                "data_offsets": [end, end + tensor_bytes],
            }
            end += tensor_bytes
        weight_map |= dict.fromkeys(header, name)
        raw = json.dumps(header).encode()
        with (path / name).open("wb") as file:
            file.write(len(raw).to_bytes(8, "little") + raw)
            file.truncate(8 + len(raw) + end)
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_a_70b_layout_is_read_without_its_tensors(tmp_path: Path) -> None:
    write_sparse(tmp_path, shards=30, tensors=723, tensor_bytes=192 * 1024 * 1024)
    used = time.process_time()
    checkpoint = read_checkpoint(tmp_path)
    used = time.process_time() - used
    assert len(checkpoint.tensors) == 723
    assert sum(shard.size_bytes for shard in checkpoint.shards) > 130 * 2**30
    assert used < 5  # reading 140 GB takes far longer; measured: 0.03 s


FILE_NAMES = st.sampled_from(
    ["config.json", INDEX, FIRST, SECOND, "model.safetensors", "consolidated.safetensors", "tokenizer.json", "a.part"]
)
CONTENT = st.one_of(
    st.binary(max_size=80),
    st.sampled_from([b"{}", b"[]", b"{", b'{"weight_map": 3}', b'{"weight_map": {"a": "model.safetensors"}}']),
    st.binary(max_size=20).map(lambda raw: len(raw).to_bytes(8, "little") + raw),
    st.just((2).to_bytes(8, "little") + b"{}"),
)


@settings(max_examples=200, deadline=None)
@given(files=st.dictionaries(FILE_NAMES, CONTENT, max_size=5))
def test_never_raises_for_what_is_in_files(files: dict[str, bytes]) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch)
        for name, content in files.items():
            (path / name).write_bytes(content)
        for defect in find_defects(path):
            assert Defect(defect.reason)
            assert str(defect)
