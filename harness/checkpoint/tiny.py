"""A tiny Llama checkpoint with random weights from a seed, as transformers and vLLM read it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.checkpoint.copy import RawTensor, save_shard
from harness.checkpoint.tokenizer import BOS, EOS, MINIMUM_VOCABULARY, PAD, write_byte_tokenizer
from harness.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

CONFIG_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
LOGIT_SPREAD = 3.0  # standard deviation of the logits: prompts and seeds differ by whole nats


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyShape:
    """What decides every byte of a tiny checkpoint."""

    seed: int
    shards: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    dtype: str
    tied: bool

    def __post_init__(self) -> None:
        numbers = {name: value for name, value in asdict(self).items() if name not in ("dtype", "tied")}
        for name, value in numbers.items():
            if not isinstance(value, int) or isinstance(value, bool):
                raise UsageError(f"{name} is {value!r}, expected a whole number")
        if self.dtype not in CONFIG_DTYPES:
            raise UsageError(f'dtype is "{self.dtype}", expected one of {", ".join(CONFIG_DTYPES)}')
        if min(self.shards, self.layers, self.heads, self.kv_heads, self.intermediate) < 1 or self.seed < 0:
            raise UsageError("shards, layers, heads, kv_heads and intermediate must be at least 1, the seed at least 0")
        if self.hidden % (2 * self.heads) or self.heads % self.kv_heads:
            raise UsageError(
                f"hidden {self.hidden} must be an even multiple of heads {self.heads}, "
                f"and heads a multiple of kv_heads {self.kv_heads}"
            )
        if self.vocabulary < MINIMUM_VOCABULARY:
            raise UsageError(f"vocabulary is {self.vocabulary}, expected at least {MINIMUM_VOCABULARY}")
        if self.shards > len(self.shapes()):
            raise UsageError(f"{self.shards} shards for {len(self.shapes())} tensors")

    def as_json(self) -> dict[str, Any]:
        """Return the parameters by name."""
        return asdict(self)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name and shape of every tensor, in the model's order."""
        head = self.hidden // self.heads
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (self.hidden,),
            "self_attn.q_proj.weight": (self.hidden, self.hidden),
            "self_attn.k_proj.weight": (self.kv_heads * head, self.hidden),
            "self_attn.v_proj.weight": (self.kv_heads * head, self.hidden),
            "self_attn.o_proj.weight": (self.hidden, self.hidden),
            "post_attention_layernorm.weight": (self.hidden,),
            "mlp.gate_proj.weight": (self.intermediate, self.hidden),
            "mlp.up_proj.weight": (self.intermediate, self.hidden),
            "mlp.down_proj.weight": (self.hidden, self.intermediate),
        }
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocabulary, self.hidden)}
        for number in range(self.layers):
            shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
        shapes["model.norm.weight"] = (self.hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocabulary, self.hidden)
        return shapes


def write_tiny(shape: TinyShape, target: Path) -> None:
    """Write config, tokenizer and weights into the empty directory `target`."""
    import numpy as np

    generator = np.random.default_rng(shape.seed)
    tensors = {}
    for name, size in shape.shapes().items():
        values = generator.standard_normal(size, dtype=np.float32) * np.float32(_spread(name, size, shape))
        if name.endswith("norm.weight"):
            values = 1 + values
        tensors[name] = encode(values, shape.dtype)
    write_weights(target, tensors, shards=shape.shards)
    write_json(target / "config.json", _config(shape))
    write_json(
        target / "generation_config.json",
        {"_from_model_config": True, "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD},
    )
    write_byte_tokenizer(target, vocabulary=shape.vocabulary)


def _spread(name: str, size: tuple[int, ...], shape: TinyShape) -> float:
    """Return the standard deviation that keeps activations of order one, so that every tensor matters."""
    if name.endswith("norm.weight"):
        return 0.1
    if name == "lm_head.weight" or (name == "model.embed_tokens.weight" and shape.tied):
        return LOGIT_SPREAD / sqrt(shape.hidden)
    if name == "model.embed_tokens.weight":
        return 1.0
    return 1.5 / sqrt(size[1])


def _config(shape: TinyShape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "head_dim": shape.hidden // shape.heads,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": 2048,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "pad_token_id": PAD,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "tie_word_embeddings": shape.tied,
        "torch_dtype": CONFIG_DTYPES[shape.dtype],
        "use_cache": True,
        "vocab_size": shape.vocabulary,
    }


def encode(values: NDArray[np.float32], dtype: str) -> RawTensor:
    """Return float32 values as BF16 (round to nearest even), F16 or F32 bytes; finite values only."""
    import numpy as np

    if dtype == "BF16":
        bits = np.ascontiguousarray(values, dtype="<f4").view("<u4")
        rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
        data = (rounded >> np.uint32(16)).astype("<u2").tobytes()
    else:
        data = values.astype("<f2" if dtype == "F16" else "<f4").tobytes()
    return RawTensor(dtype, tuple(values.shape), data)


def write_weights(target: Path, tensors: Mapping[str, RawTensor], *, shards: int) -> None:
    """Write tensors as one `model.safetensors`, or as that many shards of about equal size with a weight index."""
    if shards == 1:
        save_shard(target / "model.safetensors", tensors)
        return
    total = sum(len(tensor.data) for tensor in tensors.values())
    groups: list[dict[str, RawTensor]] = [{} for _ in range(shards)]
    written, current, left = 0, 0, len(tensors)
    for name, tensor in tensors.items():
        full = written >= total * (current + 1) / shards
        if groups[current] and (full or left <= shards - 1 - current) and current < shards - 1:
            current += 1
        groups[current][name] = tensor
        written += len(tensor.data)
        left -= 1
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, start=1):
        shard = f"model-{number:05d}-of-{shards:05d}.safetensors"
        save_shard(target / shard, group)
        weight_map |= dict.fromkeys(group, shard)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(target / "model.safetensors.index.json", index)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object as the model libraries do: indented, with a last newline."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
