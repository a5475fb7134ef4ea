"""Dtype faults on disk: a header that lies, real casts, and values that only bf16 can hold.

Source: incident write-up (bf16 checkpoint, fp16 engine); fault taxonomy rows D15, D16, C07.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import numpy as np

from harness.checkpoint.copy import RawTensor, load_shard
from harness.checkpoint.header import BITS_OF_DTYPE
from harness.errors import FaultNotApplicable, ScenarioInvalid
from harness.faults.facts import digest_of, facts_of, weight_facts
from harness.faults.fault import Injected, parameters_of
from harness.faults.target import Target
from harness.faults.tensors import replace_tensor
from harness.faults.values import FLOAT_DTYPES, FP16_LARGEST, from_float32, largest_magnitude, to_float32

BF16_LARGEST = 3.3895313892515355e38
CAST_DTYPES = ("F16", "F32", "I8", "BF16")


@dataclass(frozen=True, slots=True, kw_only=True)
class FlipDtypeInHeader:
    """A header that gives another dtype of the same size; the bytes stay."""

    name: ClassVar[str] = "flip_dtype_in_header"
    fault_id: ClassVar[str] = "D16"
    dtype: str
    tensor: str | None

    def __post_init__(self) -> None:
        if self.dtype not in BITS_OF_DTYPE:
            raise ScenarioInvalid(
                f'flip_dtype_in_header: dtype "{self.dtype}" is unknown; known: {", ".join(BITS_OF_DTYPE)}'
            )

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def damage(self, target: Path, *, old: Path, random: Random) -> Injected:
        own = Target.open(target, old=old)
        chosen = None if self.tensor is None else own.find(self.tensor).name
        before = weight_facts(target)
        wanted = dict(before)
        for shard in own.shards():
            changes: dict[str, RawTensor | None] = {}
            for name, tensor in load_shard(target / shard.name).items():
                is_chosen = name == chosen if chosen else tensor.dtype in FLOAT_DTYPES
                if is_chosen and tensor.dtype != self.dtype and _same_size(tensor.dtype, self.dtype):
                    changes[name] = RawTensor(self.dtype, tensor.shape, tensor.data)
                    wanted[name] = {**before[name], "dtype": self.dtype}
            if changes:
                own.replace_tensors(shard.name, changes)
        if wanted == before:
            raise FaultNotApplicable(f'no tensor of "{target}" has another dtype of the same size as "{self.dtype}"')
        after = weight_facts(target)
        flipped = [name for name in before if after.get(name) != before[name]]
        return Injected.of(
            self,
            proved=after == wanted,
            because=f'{len(flipped)} of {len(before)} tensors are labelled "{self.dtype}" over the bytes they had'
            + ("" if after == wanted else "; expected others"),
            before={"dtypes": _dtypes(before), "digest": digest_of(before)},
            after={"dtypes": _dtypes(after), "digest": digest_of(after)},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CastTensor:
    """One tensor stored in another dtype than the config says."""

    name: ClassVar[str] = "cast_tensor"
    fault_id: ClassVar[str] = "D16"
    tensor: str
    dtype: str

    def __post_init__(self) -> None:
        _require_castable(self.name, self.dtype)

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def damage(self, target: Path, *, old: Path, random: Random) -> Injected:
        own = Target.open(target, old=old)
        found = own.find(self.tensor)
        if found.dtype == self.dtype:
            raise FaultNotApplicable(f'"{found.name}" is {found.dtype} already')
        was = own.read(found)
        return replace_tensor(self, own, found, was, from_float32(to_float32(was), self.dtype))


@dataclass(frozen=True, slots=True, kw_only=True)
class CastAll:
    """Every float tensor stored in another dtype than the config says."""

    name: ClassVar[str] = "cast_all"
    fault_id: ClassVar[str] = "D16"
    dtype: str

    def __post_init__(self) -> None:
        _require_castable(self.name, self.dtype)

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def damage(self, target: Path, *, old: Path, random: Random) -> Injected:
        own = Target.open(target, old=old)
        before = weight_facts(target)
        wanted = dict(before)
        for shard in own.shards():
            changes: dict[str, RawTensor | None] = {}
            for name, tensor in load_shard(target / shard.name).items():
                if tensor.dtype in FLOAT_DTYPES and tensor.dtype != self.dtype:
                    cast = from_float32(to_float32(tensor), self.dtype)
                    changes[name] = cast
                    wanted[name] = facts_of(cast)
            if changes:
                own.replace_tensors(shard.name, changes)
        if wanted == before:
            raise FaultNotApplicable(f'every float tensor of "{target}" is {self.dtype} already')
        after = weight_facts(target)
        return Injected.of(
            self,
            proved=after == wanted,
            because=f"dtypes of {len(before)} tensors were {_dtypes(before)}, are {_dtypes(after)}",
            before={"dtypes": _dtypes(before), "digest": digest_of(before)},
            after={"dtypes": _dtypes(after), "digest": digest_of(after)},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BeyondFp16Range:
    """Values that bf16 holds and fp16 does not; with `inverse` the model computes the same in bf16."""

    name: ClassVar[str] = "beyond_fp16_range"
    fault_id: ClassVar[str] = "C07"
    tensor: str
    inverse: str | None
    scale: float | None

    def __post_init__(self) -> None:
        if self.scale is not None and (self.scale <= 1 or not math.log2(self.scale).is_integer()):
            raise ScenarioInvalid(
                f"beyond_fp16_range: scale={self.scale:g}, expected a power of two above 1 (exact in bf16)"
            )

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def damage(self, target: Path, *, old: Path, random: Random) -> Injected:
        own = Target.open(target, old=old)
        scaled = own.find(self.tensor)
        divided = None if self.inverse is None else own.find(self.inverse)
        for tensor in (scaled, divided):
            if tensor is not None and tensor.dtype not in ("BF16", "F32"):
                raise FaultNotApplicable(f'"{tensor.name}" is {tensor.dtype}: only BF16 and F32 reach beyond fp16')
        was = own.read(scaled)
        values = to_float32(was)
        peak = largest_magnitude(values)
        if peak == 0 or not np.isfinite(values).all():
            raise FaultNotApplicable(
                f'"{scaled.name}" holds only zeros, or values that are not finite: it cannot be scaled'
            )
        scale = self.scale or 2.0 ** max(1, math.ceil(math.log2(4 * FP16_LARGEST / peak)))
        if peak * scale > BF16_LARGEST:
            raise FaultNotApplicable(f'"{scaled.name}" times {scale:g} is beyond bf16 as well: its largest is {peak:g}')
        proof = replace_tensor(self, own, scaled, was, from_float32(values * np.float32(scale), scaled.dtype))
        is_compensated = True
        if divided is not None:
            was = own.read(divided)
            smaller = to_float32(was) / np.float32(scale)
            is_compensated = replace_tensor(self, own, divided, was, from_float32(smaller, divided.dtype)).proved
        now = to_float32(own.read(scaled))
        beyond = int(np.count_nonzero(np.abs(now) > FP16_LARGEST))
        new_peak = largest_magnitude(now)
        return Injected.of(
            self,
            proved=proof.proved and is_compensated and beyond > 0,
            because=f'{beyond} of {now.size} values of "{scaled.name}" are beyond {FP16_LARGEST:g}; the largest was '
            f"{peak:.3g}, is {new_peak:.3g}"
            + ("" if divided is None else f'; "{divided.name}" is divided by {scale:g}'),
            before={**proof.before, "largest_magnitude": peak},
            after={**proof.after, "largest_magnitude": new_peak, "values_beyond_fp16": beyond, "scale": scale},
        )


def _require_castable(name: str, dtype: str) -> None:
    if dtype not in CAST_DTYPES:
        raise ScenarioInvalid(f'{name}: no cast to "{dtype}"; known: {", ".join(CAST_DTYPES)}')


def _same_size(dtype: str, other: str) -> bool:
    return BITS_OF_DTYPE[dtype] == BITS_OF_DTYPE[other]


def _dtypes(facts: Mapping[str, Any]) -> dict[str, int]:
    dtypes = [fact["dtype"] for fact in facts.values()]
    return {dtype: dtypes.count(dtype) for dtype in sorted(set(dtypes))}


def flip_dtype_in_header(*, dtype: str = "F16", tensor: str | None = None) -> FlipDtypeInHeader:
    """Label one tensor, or every float tensor of the same element size, with another dtype over the same bytes.

    Source: taxonomy row D16.
    """
    return FlipDtypeInHeader(dtype=dtype, tensor=tensor)


def cast_tensor(tensor: str, *, dtype: str) -> CastTensor:
    """Store one tensor as "F16", "F32" or "I8" (quantised, its scale lost); the config stays. Source: row D16."""
    return CastTensor(tensor=tensor, dtype=dtype)


def cast_all(*, dtype: str) -> CastAll:
    """Store every float tensor as "F16", "F32" or "I8"; the config stays. Source: taxonomy row D16."""
    return CastAll(dtype=dtype)


def beyond_fp16_range(tensor: str, *, inverse: str | None = None, scale: float | None = None) -> BeyondFp16Range:
    """Multiply a bf16 tensor by a power of two until it holds values that overflow in fp16.

    With `inverse` that tensor is divided by the same power: for an `up_proj` and the `down_proj` of its layer the model
    then computes the same in bf16, so that only a launch with `--dtype float16` is wrong. `scale` None takes the
    smallest power that puts the largest value beyond four times fp16's largest. Source: taxonomy row C07.
    """
    return BeyondFp16Range(tensor=tensor, inverse=inverse, scale=scale)
