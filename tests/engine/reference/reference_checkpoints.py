"""Small Llama checkpoints for the tests of the reference engine, written byte by byte so that any part can be wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

HIDDEN, LAYERS, HEADS, KV_HEADS, INTERMEDIATE, VOCABULARY = 128, 2, 4, 2, 256, 512


def config(**changed: Any) -> dict[str, Any]:
    """Return the config of the tiny Llama; a value of None removes the key."""
    fields: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }
    return {key: value for key, value in {**fields, **changed}.items() if value is not None}


def weights(seed: int, *, layers: int = LAYERS, tied: bool = False) -> dict[str, np.ndarray]:
    """Return random float32 weights by name."""
    random = np.random.default_rng(seed)
    head_dim = HIDDEN // HEADS

    def linear(rows: int, columns: int) -> np.ndarray:
        return random.normal(0.0, 0.1, (rows, columns)).astype(np.float32)

    def norm() -> np.ndarray:
        return (1.0 + random.normal(0.0, 0.1, HIDDEN)).astype(np.float32)

    tensors = {"model.embed_tokens.weight": linear(VOCABULARY, HIDDEN), "model.norm.weight": norm()}
    if not tied:
        tensors["lm_head.weight"] = linear(VOCABULARY, HIDDEN)
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        tensors[prefix + "input_layernorm.weight"] = norm()
        tensors[prefix + "post_attention_layernorm.weight"] = norm()
        tensors[prefix + "self_attn.q_proj.weight"] = linear(HEADS * head_dim, HIDDEN)
        tensors[prefix + "self_attn.k_proj.weight"] = linear(KV_HEADS * head_dim, HIDDEN)
        tensors[prefix + "self_attn.v_proj.weight"] = linear(KV_HEADS * head_dim, HIDDEN)
        tensors[prefix + "self_attn.o_proj.weight"] = linear(HIDDEN, HEADS * head_dim)
        tensors[prefix + "mlp.gate_proj.weight"] = linear(INTERMEDIATE, HIDDEN)
        tensors[prefix + "mlp.up_proj.weight"] = linear(INTERMEDIATE, HIDDEN)
        tensors[prefix + "mlp.down_proj.weight"] = linear(HIDDEN, INTERMEDIATE)
    return tensors


def raw_bytes(values: np.ndarray, dtype: str) -> bytes:
    """Return little-endian bytes of `values` in a safetensors dtype; BF16 is rounded to the nearest even."""
    if dtype == "BF16":
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()
    numpy_dtype = {"F32": "<f4", "F16": "<f2", "I8": "|i1"}[dtype]
    return np.ascontiguousarray(values).astype(numpy_dtype).tobytes()


def write_shard(path: Path, tensors: dict[str, np.ndarray], dtypes: dict[str, str] | None = None) -> None:
    """Write one safetensors file; tensors not named in `dtypes` are BF16."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, values in sorted(tensors.items()):
        dtype = (dtypes or {}).get(name, "BF16")
        part = raw_bytes(values, dtype)
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [len(data), len(data) + len(part)]}
        data += part
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write_tokenizer(directory: Path, *, size: int = VOCABULARY) -> None:
    """Write a word-level tokenizer: `t3` is token 3."""
    special = {0: "<unk>", 1: "<s>", 2: "</s>"}
    vocabulary = {special.get(token, f"t{token}"): token for token in range(size)}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": token, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
             "special": True}
            for token, text in special.items()
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }  # fmt: skip
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<s>",
                "eos_token": "</s>",
                "unk_token": "<unk>",
            }
        )
    )


def write_checkpoint(
    directory: Path,
    *,
    seed: int = 1,
    tensors: dict[str, np.ndarray] | None = None,
    dtypes: dict[str, str] | None = None,
    shards: int = 1,
    **config_changes: Any,
) -> Path:
    """Write a whole checkpoint and return its directory."""
    directory.mkdir(parents=True, exist_ok=True)
    chosen = weights(seed, tied=bool(config_changes.get("tie_word_embeddings"))) if tensors is None else tensors
    (directory / "config.json").write_text(json.dumps(config(**config_changes)))
    write_tokenizer(directory)
    if shards == 1:
        write_shard(directory / "model.safetensors", chosen, dtypes)
        return directory
    names = sorted(chosen)
    weight_map = {}
    for number in range(shards):
        file_name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: chosen[name] for name in names[number::shards]}
        write_shard(directory / file_name, part, dtypes)
        weight_map.update(dict.fromkeys(part, file_name))
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory
