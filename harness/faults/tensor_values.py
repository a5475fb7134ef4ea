"""Other values under an intact header: what memory, disks and overflow do to a tensor. Source: taxonomy row D15."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import numpy as np

from harness.checkpoint.header import BITS_OF_DTYPE
from harness.errors import FaultNotApplicable, ScenarioInvalid
from harness.faults.fault import Injected, parameters_of
from harness.faults.proof import prove
from harness.faults.target import Target
from harness.faults.tensors import replace_tensor
from harness.faults.values import FLOAT_DTYPES, from_float32, to_float32, words

VALUES = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


@dataclass(frozen=True, slots=True, kw_only=True)
class FlipBit:
    """One bit of one value flipped: the highest of the exponent by default."""

    name: ClassVar[str] = "flip_bit"
    fault_id: ClassVar[str] = "D15"
    tensor: str
    element: int | None
    bit: int | None

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def damage(self, target: Path, *, old: Path, random: Random) -> Injected:
        own = Target.open(target, old=old)
        found = own.find(self.tensor)
        was, wanted = own.read(found), own.read(found)
        values = words(wanted).reshape(-1)
        bits = BITS_OF_DTYPE[found.dtype]
        bit = bits - 2 if self.bit is None else self.bit
        element = random.randrange(values.size) if self.element is None and values.size else self.element or 0
        if not (0 <= element < values.size and 0 <= bit < bits):
            raise FaultNotApplicable(
                f'"{found.name}" has {values.size:,} elements of {bits} bits: no bit {bit} of element {element:,}'
            )
        values[element] ^= values.dtype.type(1 << bit)  # in memory: one page of `wanted` is no longer the file's
        return replace_tensor(self, own, found, was, wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class NonfiniteValues:
    """A tensor with values that are not numbers, or infinite."""

    name: ClassVar[str] = "nonfinite_values"
    fault_id: ClassVar[str] = "D15"
    tensor: str
    count: int
    value: str

    def __post_init__(self) -> None:
        if self.value not in VALUES or self.count < 1:
            raise ScenarioInvalid(
                f'nonfinite_values: value "{self.value}", count {self.count}; '
                f"expected one of {', '.join(VALUES)}, at least 1"
            )

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def damage(self, target: Path, *, old: Path, random: Random) -> Injected:
        own = Target.open(target, old=old)
        found = own.find(self.tensor)
        if found.dtype not in FLOAT_DTYPES:
            raise FaultNotApplicable(f'"{found.name}" is {found.dtype}; expected one of {", ".join(FLOAT_DTYPES)}')
        was = own.read(found)
        values = to_float32(was)
        if values.size < self.count:
            raise FaultNotApplicable(f'"{found.name}" has {values.size:,} values, {self.count:,} were asked for')
        before = int(np.count_nonzero(~np.isfinite(values)))
        values.reshape(-1)[random.sample(range(values.size), self.count)] = VALUES[self.value]
        proof = replace_tensor(self, own, found, was, from_float32(values, found.dtype))
        after = int(np.count_nonzero(~np.isfinite(to_float32(own.read(found)))))
        return Injected.of(
            self,
            proved=proof.proved and after > before,
            because=f'{after} of {values.size} values of "{found.name}" are not finite, {before} were',
            before={**proof.before, "nonfinite": before},
            after={**proof.after, "nonfinite": after},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapTensors:
    """Two tensors of the same dtype and shape, each with the other's values."""

    name: ClassVar[str] = "swap_tensors"
    fault_id: ClassVar[str] = "D15"
    tensor: str
    other: str

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def damage(self, target: Path, *, old: Path, random: Random) -> Injected:
        own = Target.open(target, old=old)
        one, two = own.find(self.tensor), own.find(self.other)
        if one.name == two.name or (one.dtype, one.shape) != (two.dtype, two.shape):
            raise FaultNotApplicable(
                f'"{one.name}" {one.dtype} {list(one.shape)} and "{two.name}" {two.dtype} {list(two.shape)}: '
                "expected two tensors of one dtype and shape"
            )
        first, second = own.read(one), own.read(two)
        if first == second:
            raise FaultNotApplicable(f'"{one.name}" and "{two.name}" hold the same values: swapping changes nothing')

        def swap() -> None:
            if one.shard == two.shard:
                own.replace_tensors(one.shard, {one.name: second, two.name: first})
            else:
                own.replace_tensors(one.shard, {one.name: second})
                own.replace_tensors(two.shard, {two.name: first})

        return prove(
            self,
            swap,
            look=lambda: {one.name: own.tensor_facts(one), two.name: own.tensor_facts(two)},
            holds=lambda before, after: (after[one.name], after[two.name]) == (before[two.name], before[one.name]),
            told=lambda before, after: (
                f'"{one.name}" and "{two.name}" '
                f"{'hold' if after[one.name] == before[two.name] else 'do not hold'} each other's values"
            ),
        )


def flip_bit(tensor: str, *, element: int | None = None, bit: int | None = None) -> FlipBit:
    """Flip one bit of one value; by default the highest exponent bit of a value chosen by the seed.

    `element` counts in row-major order, `bit` from the lowest. Source: taxonomy row D15.
    """
    return FlipBit(tensor=tensor, element=element, bit=bit)


def nonfinite_values(tensor: str, *, count: int = 1, value: str = "nan") -> NonfiniteValues:
    """Put "nan", "inf" or "-inf" in place of `count` values of a tensor. Source: taxonomy row D15."""
    return NonfiniteValues(tensor=tensor, count=count, value=value)


def swap_tensors(tensor: str, other: str) -> SwapTensors:
    """Exchange the values of two tensors of one dtype and shape. Source: taxonomy row D15."""
    return SwapTensors(tensor=tensor, other=other)
