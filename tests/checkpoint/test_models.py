"""Checkpoints are made once, whole or not at all, and a user's directory is never written."""

from __future__ import annotations

import importlib.util
import json
import threading
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.checkpoint import models, smollm2, tiny
from harness.checkpoint.copy import load_shard
from harness.checkpoint.manifest import find_defects, read_checkpoint, weights_id
from harness.checkpoint.tokenizer import byte_alphabet
from harness.clock import pause
from harness.errors import EnvironmentMissing, UsageError


def test_made_once_and_read_only(tmp_path: Path) -> None:
    source = models.tiny_llama()
    path = source.build(tmp_path)
    made = {file.name: file.stat().st_mtime_ns for file in path.iterdir()}
    assert set(made) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert all(file.stat().st_mode & 0o222 == 0 for file in path.iterdir())
    assert models.tiny_llama().build(tmp_path) == path
    assert {file.name: file.stat().st_mtime_ns for file in path.iterdir()} == made
    assert find_defects(path) == ()


def test_every_parameter_is_in_the_name() -> None:
    sources = [
        models.tiny_llama(),
        models.tiny_llama(seed=2),
        models.tiny_llama(shards=2),
        models.tiny_llama(hidden=64),
        models.tiny_llama(tied=True),
        models.tiny_llama(dtype="F32"),
        models.smollm2(),
        models.smollm2(seed=1),
        models.smollm2(shards=1),
    ]
    assert len({source.name for source in sources}) == len(set(sources)) == len(sources)
    assert models.tiny_llama(1, shards=2) == models.tiny_llama(seed=1, shards=2)


@pytest.mark.parametrize("seed", ["1", [1], 1.5, -1], ids=repr)
def test_a_seed_that_is_no_number_is_refused_in_words(seed: Any) -> None:
    for make in (models.tiny_llama, models.adapted_llama, partial(models.smollm2, 2)):
        with pytest.raises(UsageError, match="seed"):
            make(seed)
    with pytest.raises(UsageError, match="the seed of an adapter is"):
        models.adapted_llama(adapter=seed)
    if not isinstance(seed, int):
        with pytest.raises(UsageError, match=r"layers is .*, expected a whole number"):
            models.tiny_llama(layers=seed)
        with pytest.raises(UsageError, match=r"shards is .*, expected 1 to 99"):
            models.smollm2(shards=seed)


def test_same_seed_same_bytes_other_seed_other_bytes(tmp_path: Path) -> None:
    first, again = models.tiny_llama().build(tmp_path / "a"), models.tiny_llama().build(tmp_path / "b")
    assert all((again / file.name).read_bytes() == file.read_bytes() for file in first.iterdir())
    assert weights_id(models.tiny_llama(seed=2).build(tmp_path / "a")) != weights_id(first)


@pytest.mark.parametrize("shards", [1, 2, 5, 21])
def test_shards_hold_every_tensor_once(tmp_path: Path, shards: int) -> None:
    checkpoint = read_checkpoint(models.tiny_llama(shards=shards, hidden=32).build(tmp_path))
    assert len(checkpoint.shards) == shards
    assert len({tensor.name for tensor in checkpoint.tensors}) == len(checkpoint.tensors) == 21


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_dtype_in_weights_and_config_agree(tmp_path: Path, dtype: str) -> None:
    checkpoint = read_checkpoint(models.tiny_llama(dtype=dtype, hidden=32).build(tmp_path))
    assert {tensor.dtype for tensor in checkpoint.tensors} == {dtype}
    assert checkpoint.config["torch_dtype"] == tiny.CONFIG_DTYPES[dtype]


def test_bf16_is_rounded_to_nearest_even() -> None:
    values = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8 - 2**-20, 0.0], dtype=np.float32)
    bits = np.frombuffer(tiny.encode(values, "BF16").data, dtype="<u2")
    assert [hex(bit) for bit in bits] == ["0x3f80", "0x3f80", "0x3f82", "0xbf81", "0x0"]


def test_every_tensor_has_values_of_its_own(tmp_path: Path) -> None:
    tensors = load_shard(models.tiny_llama(tied=True).build(tmp_path) / "model.safetensors")
    assert "lm_head.weight" not in tensors
    assert all(len(set(memoryview(tensor.data).cast("H"))) > 16 for tensor in tensors.values())


def test_tokenizer_has_every_id_once_and_every_byte(tmp_path: Path) -> None:
    path = models.tiny_llama(vocabulary=400, hidden=32).build(tmp_path)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    assert sorted(tokenizer["model"]["vocab"].values()) == list(range(400))
    assert len(set(byte_alphabet())) == 256
    assert set(byte_alphabet()) <= set(tokenizer["model"]["vocab"])


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"hidden": 30}, "even multiple of heads"),
        ({"kv_heads": 3}, "multiple of kv_heads"),
        ({"vocabulary": 200}, "at least 259"),
        ({"vocabulary": 20_000}, "expected 259 to"),
        ({"dtype": "fp16"}, 'dtype is "fp16"'),
        ({"shards": 0}, "at least 1"),
        ({"shards": 22}, "22 shards for 21 tensors"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(tmp_path: Path, sizes: dict[str, int], expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        models.tiny_llama(**sizes).build(tmp_path)  # type: ignore[arg-type]
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


def test_a_failed_build_leaves_nothing_and_a_killed_ones_remains_are_cleared(tmp_path: Path) -> None:
    def write(target: Path) -> None:
        (target / "half").touch()
        raise OSError("disk full")

    source = models.ModelSource(name="broken", write=write)
    (tmp_path / ".broken.building").mkdir()
    (tmp_path / ".broken.building" / "of a killed builder").touch()
    with pytest.raises(OSError, match="disk full"):
        source.build(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".broken.lock"]


def test_two_builders_at_once_make_one(tmp_path: Path) -> None:
    builds: list[int] = []

    def write(target: Path) -> None:
        builds.append(1)
        pause(0.05)
        (target / "file").touch()

    sources = [models.ModelSource(name="both", write=write) for _ in range(4)]
    threads = [threading.Thread(target=source.build, args=(tmp_path,)) for source in sources]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert builds == [1]


def test_users_directory_is_returned_as_it_is(tmp_path: Path) -> None:
    given = tmp_path / "mine"
    with pytest.raises(UsageError, match="does not exist"):
        models.directory(given).build()
    given.mkdir()
    with pytest.raises(UsageError, match="is empty"):
        models.directory(given).build()
    (given / "config.json").write_text("{}")
    assert models.directory(given).build(tmp_path / "cache") == given
    assert [path.name for path in given.iterdir()] == ["config.json"]
    assert not (tmp_path / "cache").exists()
    with pytest.raises(UsageError, match="is not a directory"):
        models.directory(given / "config.json").build()


def test_cache_is_outside_the_repository(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ROLLOUT_CACHE", str(tmp_path))
    assert models.default_cache() == tmp_path
    monkeypatch.delenv("ROLLOUT_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert models.default_cache() == Path.home() / ".cache" / "vllm-rollout-harness"


def test_smollm2_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def absent(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", absent)
    with pytest.raises(EnvironmentMissing, match='extra "models"'):
        models.smollm2().build(tmp_path)
    with pytest.raises(UsageError, match="expected 1 to 99"):
        models.smollm2(shards=0)


def test_gguf_names_and_row_order() -> None:
    assert smollm2.tensor_name("blk.7.attn_q.weight") == "model.layers.7.self_attn.q_proj.weight"
    assert smollm2.tensor_name("blk.0.ffn_norm.weight") == "model.layers.0.post_attention_layernorm.weight"
    assert smollm2.tensor_name("token_embd.weight") == "model.embed_tokens.weight"
    rows = np.arange(8, dtype=np.float32).reshape(8, 1)  # two heads of four rows, halves interleaved
    assert smollm2._unpermuted(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason='the extra "models" is not installed')
def test_smollm2_is_a_whole_llama(tmp_path: Path) -> None:
    path = models.smollm2(shards=1).build(tmp_path)
    checkpoint = read_checkpoint(path)
    assert len(checkpoint.tensors) == 272
    assert checkpoint.tensor("model.embed_tokens.weight").shape == (49152, 576)
    assert checkpoint.config["rope_theta"] == 100000.0
    assert checkpoint.config["tie_word_embeddings"] is True


@pytest.mark.parametrize("variable", ["ROLLOUT_CACHE", "XDG_CACHE_HOME"])
def test_the_home_directory_of_nobody_is_named(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROLLOUT_CACHE", raising=False)
    monkeypatch.setenv(variable, "~nosuchuser/cache")
    with pytest.raises(UsageError, match='"~nosuchuser/cache" is no path here: '):
        models.default_cache()
    with pytest.raises(UsageError, match='"~nosuchuser/model" is no path here: '):
        models.directory("~nosuchuser/model")
