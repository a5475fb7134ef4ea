"""Other bytes under an intact header, and files that are longer, foreign or unreadable.

Source: taxonomy rows D01, D02, D15, D20.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import numpy as np

from harness.checkpoint.header import BITS_OF_DTYPE, LENGTH_BYTES
from harness.errors import FaultNotApplicable, ScenarioInvalid
from harness.faults.facts import file_facts, loaded_weights_id, refusal, shard_facts
from harness.faults.fault import Injected, parameters_of
from harness.faults.target import Target
from harness.faults.tensors import replace_tensor
from harness.faults.values import FLOAT_DTYPES, from_float32, from_words, to_float32, words

PAGE = b"<!DOCTYPE html>\n<html><head><title>403 Forbidden</title></head><body>Access denied.</body></html>\n"
FOREIGN = ("html", "empty", "zeros", "zip")
VALUES = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}
HOW = ("dangling_link", "mode")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendShard:
    """A weight file with bytes behind its end."""

    name: ClassVar[str] = "extend_shard"
    fault_id: ClassVar[str] = "D01"
    shard: int | str
    by: int

    def __post_init__(self) -> None:
        if self.by < 1:
            raise ScenarioInvalid(f"extend_shard: by={self.by}, expected at least 1")

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def damage(self, target: Path, *, old: Path, random: Random) -> Injected:
        own = Target.open(target, old=old)
        name = own.shard_name(self.shard)
        size = (target / name).stat().st_size
        own.extend(name, random.randbytes(self.by))
        seen = (target / name).stat().st_size
        refused = refusal(target / name)
        return Injected(
            fault=self.name,
            fault_id=self.fault_id,
            proved=seen == size + self.by and refused is not None,
            because=f'"{name}" had {size:,} bytes, has {seen:,}, expected {size + self.by:,}; its header '
            + ("still fits" if refused is None else "asks for fewer"),
            before={"shard": name, "size_bytes": size},
            after={"size_bytes": seen, "defect": refused},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DamageHeader:
    """A weight file whose header is no JSON any more; its size is as before."""

    name: ClassVar[str] = "damage_header"
    fault_id: ClassVar[str] = "D01"
    shard: int | str

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def damage(self, target: Path, *, old: Path, random: Random) -> Injected:
        own = Target.open(target, old=old)
        name = own.shard_name(self.shard)
        before = file_facts(target / name) or {}
        refused_before = refusal(target / name)
        own.overwrite(name, LENGTH_BYTES, b"\xff")  # the "{" that begins the header
        after = file_facts(target / name) or {}
        refused = refusal(target / name)
        same_size = after.get("size_bytes") == before.get("size_bytes")
        return Injected(
            fault=self.name,
            fault_id=self.fault_id,
            proved=refused_before is None and refused is not None and same_size and after != before,
            because=f'"{name}" has {after.get("size_bytes", 0):,} bytes, had {before.get("size_bytes", 0):,}; '
            f"its header was {'whole' if refused_before is None else 'damaged'}, is "
            f"{'whole' if refused is None else 'no JSON'}",
            before={"shard": name, **before, "defect": refused_before},
            after={**after, "defect": refused},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignFile:
    """A web page, nothing, zeros or a zip archive under the name of a weight file."""

    name: ClassVar[str] = "foreign_file"
    fault_id: ClassVar[str] = "D02"
    shard: int | str
    content: str

    def __post_init__(self) -> None:
        if self.content not in FOREIGN:
            raise ScenarioInvalid(f'foreign_file: content "{self.content}" is unknown; known: {", ".join(FOREIGN)}')

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def damage(self, target: Path, *, old: Path, random: Random) -> Injected:
        own = Target.open(target, old=old)
        name = own.shard_name(self.shard)
        before = file_facts(target / name) or {}
        if self.content == "zeros":
            own.zero_from(name, 0)
            is_there = _is_zero(target / name, before["size_bytes"])
        else:
            wanted = {"html": PAGE, "empty": b"", "zip": b"PK\x03\x04" + random.randbytes(1024)}[self.content]
            own.write(name, wanted)
            is_there = _reads(target / name, wanted)
        refused = refusal(target / name)
        after = file_facts(target / name) or {}
        return Injected(
            fault=self.name,
            fault_id=self.fault_id,
            proved=is_there and refused is not None and after != before,
            because=f'"{name}" had {before["size_bytes"]:,} bytes, has {after.get("size_bytes", 0):,}, which '
            f"{'are' if is_there else 'are not'} the {self.content} asked for",
            before={"shard": name, **before},
            after={**after, "defect": refused},
        )


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
        was = own.read(found)
        values = words(was).reshape(-1).copy()
        bits = BITS_OF_DTYPE[found.dtype]
        bit = bits - 2 if self.bit is None else self.bit
        element = random.randrange(values.size) if self.element is None and values.size else self.element or 0
        if not (0 <= element < values.size and 0 <= bit < bits):
            raise FaultNotApplicable(
                f'"{found.name}" has {values.size:,} elements of {bits} bits: no bit {bit} of element {element:,}'
            )
        values[element] ^= values.dtype.type(1 << bit)
        return replace_tensor(self, own, found, was, from_words(values.reshape(found.shape), found.dtype))


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
        return Injected(
            fault=self.name,
            fault_id=self.fault_id,
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
        before = own.tensor_facts(one), own.tensor_facts(two)
        if before[0] == before[1]:
            raise FaultNotApplicable(f'"{one.name}" and "{two.name}" hold the same values: swapping changes nothing')
        first, second = own.read(one), own.read(two)
        if one.shard == two.shard:
            own.replace_tensors(one.shard, {one.name: second, two.name: first})
        else:
            own.replace_tensors(one.shard, {one.name: second})
            own.replace_tensors(two.shard, {two.name: first})
        after = own.tensor_facts(one), own.tensor_facts(two)
        proved = after == (before[1], before[0])
        return Injected(
            fault=self.name,
            fault_id=self.fault_id,
            proved=proved,
            because=f'"{one.name}" and "{two.name}" {"hold" if proved else "do not hold"} each other\'s values',
            before={one.name: before[0], two.name: before[1]},
            after={one.name: after[0], two.name: after[1]},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PreviousShard:
    """One weight file of the old checkpoint under the new one's name: same header, the bytes of a step before."""

    name: ClassVar[str] = "previous_shard"
    fault_id: ClassVar[str] = "D15"
    shard: int | str

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def damage(self, target: Path, *, old: Path, random: Random) -> Injected:
        own = Target.open(target, old=old)
        name = own.shard_name(self.shard)
        wanted = shard_facts(old / name)
        before = shard_facts(target / name)
        if wanted is None:
            raise FaultNotApplicable(f'"{old / name}" is absent or damaged: the old checkpoint has no such weight file')
        if wanted["layout"] != (before or {}).get("layout"):
            raise FaultNotApplicable(
                f'"{name}" has other tensors, shapes or dtypes in "{old}": its header would show it'
            )
        weights = loaded_weights_id(target)
        own.bring(old / name, name)
        after, now = shard_facts(target / name), loaded_weights_id(target)
        return Injected(
            fault=self.name,
            fault_id=self.fault_id,
            proved=after == wanted and after != before and now not in (None, weights),
            because=f'"{name}" {"is" if after == wanted else "is not"} the old checkpoint\'s; an engine would load '
            f"{now}, the new checkpoint is {weights}",
            before={"shard": name, "weights_id": weights, **(before or {})},
            after={"weights_id": now, **(after or {})},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadableFile:
    """A file that is listed and cannot be read: a link whose target is absent, or no permission."""

    name: ClassVar[str] = "unreadable_file"
    fault_id: ClassVar[str] = "D20"
    shard: int | str
    how: str

    def __post_init__(self) -> None:
        if self.how not in HOW:
            raise ScenarioInvalid(f'unreadable_file: how "{self.how}" is unknown; known: {", ".join(HOW)}')

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def damage(self, target: Path, *, old: Path, random: Random) -> Injected:
        own = Target.open(target, old=old)
        name = own.shard_name(self.shard)
        before = _access(target / name)
        if self.how == "mode":
            own.set_mode(name, 0)
        else:
            own.link(name, f"../blobs/{random.randbytes(20).hex()}")
        after = _access(target / name)
        is_listed = name in os.listdir(target)
        return Injected(
            fault=self.name,
            fault_id=self.fault_id,
            proved=before["read"] == "1 byte" and is_listed and "Error" in after["read"],
            because=f'"{name}" is {"listed" if is_listed else "absent"}; reading it gave {before["read"]} before, '
            f"gives {after['read']}"
            + (" (this user may read everything)" if after["mode"] == "000" and after["read"] == "1 byte" else ""),
            before={"shard": name, **before},
            after=after,
        )


def _access(path: Path) -> dict[str, str]:
    status = path.lstat()
    try:
        with path.open("rb") as file:
            read = f"{len(file.read(1))} byte"
    except OSError as error:
        read = f"{type(error).__name__} ({error.strerror})"
    kind = "link" if stat.S_ISLNK(status.st_mode) else "file"
    return {"kind": kind, "mode": f"{stat.S_IMODE(status.st_mode):03o}", "read": read}


def _is_zero(path: Path, size_bytes: int) -> bool:
    if path.stat().st_size != size_bytes:
        return False
    with path.open("rb") as file:
        return all(not block.strip(b"\0") for block in iter(lambda: file.read(1 << 22), b""))


def _reads(path: Path, wanted: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(wanted) + 1) == wanted


def extend_shard(shard: int | str = -1, *, by: int = 1) -> ExtendShard:
    """Put `by` random bytes behind the end of a weight file. Source: taxonomy row D01."""
    return ExtendShard(shard=shard, by=by)


def damage_header(shard: int | str = -1) -> DamageHeader:
    """Overwrite the first byte of a weight file's header, which is then no JSON. Source: taxonomy row D01."""
    return DamageHeader(shard=shard)


def foreign_file(shard: int | str = -1, *, content: str = "html") -> ForeignFile:
    """Put something else under a weight file's name: "html", "empty", "zeros" or "zip". Source: taxonomy row D02."""
    return ForeignFile(shard=shard, content=content)


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


def previous_shard(shard: int | str = -1) -> PreviousShard:
    """Put a weight file of the old checkpoint, with the same header, in place of the new one. Source: row D15."""
    return PreviousShard(shard=shard)


def unreadable_file(shard: int | str = -1, *, how: str = "dangling_link") -> UnreadableFile:
    """Make a weight file a "dangling_link", or take every permission from it with "mode" (root reads it all the same).

    Source: taxonomy row D20.
    """
    return UnreadableFile(shard=shard, how=how)
