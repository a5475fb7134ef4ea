"""Weight files that are longer, foreign, unreadable, or another step's. Source: taxonomy rows D01, D02, D15, D20."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from harness.checkpoint.header import LENGTH_BYTES
from harness.errors import FaultNotApplicable, ScenarioInvalid
from harness.faults.facts import loaded_weights_id, shard_facts
from harness.faults.fault import Injected, parameters_of
from harness.faults.proof import Facts, prove, told_of_file, weight_file_facts
from harness.faults.target import Target

PAGE = b"<!DOCTYPE html>\n<html><head><title>403 Forbidden</title></head><body>Access denied.</body></html>\n"
FOREIGN = ("html", "empty", "zeros", "zip")
HOW = ("dangling_link", "mode")
BLOCK_BYTES = 4 * 1024 * 1024


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
        return prove(
            self,
            lambda: own.extend(name, random.randbytes(self.by)),
            look=lambda: weight_file_facts(target / name),
            holds=lambda before, after: (
                after["size_bytes"] == before["size_bytes"] + self.by and after["defect"] is not None
            ),
            told=lambda before, after: f"{told_of_file(before, after)}; expected {self.by:,} bytes more",
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
        return prove(
            self,
            lambda: own.overwrite(name, LENGTH_BYTES, b"\xff"),  # the "{" that begins the header
            look=lambda: weight_file_facts(target / name),
            holds=lambda before, after: (
                before["defect"] is None and after["defect"] is not None and after["size_bytes"] == before["size_bytes"]
            ),
            told=told_of_file,
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
        size_bytes = (target / name).stat().st_size
        wanted = {"html": PAGE, "empty": b"", "zip": b"PK\x03\x04" + random.randbytes(1024)}.get(self.content)

        def look() -> dict[str, Any]:
            is_foreign = _is_zero(target / name, size_bytes) if wanted is None else _reads(target / name, wanted)
            return {**weight_file_facts(target / name), "is_foreign": is_foreign}

        def change() -> None:
            if wanted is None:
                own.zero_from(name, 0)
            else:
                own.write(name, wanted)

        return prove(
            self,
            change,
            look=look,
            holds=lambda before, after: (
                not before["is_foreign"] and after["is_foreign"] and after["defect"] is not None
            ),
            told=lambda before, after: (
                f"{told_of_file(before, after)}; its bytes {'are' if after['is_foreign'] else 'are not'} the "
                f"{self.content} asked for"
            ),
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
        if wanted is None:
            raise FaultNotApplicable(f'"{old / name}" is absent or damaged: the old checkpoint has no such weight file')
        if wanted["layout"] != (shard_facts(target / name) or {}).get("layout"):
            raise FaultNotApplicable(
                f'"{name}" has other tensors, shapes or dtypes in "{old}": its header would show it'
            )

        def look() -> dict[str, Any]:
            return {"shard": name, "weights_id": loaded_weights_id(target), **(shard_facts(target / name) or {})}

        def is_old(seen: Facts) -> bool:
            return {key: seen.get(key) for key in wanted} == wanted

        return prove(
            self,
            lambda: own.bring(old / name, name),
            look=look,
            holds=lambda before, after: (
                is_old(after) and not is_old(before) and after["weights_id"] not in (None, before["weights_id"])
            ),
            told=lambda before, after: (
                f'"{name}" {"is" if is_old(after) else "is not"} the old checkpoint\'s; an engine would load '
                f"{after['weights_id']}, the new checkpoint is {before['weights_id']}"
            ),
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

        def change() -> None:
            if self.how == "mode":
                own.set_mode(name, 0)
            else:
                own.link(name, f"../blobs/{random.randbytes(20).hex()}")

        def told(before: Facts, after: Facts) -> str:
            may_read_all = after["mode"] == "000" and after["read"] == "1 byte"
            return (
                f'"{name}" is {"listed" if after["is_listed"] else "absent"}; reading it gave {before["read"]} before, '
                f"gives {after['read']}" + (" (this user may read everything)" if may_read_all else "")
            )

        return prove(
            self,
            change,
            look=lambda: {"shard": name, "is_listed": name in os.listdir(target), **_access(target / name)},
            holds=lambda before, after: before["read"] == "1 byte" and after["is_listed"] and "Error" in after["read"],
            told=told,
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
        return all(not block.strip(b"\0") for block in iter(lambda: file.read(BLOCK_BYTES), b""))


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


def previous_shard(shard: int | str = -1) -> PreviousShard:
    """Put a weight file of the old checkpoint, with the same header, in place of the new one. Source: row D15."""
    return PreviousShard(shard=shard)


def unreadable_file(shard: int | str = -1, *, how: str = "dangling_link") -> UnreadableFile:
    """Make a weight file a "dangling_link", or take every permission from it with "mode" (root reads it all the same).

    Source: taxonomy row D20.
    """
    return UnreadableFile(shard=shard, how=how)
