"""The private copy of a checkpoint that faults may change: the only place in `harness.faults` that writes to one.

Every change is refused for a file that is a link or shares its bytes with another name (`st_nlink` > 1), because it
would reach the user's original.
"""

from __future__ import annotations

import fnmatch
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from harness.checkpoint.copy import RawTensor, copy_file, load_shard, refuse_shared, save_shard
from harness.checkpoint.header import LENGTH_BYTES
from harness.checkpoint.manifest import Shard, Tensor
from harness.errors import FaultNotApplicable, UsageError
from harness.faults.facts import INDEX_NAME, read_json, read_shards, read_tensor, tensor_facts, weight_files


@dataclass(frozen=True, slots=True)
class Target:
    """A checkpoint directory that belongs to this run alone."""

    path: Path

    @classmethod
    def open(cls, path: Path, *, old: Path) -> Target:
        """Accept a private copy.

        Raises: FaultNotApplicable when it is no real directory, or overlaps the old checkpoint.
        """
        if path.is_symlink() or not path.is_dir():
            raise FaultNotApplicable(f'"{path}" is not a real directory: faults change a private copy only')
        refuse_overlap(path, old)
        return cls(path)

    # what is there

    def index(self) -> dict[str, Any] | None:
        """Return the decoded weight index, or None when there is none."""
        return read_json(self.path / INDEX_NAME) if (self.path / INDEX_NAME).exists() else None

    def weight_files(self) -> tuple[str, ...]:
        """Return the names of the files an engine would load: those of the weight index, or every safetensors file."""
        return weight_files(self.path)

    def shards(self) -> tuple[Shard, ...]:
        """Return the headers of the weight files.

        Raises: FaultNotApplicable when one cannot be read, for example after another fault.
        """
        return read_shards(self.path)

    def find(self, pattern: str) -> Tensor:
        """Return the tensor of this name, or the only one that matches this glob pattern.

        Raises: FaultNotApplicable naming near matches, or all matches when there are several.
        """
        tensors = {tensor.name: tensor for shard in self.shards() for tensor in shard.tensors}
        if pattern in tensors:
            return tensors[pattern]
        matches = [name for name in tensors if fnmatch.fnmatchcase(name, pattern)]
        if len(matches) == 1:
            return tensors[matches[0]]
        if matches:
            raise FaultNotApplicable(
                f'"{pattern}" matches {len(matches)} tensors of "{self.path}", expected one: {_listed(matches)}'
            )
        near = get_close_matches(pattern, tensors, n=3, cutoff=0.4)
        raise FaultNotApplicable(
            f'no tensor matches "{pattern}" in "{self.path}"; nearest: {_listed(near or list(tensors))}'
        )

    def shard_name(self, shard: int | str) -> str:
        """Return the name of a weight file by its name or its position in name order.

        Raises: FaultNotApplicable listing the files that are there.
        """
        files = self.weight_files()
        if isinstance(shard, str):
            if shard in files:
                return shard
        elif -len(files) <= shard < len(files):
            return files[shard]
        raise FaultNotApplicable(f'no weight file {shard!r} in "{self.path}"; there are: {_listed(list(files))}')

    def own(self, name: str) -> Path:
        """Return the path of a file of this copy that may be changed.

        Raises: FaultNotApplicable when it is absent, a link, or has another name elsewhere.
        """
        path = self.path / name
        if Path(name).name != name:
            raise FaultNotApplicable(f'"{name}" is not the name of a file in "{self.path}"')
        try:
            refuse_shared(path)
        except (OSError, UsageError) as error:
            raise FaultNotApplicable(f"a fault may not change a file that is not its own: {error}") from error
        return path

    # changes

    def replace_tensors(self, shard: str, changes: Mapping[str, RawTensor | None]) -> None:
        """Write a shard anew with these tensors replaced, or left out (None); the weight index is kept in step.

        Takes the memory of one shard.
        """
        path = self.own(shard)
        metadata = _metadata(path)
        tensors = load_shard(path)
        for name, tensor in changes.items():
            if tensor is None:
                del tensors[name]
            else:
                tensors[name] = tensor
        mode = stat.S_IMODE(path.stat().st_mode)
        save_shard(path, tensors, metadata)
        path.chmod(mode)
        index = self.index()
        if index is None:
            return
        absent = {name for name, tensor in changes.items() if tensor is None}
        index["weight_map"] = {name: file for name, file in index["weight_map"].items() if name not in absent}
        if "total_size" in index.get("metadata", {}):
            total = sum(tensor.size_bytes for each in self.shards() for tensor in each.tensors)
            index["metadata"]["total_size"] = total
        self.write(INDEX_NAME, json.dumps(index, indent=2).encode())

    def write(self, name: str, data: bytes) -> None:
        """Replace a file, or add one."""
        path = self.path / name
        if path.is_symlink() or path.exists():
            path = self.own(name)
        path.write_bytes(data)

    def bring(self, source: Path, name: str) -> None:
        """Copy a file of another checkpoint into this one, over what is there."""
        path = self.path / name
        if path.is_symlink() or path.exists():
            self.own(name).unlink()
        copy_file(source, path)

    def rename(self, name: str, new_name: str) -> None:
        """Give a file another name that is not taken."""
        if (self.path / new_name).exists():
            raise FaultNotApplicable(f'"{new_name}" is taken in "{self.path}"')
        self.own(name).rename(self.path / new_name)

    def remove(self, name: str) -> None:
        """Remove a file."""
        self.own(name).unlink()

    def truncate(self, name: str, size_bytes: int) -> None:
        """Cut a file."""
        os.truncate(self.own(name), size_bytes)

    def zero_from(self, name: str, begin_byte: int) -> None:
        """Make a file zero from this byte to its end, as one that was preallocated and not yet written is."""
        path = self.own(name)
        size = path.stat().st_size
        os.truncate(path, begin_byte)
        os.truncate(path, size)

    # facts for proofs

    def tensor_facts(self, tensor: Tensor) -> dict[str, Any] | None:
        """Read a tensor back: dtype, shape and digest as they are on disk now; None when it is absent."""
        return tensor_facts(self.path, tensor.shard, tensor.name)

    def read(self, tensor: Tensor) -> RawTensor:
        """Return a tensor with its bytes."""
        found = read_tensor(self.path, tensor.shard, tensor.name)
        if found is None:
            raise FaultNotApplicable(f'no tensor "{tensor.name}" in "{self.path / tensor.shard}"')
        return found


def refuse_overlap(left: Path, right: Path) -> None:
    """Refuse two directories of which one holds the other.

    Raises: FaultNotApplicable.
    """
    one, other = left.resolve(), right.resolve()
    if one.is_relative_to(other) or other.is_relative_to(one):
        raise FaultNotApplicable(f'"{left}" and "{right}" overlap: faults change a private copy only')


def _metadata(path: Path) -> dict[str, str]:
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(LENGTH_BYTES), "little")))
    return dict(header.get("__metadata__") or {})


def _listed(names: list[str]) -> str:
    shown = ", ".join(f'"{name}"' for name in names[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")
