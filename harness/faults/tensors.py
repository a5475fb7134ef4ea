"""Reshaped tensors: shapes that do not belong to the config, or the same shape with the elements elsewhere.

Source: incident write-up (expected [4096, 12288], got [4096, 12320]); fault taxonomy rows D04 to D08 and C02.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import numpy as np

from harness.checkpoint.copy import RawTensor, load_shard
from harness.checkpoint.header import Tensor
from harness.errors import FaultNotApplicable, ScenarioInvalid
from harness.faults.facts import CONFIG_NAME, digest_of, facts_of, read_json, weight_facts
from harness.faults.fault import Fault, Injected, parameters_of
from harness.faults.proof import prove
from harness.faults.target import Target
from harness.faults.values import from_words, words

FUSED_PARTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", ".experts.")
SMALL_PARTS = ("bias", "scale", "scale_inv", "scales", "zero_point", "qzeros")


@dataclass(frozen=True, slots=True, kw_only=True)
class WidenTensor:
    """A tensor with extra rows or columns."""

    name: ClassVar[str] = "widen_tensor"
    fault_id: ClassVar[str] = "D08"
    tensor: str
    dim: int
    by: int
    at: str

    def __post_init__(self) -> None:
        if self.by < 1 or self.at not in ("start", "end"):
            raise ScenarioInvalid(f'widen_tensor: by={self.by}, at="{self.at}"; expected by >= 1, at "start" or "end"')

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def damage(self, target: Path, *, old: Path, random: Random) -> Injected:
        own = Target.open(target, old=old)
        found = own.find(self.tensor)
        was = own.read(found)
        values = words(was)
        size = _size(found.shape, self.dim, found.name)
        picks = [random.randrange(size) for _ in range(self.by)]
        extra = np.take(values, picks, axis=self.dim)
        parts = (extra, values) if self.at == "start" else (values, extra)
        wanted = from_words(np.concatenate(parts, axis=self.dim), found.dtype)
        return replace_tensor(self, own, found, was, wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class NarrowTensor:
    """A tensor with its last rows or columns cut off."""

    name: ClassVar[str] = "narrow_tensor"
    fault_id: ClassVar[str] = "D07"
    tensor: str
    dim: int
    by: int

    def __post_init__(self) -> None:
        if self.by < 1:
            raise ScenarioInvalid(f"narrow_tensor: by={self.by}, expected at least 1")

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def damage(self, target: Path, *, old: Path, random: Random) -> Injected:
        own = Target.open(target, old=old)
        found = own.find(self.tensor)
        size = _size(found.shape, self.dim, found.name)
        if size <= self.by:
            raise FaultNotApplicable(f'"{found.name}" {list(found.shape)} has no {self.by} to cut in dim {self.dim}')
        was = own.read(found)
        kept = np.take(words(was), range(size - self.by), axis=self.dim)
        return replace_tensor(self, own, found, was, from_words(kept, found.dtype))


@dataclass(frozen=True, slots=True, kw_only=True)
class TransposeTensor:
    """A square matrix with rows and columns exchanged: no shape shows it."""

    name: ClassVar[str] = "transpose_tensor"
    fault_id: ClassVar[str] = "D15"
    tensor: str

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def damage(self, target: Path, *, old: Path, random: Random) -> Injected:
        own = Target.open(target, old=old)
        found = own.find(self.tensor)
        if len(found.shape) != 2 or found.shape[0] != found.shape[1]:
            raise FaultNotApplicable(
                f'"{found.name}" {list(found.shape)} is not square: transposed it would change its shape, '
                "which is relayout_tensor"
            )
        was = own.read(found)
        return replace_tensor(self, own, found, was, from_words(words(was).T, found.dtype))


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayoutTensor:
    """The same bytes under another shape with the same number of elements."""

    name: ClassVar[str] = "relayout_tensor"
    fault_id: ClassVar[str] = "D07"
    tensor: str
    shape: tuple[int, ...] | None

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def damage(self, target: Path, *, old: Path, random: Random) -> Injected:
        own = Target.open(target, old=old)
        found = own.find(self.tensor)
        shape = self.shape or _other_shape(found.shape)
        if shape == found.shape or prod(shape) != prod(found.shape):
            raise FaultNotApplicable(
                f'"{found.name}" {list(found.shape)} cannot be laid out as {list(shape)}: '
                "expected another shape with the same number of elements"
            )
        was = own.read(found)
        return replace_tensor(self, own, found, was, RawTensor(found.dtype, shape, was.data))


@dataclass(frozen=True, slots=True, kw_only=True)
class DropTensor:
    """A tensor that is in no file and not in the weight index either."""

    name: ClassVar[str] = "drop_tensor"
    tensor: str

    @property
    def fault_id(self) -> str:
        if "norm" in self.tensor or self.tensor.endswith(SMALL_PARTS):
            return "D06"
        return "D05" if any(part in self.tensor for part in FUSED_PARTS) else "D04"

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def damage(self, target: Path, *, old: Path, random: Random) -> Injected:
        own = Target.open(target, old=old)
        found = own.find(self.tensor)

        def look() -> dict[str, Any]:
            index = own.index()
            is_named = index is not None and found.name in index.get("weight_map", {})
            return {"tensor": found.name, "described": own.described(found), "is_named_in_index": is_named}

        return prove(
            self,
            lambda: own.replace_tensors(found.shard, {found.name: None}),
            look=look,
            holds=lambda before, after: (
                before["described"] is not None and after["described"] is None and not after["is_named_in_index"]
            ),
            told=lambda before, after: (
                f'tensor "{found.name}" is {"still there" if after["described"] else "absent"} in "{found.shard}", '
                f"{'still' if after['is_named_in_index'] else 'not'} named in the weight index"
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WiderWeights:
    """The weights of a model with a larger hidden size under this model's config."""

    name: ClassVar[str] = "wider_weights"
    fault_id: ClassVar[str] = "C02"
    factor: int

    def __post_init__(self) -> None:
        if self.factor < 2:
            raise ScenarioInvalid(f"wider_weights: factor={self.factor}, expected at least 2")

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def damage(self, target: Path, *, old: Path, random: Random) -> Injected:
        own = Target.open(target, old=old)
        hidden = read_json(target / CONFIG_NAME).get("hidden_size")
        if not isinstance(hidden, int):
            raise FaultNotApplicable(f'"{target / CONFIG_NAME}" has no "hidden_size"')
        before = weight_facts(target)
        wanted: dict[str, Any] = {}
        for shard in own.shards():
            changes: dict[str, RawTensor | None] = {}
            for name, tensor in load_shard(target / shard.name).items():
                repeats = [self.factor if size == hidden else 1 for size in tensor.shape]
                wider = from_words(np.tile(words(tensor), repeats), tensor.dtype)
                changes[name] = wider
                wanted[name] = facts_of(wider)
            own.replace_tensors(shard.name, changes)
        after = weight_facts(target)
        changed = sum(after[name]["shape"] != before[name]["shape"] for name in before)
        return Injected.of(
            self,
            proved=changed > 0 and after == wanted,
            because=f"{changed} of {len(before)} tensors have {self.factor} times the config's hidden size of {hidden}",
            before={"hidden_size": hidden, "digest": digest_of(before)},
            after={"changed_tensors": changed, "digest": digest_of(after)},
        )


def replace_tensor(fault: Fault, own: Target, found: Tensor, was: RawTensor, wanted: RawTensor) -> Injected:
    """Write one tensor and prove by reading it back, byte for byte, that it is the wanted one and not `was`."""
    with ThreadPoolExecutor(1, thread_name_prefix="hash") as pool:
        # For the evidence, on a processor of its own while the shard is written.
        facts = pool.map(lambda tensor: facts_of(tensor, threads=1), (was, wanted))
        own.replace_tensors(found.shard, {found.name: wanted})
        before, expected = facts
    is_wanted = own.holds(found, wanted)
    after = expected if is_wanted else own.tensor_facts(found)
    proved = is_wanted and expected != before
    return Injected.of(
        fault,
        proved=proved,
        because=f'tensor "{found.name}" in "{found.shard}" was {_seen(before)}, is {_seen(after)}'
        + ("" if proved else f", expected {_seen(expected)} with another digest than before"),
        before={"tensor": found.name, "shard": found.shard, **before},
        after=dict(after or {}),
    )


def _seen(facts: Mapping[str, Any] | None) -> str:
    return "absent" if facts is None else f"{facts['dtype']} {facts['shape']} ({facts['blake3'][:8]})"


def _size(shape: tuple[int, ...], dim: int, name: str) -> int:
    if not 0 <= dim < len(shape) or shape[dim] == 0:
        raise FaultNotApplicable(f'"{name}" {list(shape)} has no dim {dim} to change')
    return shape[dim]


def _other_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape reversed; where that is the same, with a factor of two moved to the first dimension."""
    if shape != shape[::-1]:
        return shape[::-1]
    if shape and shape[-1] > 1 and shape[-1] % 2 == 0:
        return (2, shape[0] // 2) if len(shape) == 1 else (shape[0] * 2, *shape[1:-1], shape[-1] // 2)
    return shape


def widen_tensor(tensor: str, *, dim: int, by: int, at: str = "start") -> WidenTensor:
    """Add `by` rows or columns to a tensor, copies of its own in seeded order.

    They come first by default: an engine that cuts what is too long then keeps the wrong part, as it does of a tensor
    of another model. With `at="end"` the part that is kept is right, and such an engine answers rightly.
    Source: taxonomy row D08.
    """
    return WidenTensor(tensor=tensor, dim=dim, by=by, at=at)


def narrow_tensor(tensor: str, *, dim: int, by: int) -> NarrowTensor:
    """Cut the last `by` rows or columns off a tensor. Source: taxonomy row D07."""
    return NarrowTensor(tensor=tensor, dim=dim, by=by)


def transpose_tensor(tensor: str) -> TransposeTensor:
    """Transpose a square matrix. Source: taxonomy row D15 (same header, other bytes)."""
    return TransposeTensor(tensor=tensor)


def relayout_tensor(tensor: str, *, shape: tuple[int, ...] | None = None) -> RelayoutTensor:
    """Give a tensor another shape over the same bytes; by default its own shape reversed. Source: taxonomy row D07."""
    return RelayoutTensor(tensor=tensor, shape=shape)


def drop_tensor(tensor: str) -> DropTensor:
    """Leave a tensor out of its shard and of the weight index. Source: taxonomy rows D04, D05, D06; C04 for `lm_head`."""
    return DropTensor(tensor=tensor)


def wider_weights(*, factor: int = 2) -> WiderWeights:
    """Make every dimension that equals the config's hidden size `factor` times as large; rewrites every shard.

    Source: taxonomy row C02.
    """
    return WiderWeights(factor=factor)
