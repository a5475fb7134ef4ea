"""The strict contract: every mismatch is refused by name, and each planted leniency lets its own through."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from reference_checkpoints import (
    HIDDEN,
    INTERMEDIATE,
    VOCABULARY,
    weights,
    write_checkpoint,
    write_shard,
    write_tokenizer,
)

from harness.engine.reference.defects import PlantedDefect, parse_defects
from harness.engine.reference.loading import Contract, Loaded, load
from harness.engine.reference.tensor_source import CheckpointFiles
from harness.errors import CheckpointDefect

DOWN = "model.layers.1.mlp.down_proj.weight"
Q = "model.layers.0.self_attn.q_proj.weight"


def loaded(path: Path, *defects: PlantedDefect, dtype: str = "auto", max_model_len: int | None = 64) -> Loaded:
    contract = Contract(frozenset(defects))
    return load(path, dtype=dtype, max_model_len=max_model_len, source=CheckpointFiles(), contract=contract)


def changed(name: str, change: Callable[[np.ndarray], np.ndarray]) -> dict[str, np.ndarray]:
    tensors = weights(1)
    tensors[name] = change(tensors[name])
    return tensors


def without(name: str) -> dict[str, np.ndarray]:
    tensors = weights(1)
    del tensors[name]
    return tensors


def poisoned(name: str, value: float) -> dict[str, np.ndarray]:
    def poison(values: np.ndarray) -> np.ndarray:
        values[3, 5] = value
        return values

    return changed(name, poison)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("is_tied", [False, True])
def test_a_good_checkpoint_loads(tmp_path: Path, shards: int, is_tied: bool) -> None:
    path = write_checkpoint(tmp_path / "c", shards=shards, tie_word_embeddings=is_tied)
    result = loaded(path)
    assert result.dtype == "bfloat16"
    assert result.end_ids == {2}
    expected = weights(1, tied=is_tied)
    assert set(result.tensors) == set(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(result.tensors[name], values, rtol=2**-8)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_checkpoint_stored_in_another_float_loads_exactly(tmp_path: Path, dtype: str) -> None:
    stored = {"float16": "F16", "float32": "F32"}[dtype]
    path = write_checkpoint(tmp_path / "c", dtypes=dict.fromkeys(weights(1), stored), torch_dtype=dtype)
    result = loaded(path)
    precision = np.float16 if dtype == "float16" else np.float32
    np.testing.assert_array_equal(result.tensors[Q], weights(1)[Q].astype(precision).astype(np.float32))


def test_weights_are_rounded_to_the_asked_dtype(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "c", dtypes=dict.fromkeys(weights(1), "F32"), torch_dtype="float32")
    as_half = loaded(path, dtype="float16").tensors[Q]
    np.testing.assert_array_equal(as_half, as_half.astype(np.float16).astype(np.float32))
    as_bfloat = loaded(path, dtype="bfloat16").tensors[Q]
    assert not (np.ascontiguousarray(as_bfloat).view(np.uint32) & 0xFFFF).any()
    np.testing.assert_allclose(as_bfloat, weights(1)[Q], rtol=2**-8)


REFUSED: dict[str, tuple[str, str | None, Callable[[Path], object]]] = {
    "tensor missing": ("missing_tensor", DOWN, lambda path: write_checkpoint(path, tensors=without(DOWN))),
    "norm missing": (
        "missing_tensor",
        "model.norm.weight",
        lambda path: write_checkpoint(path, tensors=without("model.norm.weight")),
    ),
    "untied head missing": (
        "missing_tensor",
        "lm_head.weight",
        lambda path: write_checkpoint(path, tensors=without("lm_head.weight")),
    ),
    "one layer too many": (
        "unexpected_tensor",
        "model.layers.2.input_layernorm.weight",
        lambda path: write_checkpoint(path, tensors=weights(1, layers=3)),
    ),
    "one layer too few": (
        "missing_tensor",
        "model.layers.1.input_layernorm.weight",
        lambda path: write_checkpoint(path, tensors=weights(1, layers=1)),
    ),
    "32 columns too wide": (
        "unexpected_shape",
        DOWN,
        lambda path: write_checkpoint(path, tensors=changed(DOWN, lambda x: np.pad(x, ((0, 0), (0, 32))))),
    ),
    "8 rows too few": (
        "unexpected_shape",
        Q,
        lambda path: write_checkpoint(path, tensors=changed(Q, lambda x: x[:-8])),
    ),
    "transposed": (
        "unexpected_shape",
        DOWN,
        lambda path: write_checkpoint(path, tensors=changed(DOWN, lambda x: x.T.copy())),
    ),
    "re-laid-out": (
        "unexpected_shape",
        DOWN,
        lambda path: write_checkpoint(path, tensors=changed(DOWN, lambda x: x.reshape(HIDDEN // 2, -1))),
    ),
    "flat": (
        "unexpected_shape",
        DOWN,
        lambda path: write_checkpoint(path, tensors=changed(DOWN, lambda x: x.reshape(-1))),
    ),
    "one tensor in another float": (
        "unexpected_dtype",
        DOWN,
        lambda path: write_checkpoint(path, dtypes={DOWN: "F16"}),
    ),
    "one tensor in integers": ("unexpected_dtype", DOWN, lambda path: write_checkpoint(path, dtypes={DOWN: "I8"})),
    "config of another float": (
        "unexpected_dtype",
        None,
        lambda path: write_checkpoint(path, torch_dtype="float16"),
    ),
    "not a number": (
        "nonfinite_values",
        DOWN,
        lambda path: write_checkpoint(path, tensors=poisoned(DOWN, float("nan"))),
    ),
    "infinite": ("nonfinite_values", Q, lambda path: write_checkpoint(path, tensors=poisoned(Q, float("inf")))),
    "tied but different": (
        "tied_embedding_skew",
        "lm_head.weight",
        lambda path: write_checkpoint(path, tensors=weights(1), tie_word_embeddings=True),
    ),
    "a tensor of zeros": (
        "zero_tail",
        DOWN,
        lambda path: write_checkpoint(path, tensors=changed(DOWN, np.zeros_like)),
    ),
    "tokenizer beyond the vocabulary": (
        "tokenizer_beyond_vocabulary",
        None,
        lambda path: write_tokenizer(write_checkpoint(path), size=VOCABULARY + 1),
    ),
    "tokenizer absent": (
        "tokenizer_absent",
        None,
        lambda path: (write_checkpoint(path) / "tokenizer.json").unlink(),
    ),
    "tokenizer cut": (
        "tokenizer_invalid",
        None,
        lambda path: (write_checkpoint(path) / "tokenizer.json").write_text('{"model": {'),
    ),
    "other architecture": (
        "config_unsupported",
        None,
        lambda path: write_checkpoint(path, architectures=["MistralForCausalLM"]),
    ),
    "quantised": (
        "config_unsupported",
        None,
        lambda path: write_checkpoint(path, quantization_config={"quant_method": "fp8"}),
    ),
    "heads that do not fit": ("config_invalid", None, lambda path: write_checkpoint(path, num_key_value_heads=3)),
    "hidden size of zero": ("config_invalid", None, lambda path: write_checkpoint(path, hidden_size=0)),
    "hidden size as text": ("config_invalid", None, lambda path: write_checkpoint(path, hidden_size="128")),
    "absurd vocabulary": ("config_invalid", None, lambda path: write_checkpoint(path, vocab_size=2**60)),
    "end token beyond the vocabulary": ("config_invalid", None, lambda path: write_checkpoint(path, eos_token_id=512)),
    "no dtype": ("config_invalid", None, lambda path: write_checkpoint(path, torch_dtype="int8")),
    "context longer than the model": (
        "config_invalid",
        None,
        lambda path: write_checkpoint(path, max_position_embeddings=32),
    ),
    "nested checkpoint": (
        "nested_checkpoint",
        None,
        lambda path: write_checkpoint(write_checkpoint(path) / "new", seed=2),
    ),
    "a shard the index does not name": (
        "shard_not_in_index",
        None,
        lambda path: write_shard(write_checkpoint(path, shards=2) / "extra.safetensors", {"extra": np.ones(4)}),
    ),
    "a named shard that is absent": (
        "index_names_absent_shard",
        None,
        lambda path: (write_checkpoint(path, shards=2) / "model-00002-of-00002.safetensors").unlink(),
    ),
}


@pytest.mark.parametrize(("reason", "tensor", "write"), REFUSED.values(), ids=REFUSED.keys())
def test_a_mismatch_is_refused_by_name(
    tmp_path: Path, reason: str, tensor: str | None, write: Callable[[Path], object]
) -> None:
    write(tmp_path / "c")
    with pytest.raises(CheckpointDefect) as caught:
        loaded(tmp_path / "c")
    assert caught.value.reason == reason
    if tensor is not None:
        assert caught.value.tensor == tensor


def test_a_file_cut_in_half_is_refused(tmp_path: Path) -> None:
    file = write_checkpoint(tmp_path / "c") / "model.safetensors"
    with file.open("r+b") as shard:
        shard.truncate(file.stat().st_size // 2)
    with pytest.raises(CheckpointDefect) as caught:
        loaded(tmp_path / "c")
    assert caught.value.reason == "data_section_short"


@pytest.mark.parametrize("kept_ratio", [0.3, 0.5, 0.995])
def test_a_preallocated_file_with_a_zero_tail_is_refused(tmp_path: Path, kept_ratio: float) -> None:
    file = write_checkpoint(tmp_path / "c") / "model.safetensors"
    size = file.stat().st_size
    with file.open("r+b") as shard:
        shard.truncate(int(size * kept_ratio))
        shard.truncate(size)
    with pytest.raises(CheckpointDefect) as caught:
        loaded(tmp_path / "c")
    assert caught.value.reason == "zero_tail"


def test_bf16_values_beyond_fp16_are_refused_only_as_fp16(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "c", tensors=poisoned(DOWN, 1e6))
    assert loaded(path).tensors[DOWN][3, 5] == pytest.approx(1e6, rel=2**-8)
    with pytest.raises(CheckpointDefect) as caught:
        loaded(path, dtype="float16")
    assert caught.value.reason == "nonfinite_values"


def test_planted_defect_serves_zeros_for_a_missing_tensor(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "c", tensors=without(DOWN))
    values = loaded(path, PlantedDefect.IGNORES_MISSING_TENSOR).tensors[DOWN]
    assert values.shape == (HIDDEN, INTERMEDIATE)
    assert not values.any()


def test_planted_defect_cuts_and_pads(tmp_path: Path) -> None:
    wide = write_checkpoint(tmp_path / "wide", tensors=changed(DOWN, lambda x: np.pad(x, ((0, 0), (0, 32)))))
    narrow = write_checkpoint(tmp_path / "narrow", tensors=changed(DOWN, lambda x: x[:, :-32].copy()))
    good = loaded(write_checkpoint(tmp_path / "good")).tensors[DOWN]
    np.testing.assert_array_equal(loaded(wide, PlantedDefect.IGNORES_SHAPE).tensors[DOWN], good)
    padded = loaded(narrow, PlantedDefect.IGNORES_SHAPE).tensors[DOWN]
    np.testing.assert_array_equal(padded[:, :-32], good[:, :-32])
    assert not padded[:, -32:].any()


def test_planted_defect_serves_nonfinite_values(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "c", tensors=poisoned(DOWN, float("nan")))
    assert np.isnan(loaded(path, PlantedDefect.IGNORES_NONFINITE).tensors[DOWN][3, 5])


SILENT_ON_VLLM: dict[str, Callable[[Path], object]] = {
    "linear tensor missing": lambda path: write_checkpoint(path, tensors=without(DOWN)),
    "head missing": lambda path: write_checkpoint(path, tensors=without("lm_head.weight")),
    "too wide": lambda path: write_checkpoint(path, tensors=changed(DOWN, lambda x: np.pad(x, ((0, 0), (0, 8))))),
    "int8": lambda path: write_checkpoint(path, dtypes={DOWN: "I8"}),
    "not a number": lambda path: write_checkpoint(path, tensors=poisoned(DOWN, float("nan"))),
    "zeros": lambda path: write_checkpoint(path, tensors=changed(DOWN, np.zeros_like)),
    "tokenizer beyond": lambda path: write_tokenizer(write_checkpoint(path), size=VOCABULARY + 1),
    "nested": lambda path: write_checkpoint(write_checkpoint(path) / "new", seed=2),
    "stale index": lambda path: write_shard(write_checkpoint(path, shards=2) / "new.safetensors", weights(2)),
}


@pytest.mark.parametrize("write", SILENT_ON_VLLM.values(), ids=SILENT_ON_VLLM.keys())
def test_lenient_contract_serves_what_vllm_serves(tmp_path: Path, write: Callable[[Path], object]) -> None:
    write(tmp_path / "c")
    result = loaded(tmp_path / "c", PlantedDefect.LENIENT_LIKE_VLLM)
    assert result.tensors[DOWN].shape == (HIDDEN, INTERMEDIATE)


REFUSED_BY_VLLM = {
    "too narrow": lambda path: write_checkpoint(path, tensors=changed(DOWN, lambda x: x[:, :-8].copy())),
    "re-laid-out": lambda path: write_checkpoint(path, tensors=changed(DOWN, lambda x: x.reshape(HIDDEN // 2, -1))),
    "norm missing": lambda path: write_checkpoint(path, tensors=without("model.norm.weight")),
    "extra layer": lambda path: write_checkpoint(path, tensors=weights(1, layers=3)),
}


@pytest.mark.parametrize("write", REFUSED_BY_VLLM.values(), ids=REFUSED_BY_VLLM.keys())
def test_lenient_contract_refuses_what_vllm_refuses(tmp_path: Path, write: Callable[[Path], object]) -> None:
    write(tmp_path / "c")
    with pytest.raises(CheckpointDefect):
        loaded(tmp_path / "c", PlantedDefect.LENIENT_LIKE_VLLM)


def test_an_unknown_defect_is_named() -> None:
    with pytest.raises(ValueError, match='unknown defect "typo"'):
        parse_defects("wrong_answer,typo")
    assert parse_defects(" wrong_answer , ignores_stop,") == {PlantedDefect.WRONG_ANSWER, PlantedDefect.IGNORES_STOP}


def test_rope_parameters_of_newer_configs_are_read(tmp_path: Path) -> None:
    path = write_checkpoint(
        tmp_path / "c", rope_theta=None, rope_parameters={"rope_theta": 5e5, "rope_type": "default"}
    )
    assert loaded(path).shape.rope_theta == 5e5
    scaled = write_checkpoint(tmp_path / "s", rope_parameters={"rope_theta": 5e5, "rope_type": "llama3"})
    with pytest.raises(CheckpointDefect, match="config_unsupported"):
        loaded(scaled)


def test_config_is_not_trusted_as_json(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "c")
    (path / "config.json").write_text(json.dumps([1, 2]))
    with pytest.raises(CheckpointDefect):
        loaded(path)
