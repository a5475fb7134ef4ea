"""Half-synced files at rest: what a copy leaves behind when it stops, or when old and new files end up side by side.

Source: incident write-up ("weight file not found" on machines where the sync was late); taxonomy rows D01, D02, D03,
D12, D15, D19.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import numpy as np

from harness.errors import FaultNotApplicable, ScenarioInvalid
from harness.faults.facts import file_facts, refusal
from harness.faults.fault import Injected, parameters_of
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
        size = (target / name).stat().st_size
        own.remove(name)
        index = own.index()
        is_named = index is not None and name in index["weight_map"].values()
        is_there = (target / name).exists()
        return Injected(
            fault=self.name,
            fault_id=self.fault_id,
            proved=not is_there and (index is None or is_named),
            because=f'"{name}" ({size:,} bytes) is {"still there" if is_there else "absent"}; '
            + (
                "there is no weight index"
                if index is None
                else f"the weight index {'names' if is_named else 'lacks'} it"
            ),
            before={"shard": name, "size_bytes": size},
            after={"exists": is_there, "is_named_in_index": is_named, "weight_files": list(own.weight_files())},
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
        own.truncate(name, kept)
        seen = (target / name).stat().st_size
        refused = refusal(target / name)
        return Injected(
            fault=self.name,
            fault_id=self.fault_id,
            proved=seen == kept and refused is not None,
            because=f'"{name}" had {size:,} bytes, has {seen:,}, expected {kept:,}; its header '
            + ("still fits" if refused is None else "asks for more"),
            before={"shard": name, "size_bytes": size},
            after={"size_bytes": seen, "defect": refused},
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
        before = {"shard": name, "size_bytes": shard.size_bytes, **_tail(target / name, begin)}
        own.zero_from(name, begin)
        after = {"size_bytes": (target / name).stat().st_size, **_tail(target / name, begin)}
        is_whole = refusal(target / name) is None
        was_nonzero, is_nonzero = before["nonzero_tail_bytes"], after["nonzero_tail_bytes"]
        return Injected(
            fault=self.name,
            fault_id=self.fault_id,
            proved=is_whole and after["size_bytes"] == shard.size_bytes and is_nonzero == 0 and was_nonzero > 0,
            because=f'"{name}" has {after["size_bytes"]:,} bytes as before; from byte {begin:,} on '
            f"{was_nonzero:,} bytes were not zero, now {is_nonzero:,}",
            before=before,
            after=after,
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
        before = file_facts(target / name) or {}
        with (target / name).open("rb") as file:
            oid = hashlib.file_digest(file, "sha256").hexdigest()
        text = f"{POINTER_VERSION}\noid sha256:{oid}\nsize {before['size_bytes']}\n".encode()
        own.write(name, text)
        with (target / name).open("rb") as file:
            seen = file.read(len(text) + 1)
        return Injected(
            fault=self.name,
            fault_id=self.fault_id,
            proved=seen == text,
            because=f'"{name}" had {before["size_bytes"]:,} bytes, has {(target / name).stat().st_size:,} and begins '
            f'with "{seen[:22].decode("utf-8", "backslashreplace")}"',
            before={"shard": name, **before},
            after=file_facts(target / name) or {},
        )


def _require_ratio(name: str, keep_ratio: float | None) -> None:
    if keep_ratio is not None and not 0 <= keep_ratio < 1:
        raise ScenarioInvalid(f"{name}: keep_ratio={keep_ratio:g}, expected 0 to below 1")


def _tail(path: Path, begin_byte: int) -> dict[str, Any]:
    nonzero = 0
    block = bytearray(BLOCK_BYTES)
    with path.open("rb", buffering=0) as file:
        file.seek(begin_byte)
        while size := file.readinto(block):
            nonzero += int(np.count_nonzero(np.frombuffer(block, np.uint8, count=size)))
    return {"tail_from_byte": begin_byte, "nonzero_tail_bytes": nonzero}


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
