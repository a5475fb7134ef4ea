"""Capture what transformers writes for tiny random models, as the truth that the built-in formulas are tested against.

Run by hand, with an interpreter that has transformers and torch, when a family is added or transformers changes:

    python tests/guards/capture_layouts.py tests/guards/layouts

Every model is made on the CPU, saved in one file and in several, and compared. Kept are the config as saved, and name,
dtype, shape and shard of every tensor: a few KB of JSON a model. A second argument captures only names that contain it.
"""

from __future__ import annotations

import json
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2}
SIZES = {"vocab_size": 160, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
DENSE = SIZES | ATTENTION | {"max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
QWEN_MOE = DENSE | {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
OTHER_NAMES = {"max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

# name: (model class, config); the first part have built-in formulas, the second only the model that transformers builds
WITH_FORMULAS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", DENSE),
    "llama-biases-head-dim": (
        "LlamaForCausalLM",
        DENSE | {"attention_bias": True, "mlp_bias": True, "head_dim": 12, "tie_word_embeddings": True},
    ),
    "smollm": ("LlamaForCausalLM", DENSE | {"num_attention_heads": 8, "tie_word_embeddings": True}),
    "smollm3": ("SmolLM3ForCausalLM", DENSE | {"no_rope_layer_interval": 2}),
    "mistral": ("MistralForCausalLM", DENSE),
    "mistral-head-dim": ("MistralForCausalLM", DENSE | {"head_dim": 16, "num_key_value_heads": 1}),
    "qwen2": ("Qwen2ForCausalLM", DENSE),
    "qwen2-tied": ("Qwen2ForCausalLM", DENSE | {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "qwen3": ("Qwen3ForCausalLM", DENSE | {"head_dim": 16}),
    "qwen3-biases-tied": (
        "Qwen3ForCausalLM",
        DENSE | {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "phi3": ("Phi3ForCausalLM", DENSE),
    "phi3-grouped-once": ("Phi3ForCausalLM", DENSE | {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "gemma": ("GemmaForCausalLM", DENSE | {"head_dim": 16}),
    "gemma2": ("Gemma2ForCausalLM", DENSE | {"head_dim": 12}),
    "gemma3": ("Gemma3ForCausalLM", DENSE | {"head_dim": 16}),
    "mixtral": ("MixtralForCausalLM", DENSE | {"num_local_experts": 4}),
    "qwen2-moe": ("Qwen2MoeForCausalLM", QWEN_MOE | {"shared_expert_intermediate_size": 40}),
    "qwen2-moe-some-dense": (
        "Qwen2MoeForCausalLM",
        QWEN_MOE | {"shared_expert_intermediate_size": 40, "decoder_sparse_step": 2, "num_hidden_layers": 4},
    ),
    "qwen3-moe": ("Qwen3MoeForCausalLM", QWEN_MOE | {"head_dim": 16}),
    "qwen3-moe-some-dense": (
        "Qwen3MoeForCausalLM",
        QWEN_MOE | {"head_dim": 8, "attention_bias": True, "mlp_only_layers": [1], "tie_word_embeddings": True},
    ),
}
WITHOUT_FORMULAS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", OTHER_NAMES | {"vocab_size": 160, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "opt": (
        "OPTForCausalLM",
        OTHER_NAMES
        | {"vocab_size": 160, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    ),
    "gpt-neox": ("GPTNeoXForCausalLM", DENSE),
    "bloom": ("BloomForCausalLM", OTHER_NAMES | {"vocab_size": 160, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "phi": ("PhiForCausalLM", DENSE),
    "falcon": ("FalconForCausalLM", DENSE),
    "olmo2": ("Olmo2ForCausalLM", DENSE),
    "granite": ("GraniteForCausalLM", DENSE),
    "cohere": ("CohereForCausalLM", DENSE),
    "starcoder2": ("Starcoder2ForCausalLM", DENSE),
    "stablelm": ("StableLmForCausalLM", DENSE),
    "nemotron": ("NemotronForCausalLM", DENSE | {"head_dim": 8}),
    "olmoe": ("OlmoeForCausalLM", DENSE | {"num_experts": 4, "num_experts_per_tok": 2}),
    "gpt-oss": (
        "GptOssForCausalLM",
        DENSE | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    ),
    "deepseek-v3": (
        "DeepseekV3ForCausalLM",
        DENSE
        | {
            "num_key_value_heads": 4,
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    "glm4": ("Glm4ForCausalLM", DENSE | {"head_dim": 8}),
}


def main(target: Path, only: str = "") -> None:
    """Write one JSON a model into `target`."""
    for name, (class_name, values) in (WITH_FORMULAS | WITHOUT_FORMULAS).items():
        if only in name:
            captured = capture(class_name, values) | {"has_formula": name in WITH_FORMULAS}
            (target / f"{name}.json").write_text(as_text(captured), encoding="utf-8")
            print(f"{name}: {len(captured['tensors'])} tensors")


def as_text(captured: dict[str, Any]) -> str:
    """Return JSON with one line a tensor, so that a change of a layout is a readable difference."""
    rest = {key: value for key, value in captured.items() if key != "tensors"}
    lines = ",\n".join(f"  {json.dumps(tensor)}" for tensor in captured["tensors"])
    return f'{json.dumps(rest, sort_keys=True)[:-1]},\n "tensors": [\n{lines}\n]}}\n'


def capture(class_name: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return config and tensors of a tiny random model: name, dtype, shape, and number of its shard when in several."""
    import torch
    import transformers

    torch.manual_seed(0)
    model_class = getattr(transformers, class_name)
    model = model_class(model_class.config_class(**values)).to(torch.bfloat16)
    with tempfile.TemporaryDirectory() as directory:
        whole, parts = Path(directory, "whole"), Path(directory, "parts")
        model.save_pretrained(whole)
        model.save_pretrained(parts, max_shard_size="24KB")
        one = {name: tensor for file in whole.glob("*.safetensors") for name, tensor in header(file).items()}
        files = sorted(parts.glob("*.safetensors"))
        several = {name: (*t, n) for n, file in enumerate(files) for name, t in header(file).items()}
        assert one == {name: (dtype, shape) for name, (dtype, shape, _) in several.items()}, class_name
        assert len(files) > 1, f"{class_name}: {len(files)} shards"
        config = json.loads((whole / "config.json").read_text())
    tensors = [[name, *several[name]] for name in sorted(several)]
    return {"transformers": transformers.__version__, "config": config, "tensors": tensors}


def header(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtype and shape of every tensor of a safetensors file."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    described = json.loads(raw[8 : 8 + length])
    return {
        name: (entry["dtype"], tuple(entry["shape"])) for name, entry in described.items() if name != "__metadata__"
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:3])
