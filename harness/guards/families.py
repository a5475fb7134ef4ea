"""What checkpoints of the plain decoder families hold, from their config alone: no model library is needed.

Source: what transformers writes for tiny models of each family, captured in this repository's tests; the defaults of absent
keys are those of the config classes of transformers. Parallel layers as in vLLM's model files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.guards.expected import (
    MAX_EXPERTS,
    ConfigUnusable,
    Expected,
    ExpectedTensor,
    Fusion,
    LayerKind,
    Loading,
    architecture,
    size,
)

Tensors = dict[str, ExpectedTensor]

ATTENTION_INPUT = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
ATTENTION = (*ATTENTION_INPUT, "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
FOUR_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """How a family names its experts and their sizes."""

    block: str = "mlp"
    gate: str = "gate_proj"
    down: str = "down_proj"
    up: str = "up_proj"
    both: str = "gate_up_proj"  # where all experts of a layer are stored in two tensors
    count_keys: tuple[str, ...] = ("num_experts", "num_local_experts")
    intermediate_key: str = "moe_intermediate_size"
    has_shared: bool = False
    some_layers_dense: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What sets one family apart from a Llama without biases."""

    defaults: Mapping[str, Any] = field(default_factory=dict)  # of its config class, where they decide names or shapes
    is_fused: bool = False  # stores qkv_proj and gate_up_proj
    has_head_norms: bool = False
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    biases: tuple[tuple[str, tuple[str, ...]], ...] = ()  # config key, or "" for always: modules with a bias
    dropped_biases: tuple[str, ...] = ()  # transformers has them, vLLM's model does not
    experts: Experts | None = None


BY_FLAG = ("attention_bias", ATTENTION)
GEMMA = {"head_dim": 256, "tie_word_embeddings": True}

FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(biases=(BY_FLAG, ("mlp_bias", MLP))),
    "MistralForCausalLM": Family(defaults={"num_key_value_heads": 8}),
    "Qwen2ForCausalLM": Family(defaults={"num_key_value_heads": 32}, biases=(("", ATTENTION_INPUT),)),
    "Qwen3ForCausalLM": Family(
        defaults={"num_key_value_heads": 32, "head_dim": 128},
        has_head_norms=True,
        biases=(BY_FLAG,),
        dropped_biases=("self_attn.o_proj",),
    ),
    "Phi3ForCausalLM": Family(is_fused=True),
    "GemmaForCausalLM": Family(
        defaults=GEMMA | {"num_key_value_heads": 16}, biases=(BY_FLAG,), dropped_biases=ATTENTION
    ),
    "Gemma2ForCausalLM": Family(defaults=GEMMA | {"num_key_value_heads": 4}, norms=FOUR_NORMS, biases=(BY_FLAG,)),
    "Gemma3ForCausalLM": Family(
        defaults=GEMMA | {"num_key_value_heads": 4}, norms=FOUR_NORMS, biases=(BY_FLAG,), has_head_norms=True
    ),
    "SmolLM3ForCausalLM": Family(
        defaults={"num_key_value_heads": 4, "tie_word_embeddings": True}, biases=(BY_FLAG, ("mlp_bias", MLP))
    ),
    "MixtralForCausalLM": Family(
        defaults={"num_key_value_heads": 8, "num_local_experts": 8},
        experts=Experts(
            block="block_sparse_moe",
            gate="w1",
            down="w2",
            up="w3",
            both="w13",
            count_keys=("num_local_experts",),
            intermediate_key="intermediate_size",
            some_layers_dense=False,
        ),
    ),
    "Qwen2MoeForCausalLM": Family(
        defaults={
            "num_key_value_heads": 16,
            "qkv_bias": True,
            "num_local_experts": 60,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
        biases=(("qkv_bias", ATTENTION_INPUT),),
        experts=Experts(has_shared=True),
    ),
    "Qwen3MoeForCausalLM": Family(
        defaults={"num_key_value_heads": 4, "num_local_experts": 128, "moe_intermediate_size": 768},
        has_head_norms=True,
        biases=(BY_FLAG,),
        dropped_biases=("self_attn.o_proj",),
        experts=Experts(),
    ),
}


def expected_tensors(config: Mapping[str, Any]) -> Expected | None:
    """Return what the config promises; None for an architecture whose names are not known here.

    Raises: ConfigUnusable when a value that decides shapes is absent or not a positive integer.
    """
    family = FAMILIES.get(architecture(config) or "")
    if family is None:
        return None
    config = {**family.defaults, **config}
    biased = frozenset(name for key, names in family.biases if not key or config.get(key) is True for name in names)
    hidden, rows = size(config, "hidden_size"), size(config, "vocab_size")
    attention, attention_fusion = _attention(family, config, hidden, biased)
    norms: Tensors = {f"{name}.weight": ExpectedTensor((hidden,)) for name in family.norms}
    mlp, mlp_fusion = _mlp("mlp", size(config, "intermediate_size"), hidden, biased, is_fused=family.is_fused)
    embeddings = ExpectedTensor((rows, hidden), Loading.VOCABULARY)
    of_model: Tensors = {"model.embed_tokens.weight": embeddings, "model.norm.weight": ExpectedTensor((hidden,))}
    tied = config.get("tie_word_embeddings") is True
    if not tied:
        of_model["lm_head.weight"] = embeddings
    number = _expert_count(family.experts, config)
    sparse = None
    if family.experts is not None and number:
        experts, fusions = _experts(family.experts, config, hidden, number)
        sparse = LayerKind(attention | experts | norms, (attention_fusion, *fusions))
    dense_only = config.get("mlp_only_layers") if family.experts and family.experts.some_layers_dense else None
    return Expected(
        layers=size(config, "num_hidden_layers"),
        dense=LayerKind(attention | mlp | norms, (attention_fusion, mlp_fusion)),
        sparse=sparse,
        sparse_step=size(config, "decoder_sparse_step", 1) if sparse else 1,
        dense_layers=frozenset(x for x in dense_only if type(x) is int)
        if isinstance(dense_only, list)
        else frozenset(),
        experts=number,
        has_experts=sparse is not None,
        of_model=of_model,
        tied=tied,
        dropped=frozenset(f"{name}.bias" for name in family.dropped_biases if name in biased),
    )


def _attention(
    family: Family, config: Mapping[str, Any], hidden: int, biased: frozenset[str]
) -> tuple[Tensors, Fusion]:
    heads = size(config, "num_attention_heads")
    kv_heads = size(config, "num_key_value_heads", heads)
    if config.get("head_dim") is None and hidden % heads:
        raise ConfigUnusable(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    head = size(config, "head_dim", max(hidden // heads, 1))
    queries, keys = heads * head, kv_heads * head
    parts = _linears(
        {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}, hidden, "qkv", biased
    )
    whole = _linears({"self_attn.qkv_proj": queries + 2 * keys}, hidden, "qkv", _as_whole(biased, ATTENTION_INPUT))
    tensors, fusion = _either(parts, whole, is_whole=family.is_fused)
    tensors |= _row_parallel("self_attn.o_proj", hidden, queries, biased)
    if family.has_head_norms:
        tensors |= {f"self_attn.{name}.weight": ExpectedTensor((head,)) for name in ("q_norm", "k_norm")}
    return tensors, fusion


def _mlp(
    block: str, intermediate: int, hidden: int, biased: frozenset[str], *, is_fused: bool = False
) -> tuple[Tensors, Fusion]:
    gate, up, both = f"{block}.gate_proj", f"{block}.up_proj", f"{block}.gate_up_proj"
    group = f"{block}.gate_up"
    parts = _linears({gate: intermediate, up: intermediate}, hidden, group, biased)
    whole = _linears({both: 2 * intermediate}, hidden, group, _as_whole(biased, (gate, up)))
    tensors, fusion = _either(parts, whole, is_whole=is_fused)
    return tensors | _row_parallel(f"{block}.down_proj", hidden, intermediate, biased), fusion


def _experts(
    experts: Experts, config: Mapping[str, Any], hidden: int, number: int
) -> tuple[Tensors, tuple[Fusion, ...]]:
    """Return router, experts and what they share; some writers store all experts of a layer in two tensors."""
    intermediate, block = size(config, experts.intermediate_key), experts.block
    rows = ExpectedTensor((intermediate, hidden), Loading.EXPERT, f"{block}.experts.in")
    columns = ExpectedTensor((hidden, intermediate), Loading.EXPERT, f"{block}.experts.out")
    each = {experts.gate: rows, experts.up: rows, experts.down: columns}
    parts: Tensors = {
        f"{block}.experts.{expert}.{name}.weight": tensor for expert in range(number) for name, tensor in each.items()
    }
    whole: Tensors = {
        f"{block}.experts.{experts.both}": ExpectedTensor((number, 2 * intermediate, hidden), Loading.EXPERT),
        f"{block}.experts.{experts.down}": ExpectedTensor((number, hidden, intermediate), Loading.EXPERT),
    }
    tensors: Tensors = {f"{block}.gate.weight": ExpectedTensor((number, hidden))} | parts
    fusions = [Fusion(tuple(parts), whole)]
    if experts.has_shared:
        tensors[f"{block}.shared_expert_gate.weight"] = ExpectedTensor((1, hidden))
        shared_size = size(config, "shared_expert_intermediate_size")
        shared, fusion = _mlp(f"{block}.shared_expert", shared_size, hidden, frozenset())
        tensors |= shared
        fusions.append(fusion)
    return tensors, tuple(fusions)


def _expert_count(experts: Experts | None, config: Mapping[str, Any]) -> int:
    if experts is None:
        return 0
    key = next(key for key in experts.count_keys if config.get(key) is not None or key == experts.count_keys[-1])
    return 0 if config.get(key) == 0 else size(config, key, limit=MAX_EXPERTS)


def _linears(rows: Mapping[str, int], columns: int, group: str, biased: frozenset[str]) -> Tensors:
    """Return weights and biases of column-parallel layers that the engine keeps as one."""
    tensors: Tensors = {}
    for name, length in rows.items():
        tensors[f"{name}.weight"] = ExpectedTensor((length, columns), Loading.ROWS, f"{group}.weight")
        if name in biased:
            tensors[f"{name}.bias"] = ExpectedTensor((length,), Loading.ROWS, f"{group}.bias")
    return tensors


def _row_parallel(name: str, rows: int, columns: int, biased: frozenset[str]) -> Tensors:
    tensors: Tensors = {f"{name}.weight": ExpectedTensor((rows, columns), Loading.COLUMNS)}
    if name in biased:
        tensors[f"{name}.bias"] = ExpectedTensor((rows,))
    return tensors


def _as_whole(biased: frozenset[str], parts: Iterable[str]) -> frozenset[str]:
    whole = {"self_attn.q_proj": "self_attn.qkv_proj", "mlp.gate_proj": "mlp.gate_up_proj"}
    return frozenset(whole[part] for part in parts if part in biased and part in whole)


def _either(parts: Tensors, whole: Tensors, *, is_whole: bool) -> tuple[Tensors, Fusion]:
    usual, other = (whole, parts) if is_whole else (parts, whole)
    return usual, Fusion(tuple(usual), other)
