"""Everything a checkpoint directory holds and everything that is wrong with it, in one pass over its small files.

Which files count follows what vLLM's default loader reads (releases 0.2.5 to 0.33.0): any `consolidated*.safetensors`
wins over other safetensors (0.13.0 and later), safetensors win over other formats, a weight index restricts the files
to those it names, and without one every file is read, the last of two equal tensor names winning.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from harness.checkpoint.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from harness.checkpoint.defect import Defect
from harness.checkpoint.header import Tensor
from harness.checkpoint.shard import Shard, read_shard
from harness.checkpoint.side_file import read_json
from harness.errors import CheckpointDefect

WEIGHT_SUFFIX = ".safetensors"
INDEX_NAMES = {False: "model.safetensors.index.json", True: "consolidated.safetensors.index.json"}
PARTIAL_SUFFIXES = (".tmp", ".part", ".partial", ".incomplete", ".aria2", ".crdownload", ".download", ".filepart")
PICKLE_SUFFIXES = (".bin", ".pt", ".pth")
NOT_WEIGHTS = ("training_args", "optimizer", "scheduler", "scaler", "rng_state")  # engines skip these too
SERIES = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})\.safetensors$")
RSYNC_PARTIAL = re.compile(r"^\..+\.(safetensors|json|bin)\.[A-Za-z0-9]{6}$")


@dataclass(frozen=True, slots=True)
class WeightIndex:
    """The weight index: which shard holds each tensor."""

    name: str
    weight_map: Mapping[str, str]
    total_size_bytes: int | None


@dataclass(frozen=True)
class Checkpoint:
    """The files of a checkpoint that an engine loads, in the order in which it loads them."""

    path: Path
    config: Mapping[str, Any]
    shards: tuple[Shard, ...]
    index: WeightIndex | None

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return every tensor of every shard."""
        return tuple(tensor for shard in self.shards for tensor in shard.tensors)

    @cached_property
    def _by_name(self) -> Mapping[str, Tensor]:
        return {tensor.name: tensor for tensor in self.tensors}

    def tensor(self, name: str) -> Tensor:
        """Return the tensor of that name; the last one when several shards hold it, as an engine does.

        Raises: KeyError naming the tensor and the checkpoint.
        """
        try:
            return self._by_name[name]
        except KeyError:
            raise KeyError(f'no tensor "{name}" in "{self.path}"') from None


@dataclass(slots=True)
class _Survey:
    """What has been seen so far of one directory."""

    path: Path
    names: tuple[str, ...] = ()
    directories: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    index: WeightIndex | None = None
    shards: list[Shard] = field(default_factory=list)
    defects: list[CheckpointDefect] = field(default_factory=list)

    def note(self, reason: Defect, what: str, *, name: str | None = None, tensor: str | None = None) -> None:
        path = self.path if name is None else self.path / name
        self.defects.append(CheckpointDefect(reason, what, path=path, tensor=tensor))


def survey(path: Path) -> tuple[Checkpoint, tuple[CheckpointDefect, ...]]:
    """Read all that can be read of a checkpoint directory and name every defect; never raises for what is in it."""
    seen = _Survey(path)
    if _list(seen):
        _read_config(seen)
        consolidated = any(_is_consolidated(name) for name in seen.names)
        family = [
            name for name in seen.names if name.endswith(WEIGHT_SUFFIX) and _is_consolidated(name) == consolidated
        ]
        _read_index(seen, INDEX_NAMES[consolidated])
        _read_shards(seen, sorted(family, key=natural_order))
        _check_index(seen, family)
        _check_series(seen, family)
        _check_duplicates(seen)
        _check_families(seen, consolidated)
        _check_leftovers(seen)
    return Checkpoint(path, seen.config, tuple(seen.shards), seen.index), tuple(seen.defects)


def natural_order(name: str) -> tuple[tuple[int, str], ...]:
    """Return the key that sorts file names as the engine does: runs of digits by their value."""
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]+)", name))


def is_pickle(name: str) -> bool:
    """Say whether a file of this name holds weights that engines unpickle."""
    return name.endswith(PICKLE_SUFFIXES) and not name.startswith(NOT_WEIGHTS)


def _list(seen: _Survey) -> bool:
    try:
        with os.scandir(seen.path) as entries:
            kinds = {entry.name: _is_directory(entry) for entry in entries}
    except (FileNotFoundError, NotADirectoryError):
        seen.note(Defect.DIRECTORY_ABSENT, "no such directory")
        return False
    except (OSError, ValueError) as error:
        seen.note(Defect.DIRECTORY_UNREADABLE, str(error))
        return False
    seen.names = tuple(sorted(name for name, is_directory in kinds.items() if not is_directory or _is_weight(name)))
    seen.directories = tuple(sorted(name for name, is_directory in kinds.items() if is_directory))
    return True


def _is_directory(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _is_weight(name: str) -> bool:
    return name.endswith(WEIGHT_SUFFIX)


def _is_consolidated(name: str) -> bool:
    return name.startswith("consolidated") and _is_weight(name)


def _read_config(seen: _Survey) -> None:
    try:
        seen.config = read_json(seen.path / "config.json")
    except CheckpointDefect as defect:
        absent = defect.reason == Defect.ABSENT_FILE
        seen.defects.append(
            CheckpointDefect(Defect.CONFIG_ABSENT, "no such file", path=defect.path) if absent else defect
        )
    except ValueError as error:
        seen.note(Defect.CONFIG_NOT_JSON, str(error)[:200], name="config.json")


def _read_index(seen: _Survey, name: str) -> None:
    if name not in seen.names:
        return
    try:
        content = read_json(seen.path / name)
    except CheckpointDefect as defect:
        seen.defects.append(defect)
        return
    except ValueError as error:
        seen.note(Defect.INDEX_NOT_JSON, str(error)[:200], name=name)
        return
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict):
        seen.note(Defect.INDEX_ENTRY_INVALID, '"weight_map" is absent or not an object', name=name)
        return
    accepted: dict[str, str] = {}
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not shard or "/" in shard or "\0" in shard or shard in (".", ".."):
            what = f"the shard {str(shard)[:80]!r} is not the name of a file in this directory"
            seen.note(Defect.INDEX_ENTRY_INVALID, what, name=name, tensor=tensor)
        else:
            accepted[tensor] = shard
    metadata = content.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    seen.index = WeightIndex(name, accepted, total if type(total) is int else None)


def _read_shards(seen: _Survey, family: list[str]) -> None:
    listed = None if seen.index is None else set(seen.index.weight_map.values())
    for name in family:
        if listed is not None and name not in listed:
            what = f'"{seen.index.name if seen.index else ""}" names other files only, so no engine reads this one'
            seen.note(Defect.SHARD_NOT_IN_INDEX, what, name=name)
            continue
        try:
            shard = read_shard(seen.path / name)
        except CheckpointDefect as defect:
            seen.defects.append(defect)
            continue
        seen.shards.append(shard)
        for tensor in shard.repeated:
            seen.note(Defect.DUPLICATE_KEY, "named twice in one header; the last entry wins", name=name, tensor=tensor)
    if not family:
        others = [name for name in seen.names if is_pickle(name)]
        if others:
            seen.note(Defect.PICKLES_ONLY, f'no *.safetensors file, only "{others[0]}", which is not read here')
        else:
            seen.note(Defect.NO_WEIGHTS, "no *.safetensors file")


def _check_index(seen: _Survey, family: list[str]) -> None:
    if seen.index is None:
        return
    index, present = seen.index, set(family)
    tensors_of = {shard.name: {tensor.name for tensor in shard.tensors} for shard in seen.shards}
    holder = {tensor: shard for shard, names in tensors_of.items() for tensor in names}
    by_shard: dict[str, int] = {}
    for tensor, shard in index.weight_map.items():
        if shard not in present:
            by_shard[shard] = by_shard.get(shard, 0) + 1
        elif shard in tensors_of and tensor not in tensors_of[shard]:
            if tensor in holder:
                what = f'is in "{holder[tensor]}", the index says "{shard}"'
                seen.note(Defect.TENSOR_IN_OTHER_SHARD, what, name=index.name, tensor=tensor)
            else:
                seen.note(Defect.INDEX_NAMES_ABSENT_TENSOR, f'"{shard}" lacks it', name=index.name, tensor=tensor)
    for shard, count in sorted(by_shard.items()):
        what = f'"{shard}" is absent, with {count} of {len(index.weight_map)} tensors'
        seen.note(Defect.INDEX_NAMES_ABSENT_SHARD, what, name=index.name)
    for tensor in sorted(holder.keys() - index.weight_map.keys()):
        seen.note(Defect.TENSOR_NOT_IN_INDEX, f'is in "{holder[tensor]}"', name=index.name, tensor=tensor)


def _check_series(seen: _Survey, family: list[str]) -> None:
    """Find missing members of `model-00001-of-00003.safetensors`; those an index names are reported with the index."""
    series: dict[tuple[str, int], set[int]] = {}
    for name in family:
        match = SERIES.match(name)
        if match:
            series.setdefault((match["stem"], int(match["total"])), set()).add(int(match["number"]))
    listed = set(seen.index.weight_map.values()) if seen.index else set()
    for (stem, total), numbers in sorted(series.items()):
        for number in _missing(numbers, total):
            name = f"{stem}-{number:05d}-of-{total:05d}{WEIGHT_SUFFIX}"
            if name not in listed:
                what = f"absent; {len(numbers)} of {total} are there"
                seen.note(Defect.MISSING_SHARD_OF_SERIES, what, name=name)
    if len(series) > 1:
        what = ", ".join(f'"{stem}" of {total}' for stem, total in sorted(series))
        seen.note(Defect.MIXED_SERIES, f"shards of several series: {what}")


def _missing(numbers: set[int], total: int) -> Iterator[int]:
    """Return the first missing numbers; a name may claim 99,999 shards, so not all."""
    found = 0
    for number in range(1, total + 1):
        if number not in numbers:
            yield number
            found += 1
            if found == 16:
                return


def _check_duplicates(seen: _Survey) -> None:
    first: dict[str, str] = {}
    for shard in seen.shards:
        for tensor in shard.tensors:
            if tensor.name in first:
                what = f'is also in "{first[tensor.name]}"; which one is served depends on the order of reading'
                seen.note(Defect.DUPLICATE_TENSOR, what, name=shard.name, tensor=tensor.name)
            else:
                first[tensor.name] = shard.name


def _check_families(seen: _Survey, consolidated: bool) -> None:
    has_safetensors = any(_is_weight(name) for name in seen.names)
    for name in seen.names:
        if _is_weight(name):
            if consolidated and not _is_consolidated(name):
                what = "next to consolidated*.safetensors, which vLLM 0.13.0 and later read instead"
                seen.note(Defect.MIXED_WEIGHT_FAMILIES, what, name=name)
        elif has_safetensors and is_pickle(name):
            what = "next to *.safetensors, which are read instead, whichever is newer"
            seen.note(Defect.MIXED_WEIGHT_FAMILIES, what, name=name)


def _check_leftovers(seen: _Survey) -> None:
    for name in seen.names:
        if name.endswith(PARTIAL_SUFFIXES) or RSYNC_PARTIAL.match(name):
            seen.note(Defect.PARTIAL_DOWNLOAD_FILE, "a copy or download that has not ended", name=name)
    for directory in seen.directories:
        try:
            names = os.listdir(seen.path / directory)
        except OSError:
            continue
        inner = [name for name in names if _is_weight(name)]
        is_adapter = inner == [ADAPTER_WEIGHTS] and ADAPTER_CONFIG in names  # loaded by a name of its own
        if inner and not is_adapter:
            what = f'holds weights ("{min(inner)}") that no engine reads: was a directory moved into this one?'
            seen.note(Defect.NESTED_CHECKPOINT, what, name=directory)
