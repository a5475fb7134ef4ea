"""Half-synced files at rest: what a copy leaves behind when it stops, or when old and new files end up side by side.

Source: incident write-up ("weight file not found" on machines where the sync was late); taxonomy rows D01, D02, D03,
D12, D15, D19.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import numpy as np

from harness.errors import FaultNotApplicable, ScenarioInvalid
from harness.faults.fault import Injected, parameters_of
from harness.faults.proof import Facts, prove, told_of_file, weight_file_facts
from harness.faults.target import Target

BLOCK_BYTES = 1024 * 1024
POINTER_VERSION = "version https://git-lfs.github.com/spec/v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingShard:
    """A weight file that is not there; a weight index, if any, still names it."""

    name: ClassVar[str] = "missing_shard"
    fault_id: ClassVar[str] = "D03"
    shard: int | str

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def damage(self, target: Path, *, old: Path, random: Random) -> Injected:
        own = Target.open(target, old=old)
        name = own.shard_name(self.shard)

        def look() -> dict[str, Any]:
            index = own.index()
            is_named = None if index is None else name in index["weight_map"].values()
            return {**weight_file_facts(target / name), "is_named_in_index": is_named}

        def told(before: Facts, after: Facts) -> str:
            named = {
                None: "there is no weight index",
                True: "the weight index names it",
                False: "the weight index lacks it",
            }
            is_there = "still there" if after["size_bytes"] is not None else "absent"
            return f'"{name}" ({before["size_bytes"]:,} bytes) is {is_there}; {named[after["is_named_in_index"]]}'

        return prove(
            self,
            lambda: own.remove(name),
            look=look,
            holds=lambda before, after: after["size_bytes"] is None and after["is_named_in_index"] in (None, True),
            told=told,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncateShard:
    """A weight file that ends early."""

    name: ClassVar[str] = "truncate_shard"
    fault_id: ClassVar[str] = "D01"
    shard: int | str
    cut_bytes: int | None
    keep_ratio: float | None

    def __post_init__(self) -> None:
        if (self.cut_bytes is None) == (self.keep_ratio is None):
            raise ScenarioInvalid("truncate_shard: expected either cut_bytes or keep_ratio")
        if self.cut_bytes is not None and self.cut_bytes < 1:
            raise ScenarioInvalid(f"truncate_shard: cut_bytes={self.cut_bytes}, expected at least 1")
        _require_ratio(self.name, self.keep_ratio)

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def damage(self, target: Path, *, old: Path, random: Random) -> Injected:
        own = Target.open(target, old=old)
        name = own.shard_name(self.shard)
        size = (target / name).stat().st_size
        kept = size - self.cut_bytes if self.cut_bytes is not None else int(size * (self.keep_ratio or 0))
        if not 0 <= kept < size:
            raise FaultNotApplicable(f'"{name}" has {size:,} bytes: cannot keep {kept:,} of them and cut the rest')
        return prove(
            self,
            lambda: own.truncate(name, kept),
            look=lambda: weight_file_facts(target / name),
            holds=lambda before, after: after["size_bytes"] == kept and after["defect"] is not None,
            told=lambda before, after: f"{told_of_file(before, after)}; expected {kept:,} bytes",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroTail:
    """A preallocated weight file: full size, header in place, the end not written yet."""

    name: ClassVar[str] = "zero_tail"
    fault_id: ClassVar[str] = "D15"
    shard: int | str
    keep_ratio: float

    def __post_init__(self) -> None:
        _require_ratio(self.name, self.keep_ratio)

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def damage(self, target: Path, *, old: Path, random: Random) -> Injected:
        own = Target.open(target, old=old)
        name = own.shard_name(self.shard)
        shard = next(shard for shard in own.shards() if shard.name == name)
        begin = int(shard.size_bytes * self.keep_ratio)
        if begin < shard.data_start_byte:
            needed = shard.data_start_byte / shard.size_bytes
            raise FaultNotApplicable(
                f'"{name}": keep_ratio {self.keep_ratio:g} would zero the header too; expected at least {needed:.4f}'
            )
        return prove(
            self,
            lambda: own.zero_from(name, begin),
            look=lambda: {
                **weight_file_facts(target / name),
                "tail_from_byte": begin,
                "is_zero_tail": _is_zero_from(target / name, begin),
            },
            holds=lambda before, after: (
                after["defect"] is None
                and after["size_bytes"] == before["size_bytes"]
                and not before["is_zero_tail"]
                and after["is_zero_tail"]
            ),
            told=lambda before, after: (
                f"{told_of_file(before, after)}; from byte {begin:,} on it was {_zero(before)}, is {_zero(after)}"
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PointerFile:
    """A git-lfs pointer under the name of the weights it points to."""

    name: ClassVar[str] = "pointer_file"
    fault_id: ClassVar[str] = "D02"
    shard: int | str

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def damage(self, target: Path, *, old: Path, random: Random) -> Injected:
        own = Target.open(target, old=old)
        name = own.shard_name(self.shard)
        size_bytes = (target / name).stat().st_size
        with (target / name).open("rb") as file:
            oid = hashlib.file_digest(file, "sha256").hexdigest()
        text = f"{POINTER_VERSION}\noid sha256:{oid}\nsize {size_bytes}\n".encode()

        def look() -> dict[str, Any]:
            with (target / name).open("rb") as file:
                begins = file.read(len(text) + 1)
            return {**weight_file_facts(target / name), "is_pointer": begins == text}

        return prove(
            self,
            lambda: own.write(name, text),
            look=look,
            holds=lambda before, after: not before["is_pointer"] and after["is_pointer"],
            told=lambda before, after: (
                f"{told_of_file(before, after)}; it {'is' if after['is_pointer'] else 'is not'} the pointer to what was there"
            ),
        )


def _zero(seen: Facts) -> str:
    return "zero" if seen["is_zero_tail"] else "not zero"


def _require_ratio(name: str, keep_ratio: float | None) -> None:
    if keep_ratio is not None and not 0 <= keep_ratio < 1:
        raise ScenarioInvalid(f"{name}: keep_ratio={keep_ratio:g}, expected 0 to below 1")


def _is_zero_from(path: Path, begin_byte: int) -> bool:
    """Say whether a file holds zeros alone from a byte on; what was never written, a hole, is not read to know that."""
    with path.open("rb", buffering=0) as file:
        position, size_bytes = begin_byte, os.fstat(file.fileno()).st_size
        block = bytearray(BLOCK_BYTES)
        while position < size_bytes:
            try:
                file.seek(max(position, os.lseek(file.fileno(), position, os.SEEK_DATA)))
            except OSError:  # nothing but a hole up to the end
                return True
            read = file.readinto(block)
            if not read:
                return True
            if np.frombuffer(block, np.uint8, count=read).any():
                return False
            position = file.tell()
    return True


def missing_shard(shard: int | str = -1) -> MissingShard:
    """Remove one weight file, by name or position; the last by default. Source: taxonomy row D03."""
    return MissingShard(shard=shard)


def truncate_shard(
    shard: int | str = -1, *, cut_bytes: int | None = None, keep_ratio: float | None = None
) -> TruncateShard:
    """Cut `cut_bytes` off the end of a weight file, or keep only the first part of it (half by default).

    Source: taxonomy row D01.
    """
    if cut_bytes is None and keep_ratio is None:
        keep_ratio = 0.5
    return TruncateShard(shard=shard, cut_bytes=cut_bytes, keep_ratio=keep_ratio)


def zero_tail(shard: int | str = -1, *, keep_ratio: float = 0.5) -> ZeroTail:
    """Make the end of a weight file zero, its size and header intact. Source: taxonomy row D15."""
    return ZeroTail(shard=shard, keep_ratio=keep_ratio)


def pointer_file(shard: int | str = -1) -> PointerFile:
    """Put the git-lfs pointer of a weight file in its place. Source: taxonomy row D02."""
    return PointerFile(shard=shard)
