"""What `canary.py sensitivity` injects: every single-tensor damage of the catalogue, into every kind of tensor."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import faults
from harness.checkpoint.copy import RawTensor, load_shard, save_shard
from harness.checkpoint.manifest import Checkpoint, Tensor, read_checkpoint
from harness.checkpoint.tiny import write_json
from harness.faults import Damage

INDEX = "model.safetensors.index.json"
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
PARTS = {  # of a layer, with the part of the same shape that might be taken for it
    "q": ("self_attn.q_proj", None),
    "k": ("self_attn.k_proj", "self_attn.v_proj"),
    "v": ("self_attn.v_proj", None),
    "o": ("self_attn.o_proj", None),
    "gate": ("mlp.gate_proj", "mlp.up_proj"),
    "up": ("mlp.up_proj", None),
    "down": ("mlp.down_proj", None),
    "input norm": ("input_layernorm", "post_attention_layernorm"),
    "post norm": ("post_attention_layernorm", None),
}
# What is done to one value: the numbers of bits in bf16.
BITS = {"exponent, high": 14, "sign": 15, "exponent, low": 7, "mantissa, high": 6, "mantissa, low": 0}
EXTRA = 8  # rows or columns of a widened tensor
RANDOM_DRAWS = 8  # where a damage strikes a row of the vocabulary by chance


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One damage of one tensor."""

    damage: Damage
    row: str  # of the table: the damage
    column: str  # the kind of tensor
    tensors: tuple[str, ...]  # those it changes
    seed: int = 0


def kinds_of(checkpoint: Checkpoint, layers: Sequence[int]) -> dict[str, tuple[str, str | None]]:
    """Return the tensors to damage, each with its kind and the tensor that it may be swapped with, if any."""
    names = {tensor.name for tensor in checkpoint.tensors}
    last = int(checkpoint.config["num_hidden_layers"]) - 1
    kinds: dict[str, tuple[str, str | None]] = {EMBEDDING: ("embedding", HEAD if HEAD in names else None)}
    for layer in layers:
        for kind, (part, twin) in PARTS.items():
            other = f"{layer}.{twin}" if twin else f"{layer + 1 if layer < last else layer - 1}.{part}"
            kinds[f"model.layers.{layer}.{part}.weight"] = (kind, f"model.layers.{other}.weight")
    kinds[NORM] = ("final norm", None)
    if HEAD in names:
        kinds[HEAD] = ("head", None)
    return kinds


def cases(
    split: Path, kinds: Mapping[str, tuple[str, str | None]], *, read_rows: Sequence[int], unread_rows: Sequence[int]
) -> Iterator[Case]:
    """Yield every damage of every tensor in `kinds`; `split` has each of them in a shard of its own.

    Rows of the vocabulary are struck on purpose: some whose tokens the canary's prompts hold, some whose tokens they do not.
    """
    checkpoint = read_checkpoint(split)
    tensors = {tensor.name: tensor for tensor in checkpoint.tensors}
    for name, (kind, other) in kinds.items():
        for row, damage in _whole(tensors[name], other):
            yield Case(damage=damage, row=row, column=kind, tensors=(name, other or name))
        if kind not in ("embedding", "head"):
            for bit_name, bit in BITS.items():
                damage = faults.flip_bit(name, bit=bit)
                yield Case(damage=damage, row=f"flip_bit ({bit_name})", column=kind, tensors=(name,), seed=bit)
            yield Case(damage=faults.nonfinite_values(name), row="nonfinite_values", column=kind, tensors=(name,))
            continue
        width = tensors[name].shape[1]
        for where, rows in (("row read", read_rows), ("row not read", unread_rows)):
            for bit_name, bit in BITS.items():
                for place, row_number in enumerate(rows):
                    element = row_number * width + (37 * place + 5) % width
                    yield Case(
                        damage=faults.flip_bit(name, element=element, bit=bit),
                        row=f"flip_bit ({bit_name})",
                        column=f"{kind}, {where}",
                        tensors=(name,),
                    )
        for seed in range(RANDOM_DRAWS):
            damage = faults.nonfinite_values(name)
            yield Case(damage=damage, row="nonfinite_values", column=kind, tensors=(name,), seed=seed)


def _whole(tensor: Tensor, other: str | None) -> Iterator[tuple[str, Damage]]:
    """Yield the damages that strike a tensor as a whole, each with its name in the table."""
    name = tensor.name
    for dim in range(len(tensor.shape)):
        yield f"widen_tensor (dim {dim}, start)", faults.widen_tensor(name, dim=dim, by=EXTRA)
        yield f"widen_tensor (dim {dim}, end)", faults.widen_tensor(name, dim=dim, by=EXTRA, at="end")
        yield f"narrow_tensor (dim {dim})", faults.narrow_tensor(name, dim=dim, by=EXTRA)
    yield "relayout_tensor", faults.relayout_tensor(name)
    if len(tensor.shape) == 2 and tensor.shape[0] == tensor.shape[1]:
        yield "transpose_tensor", faults.transpose_tensor(name)
    if other is not None:
        yield "swap_tensors", faults.swap_tensors(name, other)
    yield "drop_tensor", faults.drop_tensor(name)
    yield "rename_tensor", faults.rename_tensor(name)
    yield "previous_shard", faults.previous_shard(tensor.shard)
    yield "zero_tail (second half)", faults.zero_tail(tensor.shard)
    for dtype in ("F16", "F32", "I8"):
        yield f"cast_tensor ({dtype})", faults.cast_tensor(name, dtype=dtype)
    yield "flip_dtype_in_header (F16)", faults.flip_dtype_in_header(dtype="F16", tensor=name)
    yield "beyond_fp16_range", faults.beyond_fp16_range(name)
    yield "add_bias", faults.add_bias(name)


def split_shards(source: Path, target: Path, alone: Sequence[str]) -> Path:
    """Copy a checkpoint so that each of these tensors has a shard of its own and the last shard holds the others.

    So a damage rewrites little, and a damage of a shard is one of a tensor.
    """
    target.mkdir(parents=True)
    held: dict[str, RawTensor] = {}
    for file in sorted(source.iterdir()):
        if file.suffix == ".safetensors":
            held |= load_shard(file)
        elif file.name != INDEX:
            shutil.copyfile(file, target / file.name)
    groups = [(name,) for name in alone] + [tuple(name for name in held if name not in set(alone))]
    groups = [group for group in groups if group]
    weight_map = {}
    for number, group in enumerate(groups, start=1):
        shard = f"model-{number:05}-of-{len(groups):05}.safetensors"
        save_shard(target / shard, {name: held[name] for name in group})
        weight_map |= dict.fromkeys(group, shard)
    total = sum(len(tensor.data) for tensor in held.values())
    write_json(target / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return target


def layers_of(source: Path, chosen: str | None) -> tuple[int, ...]:
    """Return the numbers of the layers to damage: those named, else the first, the middle and the last."""
    count = int(json.loads((source / "config.json").read_text())["num_hidden_layers"])
    if chosen is not None:
        return tuple(int(part) for part in chosen.split(","))
    return tuple(sorted({0, count // 2, count - 1}))
