"""The private copy of a checkpoint that faults may change: the only place in `harness.faults` that writes to one.

No byte of a file that is there is ever written: a change is a new file beside it, renamed over its name. So a file that
shares its bytes with the user's original (a hard link) can be damaged, and the original stays as it was. A symlink is
refused: what it points to is not this copy's.
"""

from __future__ import annotations

import fnmatch
import json
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from harness.checkpoint.copy import RawTensor, copy_file, save_shard
from harness.checkpoint.file_range import allocate, copy_range
from harness.checkpoint.header import LENGTH_BYTES
from harness.checkpoint.manifest import Shard, Tensor, read_shard
from harness.errors import CheckpointDefect, FaultNotApplicable
from harness.faults.facts import (
    INDEX_NAME,
    holds_tensor,
    read_json,
    read_shards,
    read_tensor,
    tensor_facts,
    weight_files,
)
from harness.faults.shard_rewrite import replacing, rewrite_tensors
from harness.faults.torch_file import write_torch_file


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
        named = self._named(pattern)
        if named is not None:
            return named
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

    def _named(self, name: str) -> Tensor | None:
        """Return a tensor from the one shard that the weight index names for it, None when that cannot be said so."""
        shard = ((self.index() or {}).get("weight_map") or {}).get(name)
        if shard not in self.weight_files():
            return None
        try:
            tensors = read_shard(self.path / shard).tensors
        except CheckpointDefect:
            return None
        return next((tensor for tensor in tensors if tensor.name == name), None)

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
        """Return the path of a file of this copy whose name may be given to another file.

        Raises: FaultNotApplicable when it is absent or a link.
        """
        path = self.path / name
        if Path(name).name != name:
            raise FaultNotApplicable(f'"{name}" is not the name of a file in "{self.path}"')
        try:
            mode = path.lstat().st_mode
        except OSError as error:
            raise FaultNotApplicable(f'"{path}" cannot be changed: {error.strerror}') from error
        if not stat.S_ISREG(mode):
            raise FaultNotApplicable(f'"{path}" is not a regular file: a fault changes files of its own alone')
        return path

    # changes

    def replace_tensors(self, shard: str, changes: Mapping[str, RawTensor | None]) -> None:
        """Write a shard anew with these tensors replaced, added, or left out (None); the weight index is kept in step."""
        path = self.own(shard)
        mode = stat.S_IMODE(path.stat().st_mode)
        rewrite_tensors(path, changes, _metadata(path))
        path.chmod(mode)
        index = self.index()
        if index is None:
            return
        absent = {name for name, tensor in changes.items() if tensor is None}
        named = {name: file for name, file in index["weight_map"].items() if name not in absent}
        wanted = {**index, "weight_map": named | {name: shard for name in changes if name not in absent}}
        if "total_size" in index.get("metadata", {}):
            total = sum(tensor.size_bytes for each in self.shards() for tensor in each.tensors)
            wanted["metadata"] = {**index["metadata"], "total_size": total}
        if wanted != index:
            self.write(INDEX_NAME, json.dumps(wanted, indent=2).encode())

    def rename_tensors(self, shard: str, names: Mapping[str, str]) -> None:
        """Write a shard anew in which these tensors have other names; the weight index is kept in step."""
        changes: dict[str, RawTensor | None] = dict.fromkeys(names)
        for tensor in next(each for each in self.shards() if each.name == shard).tensors:
            if tensor.name in names:
                changes[names[tensor.name]] = self.read(tensor)
        if changes:
            self.replace_tensors(shard, changes)

    def write_torch_file(self, name: str, tensors: Iterable[tuple[str, RawTensor]]) -> None:
        """Write a `.bin` file that is not there yet."""
        write_torch_file(self._free(name), tensors)

    def add_shard(self, name: str, tensors: Mapping[str, RawTensor]) -> None:
        """Write a weight file that is not there yet; the weight index stays as it is."""
        save_shard(self._free(name), tensors)

    def write(self, name: str, data: bytes) -> None:
        """Replace a file, or add one; a name may be in a directory that is made for it ("np/weight_names.json")."""
        path = self.path / name
        if path.is_symlink() or path.exists():
            path = self.own(name) if path.parent == self.path else path
        self._directory_of(path)
        with replacing(path) as file:
            file.write(data)

    def bring(self, source: Path, name: str) -> None:
        """Copy a file of another checkpoint into this one, over what is there."""
        path = self.path / name
        if path.is_symlink() or path.exists():
            self.own(name).unlink()
        copy_file(source, path)

    def rename(self, name: str, new_name: str) -> None:
        """Give a file another name that is not taken; it may be in a directory, which is made for it."""
        self.own(name).rename(self._free(new_name))

    def link(self, name: str, destination: str) -> None:
        """Put a symlink under a name; what was there is gone."""
        path = self.path / name
        if path.exists() and path.parent == self.path:
            self.own(name).unlink()
        self._directory_of(path)
        path.symlink_to(destination)

    def remove(self, name: str) -> None:
        """Remove a file."""
        self.own(name).unlink()

    def truncate(self, name: str, size_bytes: int) -> None:
        """Cut a file."""
        self._rewrite(name, keep_bytes=size_bytes, size_bytes=size_bytes)

    def overwrite(self, name: str, begin_byte: int, data: bytes) -> None:
        """Put other bytes somewhere into a file; its size stays."""
        path = self.own(name)
        with path.open("rb") as old, replacing(path) as new:
            size = os.fstat(old.fileno()).st_size
            allocate(new.fileno(), size)
            copy_range(old.fileno(), new.fileno(), 0, begin_byte)
            new.write(data)
            new.flush()
            copy_range(old.fileno(), new.fileno(), begin_byte + len(data), size - begin_byte - len(data))
            os.fchmod(new.fileno(), stat.S_IMODE(os.fstat(old.fileno()).st_mode))

    def extend(self, name: str, data: bytes) -> None:
        """Put bytes behind the end of a file."""
        size = self.own(name).stat().st_size
        self._rewrite(name, keep_bytes=size, size_bytes=size, after=data)

    def zero_from(self, name: str, begin_byte: int) -> None:
        """Make a file zero from this byte to its end, as one that was preallocated and not yet written is."""
        self._rewrite(name, keep_bytes=begin_byte, size_bytes=self.own(name).stat().st_size)

    def set_mode(self, name: str, mode: int) -> None:
        """Give a file another mode: first a file of its own, since a mode belongs to all names of a file."""
        size = self.own(name).stat().st_size
        self._rewrite(name, keep_bytes=size, size_bytes=size, mode=mode)

    def _rewrite(
        self, name: str, *, keep_bytes: int, size_bytes: int, after: bytes = b"", mode: int | None = None
    ) -> None:
        path = self.own(name)
        with path.open("rb") as old, replacing(path) as new:
            allocate(new.fileno(), keep_bytes)
            copy_range(old.fileno(), new.fileno(), 0, keep_bytes)
            os.ftruncate(new.fileno(), size_bytes)
            if after:
                os.lseek(new.fileno(), 0, os.SEEK_END)
                new.write(after)
            os.fchmod(new.fileno(), stat.S_IMODE(os.fstat(old.fileno()).st_mode) if mode is None else mode)

    def _free(self, name: str) -> Path:
        path = self.path / name
        if path.is_symlink() or path.exists():
            raise FaultNotApplicable(f'"{name}" is taken in "{self.path}"')
        self._directory_of(path)
        return path

    def _directory_of(self, path: Path) -> None:
        """Make the directory of a name below this copy; every part of it must be a real directory of this copy."""
        if not path.is_relative_to(self.path) or ".." in path.parts:
            raise FaultNotApplicable(f'"{path}" is not below "{self.path}"')
        for parent in reversed([each for each in path.parents if each != self.path and self.path in each.parents]):
            if parent.is_symlink():
                raise FaultNotApplicable(f'"{parent}" is a link: a fault changes files of its own alone')
            parent.mkdir(exist_ok=True)

    # facts for proofs

    def tensor_facts(self, tensor: Tensor) -> dict[str, Any] | None:
        """Read a tensor back: dtype, shape and digest as they are on disk now; None when it is absent."""
        return tensor_facts(self.path, tensor.shard, tensor.name)

    def described(self, tensor: Tensor) -> dict[str, Any] | None:
        """Read dtype and shape of a tensor from its shard's header as it is now; None when it is absent."""
        shard = read_shard(self.path / tensor.shard)
        found = next((each for each in shard.tensors if each.name == tensor.name), None)
        return None if found is None else {"dtype": found.dtype, "shape": list(found.shape)}

    def holds(self, tensor: Tensor, wanted: RawTensor) -> bool:
        """Read a tensor back and say whether it is the wanted one in dtype, shape and every byte."""
        return holds_tensor(self.path, tensor.shard, tensor.name, wanted)

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
