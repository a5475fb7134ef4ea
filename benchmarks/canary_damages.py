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
ROWS_OF_EXCERPT = 64
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


def parts_of(
    kinds: Mapping[str, tuple[str, str | None]], layers: int
) -> Iterator[tuple[dict[str, tuple[str, str | None]], tuple[int, ...], int | None]]:
    """Yield the kinds in groups that can be damaged in a small excerpt: the vocabulary, then layer by layer.

    Each with the layers that such an excerpt needs and how many rows of the vocabulary (None: all).
    """
    apart = {name: kind for name, kind in kinds.items() if not name.startswith("model.layers.")}
    yield apart, (0,), None
    for layer in _layers_in(kinds):
        own = {name: kind for name, kind in kinds.items() if name.startswith(f"model.layers.{layer}.")}
        yield own, (layer, layer + 1 if layer < layers - 1 else layer - 1), ROWS_OF_EXCERPT


def _layers_in(kinds: Mapping[str, object]) -> list[int]:
    return sorted({int(name.split(".")[2]) for name in kinds if name.startswith("model.layers.")})


def renamed(kinds: Mapping[str, tuple[str, str | None]], names: Mapping[str, str]) -> dict[str, tuple[str, str | None]]:
    """Return the same kinds under the names that tensors have in an excerpt."""
    return {names[name]: (kind, other and names[other]) for name, (kind, other) in kinds.items()}


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


def split_shards(
    source: Path, target: Path, alone: Sequence[str], *, layers: Sequence[int] | None = None, rows: int | None = None
) -> dict[str, str]:
    """Copy a checkpoint so that each of the tensors `alone` has a shard of its own and the last shard holds the others.

    So a damage rewrites little, and a damage of a shard is one of a tensor. With `layers` the copy is that of a model of
    these layers alone, with so many `rows` of the vocabulary. Returns the name here of each tensor by its name there.
    """
    target.mkdir(parents=True)
    held: dict[str, RawTensor] = {}
    for file in sorted(source.iterdir()):
        if file.suffix == ".safetensors":
            held |= load_shard(file)
        elif file.name != INDEX:
            shutil.copyfile(file, target / file.name)
    names = dict.fromkeys(held) if layers is None else _kept(held, layers)
    names = {name: new or name for name, new in names.items()}
    tensors = {new: _cut(held[name], rows if name in (EMBEDDING, HEAD) else None) for name, new in names.items()}
    if layers is not None:
        config = json.loads((source / "config.json").read_text())
        config |= {"num_hidden_layers": len(layers), "vocab_size": rows or config["vocab_size"]}
        write_json(target / "config.json", config)
    groups = [(names[name],) for name in alone if name in names]
    rest = tuple(name for name in tensors if (name,) not in groups)
    groups += [rest] if rest else []
    weight_map = {}
    for number, group in enumerate(groups, start=1):
        shard = f"model-{number:05}-of-{len(groups):05}.safetensors"
        save_shard(target / shard, {name: tensors[name] for name in group})
        weight_map |= dict.fromkeys(group, shard)
    total = sum(len(tensor.data) for tensor in tensors.values())
    write_json(target / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return names


def _kept(held: Mapping[str, RawTensor], layers: Sequence[int]) -> dict[str, str | None]:
    """Return the tensors of these layers and of no layer, with the names that they have where there are no other layers."""
    kept: dict[str, str | None] = {}
    for name in held:
        if not name.startswith("model.layers."):
            kept[name] = name
        for place, layer in enumerate(layers):
            if name.startswith(f"model.layers.{layer}."):
                kept[name] = f"model.layers.{place}." + name.removeprefix(f"model.layers.{layer}.")
    return kept


def _cut(tensor: RawTensor, rows: int | None) -> RawTensor:
    if rows is None:
        return tensor
    row_bytes = len(tensor.data) // tensor.shape[0]
    return RawTensor(tensor.dtype, (rows, *tensor.shape[1:]), tensor.data[: rows * row_bytes])


def layers_of(source: Path, chosen: str | None) -> tuple[int, ...]:
    """Return the numbers of the layers to damage: those named, else the first, the middle and the last."""
    count = int(json.loads((source / "config.json").read_text())["num_hidden_layers"])
    if chosen is not None:
        return tuple(int(part) for part in chosen.split(","))
    return tuple(sorted({0, count // 2, count - 1}))
