"""Exact names and shapes that a config promises, for the plain decoder family: Llama, Mistral, Qwen2, Qwen3.

The engine itself is lax: it cuts a tensor that is longer than its layer and does not miss half of a fused parameter
(reference: fault taxonomy D05 and D08), so every dimension is compared for equality here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
LAYER = re.compile(r"^model\.layers\.(\d{1,6})\.(.+)$")
IGNORED = re.compile(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$")  # engines skip these buffers
# the dimension along which the engine's loader cuts without a word
CUT_DIMENSION = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "gate_proj": 0, "up_proj": 0, "o_proj": 1, "down_proj": 1}
FUSED = {
    "q_proj": ("q_proj", "k_proj", "v_proj"),
    "k_proj": ("q_proj", "k_proj", "v_proj"),
    "v_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_proj": ("gate_proj", "up_proj"),
    "up_proj": ("gate_proj", "up_proj"),
}


class ConfigUnusable(ValueError):
    """A config value that decides shapes is absent or no usable number; the message says which."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What a config promises: shapes of the tensors of every layer (by name within the layer) and of the rest."""

    layers: int
    of_layer: Mapping[str, tuple[int, ...]]
    of_model: Mapping[str, tuple[int, ...]]
    tied: bool

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a tensor by its whole name; None when the config does not promise it."""
        match = LAYER.match(name)
        if match is None:
            return self.of_model.get(name)
        return self.of_layer.get(match[2]) if int(match[1]) < self.layers else None


def architecture(config: Mapping[str, Any]) -> str | None:
    """Return the first architecture that a config names."""
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None


def expected_tensors(config: Mapping[str, Any]) -> Expected | None:
    """Return what the config promises; None for an architecture whose names are not known here.

    Raises: ConfigUnusable when a value that decides shapes is absent or not a positive integer.
    """
    family = architecture(config)
    if family not in FAMILIES:
        return None
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    kv_heads = _size(config, "num_key_value_heads", heads)
    if config.get("head_dim") is None and hidden % heads:
        raise ConfigUnusable(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    head = _size(config, "head_dim", max(hidden // heads, 1))
    intermediate, rows = _size(config, "intermediate_size"), _size(config, "vocab_size")
    weights = {
        "self_attn.q_proj": (heads * head, hidden),
        "self_attn.k_proj": (kv_heads * head, hidden),
        "self_attn.v_proj": (kv_heads * head, hidden),
        "self_attn.o_proj": (hidden, heads * head),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }
    of_layer: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in weights.items()}
    for name in _biased(family or "", config):
        of_layer[f"{name}.bias"] = weights[name][:1]
    of_layer |= {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    if family == "Qwen3ForCausalLM":
        of_layer |= {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
    of_model: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (rows, hidden), "model.norm.weight": (hidden,)}
    tied = config.get("tie_word_embeddings", False) is True
    if not tied:
        of_model["lm_head.weight"] = (rows, hidden)
    return Expected(_size(config, "num_hidden_layers"), of_layer, of_model, tied)


def is_cut(name: str, seen: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Say whether the engine would load a tensor of another shape by cutting it, silently."""
    parts = name.split(".")
    dimension = CUT_DIMENSION.get(parts[-2]) if len(parts) >= 2 else None
    if dimension is None or len(seen) != len(expected):
        return False
    if len(seen) == 1:
        return parts[-1] == "bias" and dimension == 0 and seen[0] > expected[0]
    other = 1 - dimension
    return seen[dimension] > expected[dimension] and seen[other] == expected[other]


def _biased(family: str, config: Mapping[str, Any]) -> tuple[str, ...]:
    attention = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    biased: tuple[str, ...] = ()
    if family == "Qwen2ForCausalLM":
        biased += attention
    elif family in ("LlamaForCausalLM", "Qwen3ForCausalLM") and config.get("attention_bias") is True:
        biased += (*attention, "self_attn.o_proj")
    if family == "LlamaForCausalLM" and config.get("mlp_bias") is True:
        biased += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    return biased


def _size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if type(value) is not int or not 0 < value < 2**40:
        raise ConfigUnusable(f'"{key}" is {str(value)[:60]}, expected a positive integer')
    return value
