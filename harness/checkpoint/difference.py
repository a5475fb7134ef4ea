"""Which files of two checkpoints differ: weights, config, tokenizer, templates, and whatever else lies there."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from harness.checkpoint.digest import tensor_digests
from harness.checkpoint.hashing import Part, hash_parts
from harness.checkpoint.shard import open_regular, read_metadata, read_shard
from harness.errors import CheckpointDefect


@dataclass(frozen=True, slots=True, kw_only=True)
class _Content:
    """What an engine reads of a file: two of them are equal where two files hold the same."""

    read: tuple[object, ...]
    metadata: Mapping[str, str] = field(default_factory=dict)  # of a weight file


def differing_files(path: Path, wanted: Path, *, leave_out: Collection[str] = ()) -> tuple[str, ...]:
    """Say of each file below either directory in what it is not as in `wanted`: "config.json differs", "np/a is surplus".

    Weight files differ in a tensor or in `__metadata__`, by whose "format" transformers decides how to read a file, and by
    other texts of which other loaders decide; the order in a header does not matter. A link counts as what it points to;
    names in `leave_out` are skipped at the top. Reads everything, tensors once per process and file. Empty means that
    both hold the same, byte for byte of what an engine reads.
    """
    here, there = _files(path, leave_out), _files(wanted, leave_out)
    named = {name: "is absent" for name in there.keys() - here.keys()}
    named |= {name: "is surplus" for name in here.keys() - there.keys()}
    for name in here.keys() & there.keys():
        try:
            one, other = _content(here[name]), _content(there[name])
        except CheckpointDefect as defect:
            named[name] = f"cannot be read ({defect.detail})"
            continue
        if one.read != other.read:
            named[name] = "differs"
        elif one.metadata != other.metadata:
            named[name] = f"differs in __metadata__ ({_differing_texts(one.metadata, other.metadata)})"
    return tuple(f"{name} {what}" for name, what in sorted(named.items()))


def _differing_texts(here: Mapping[str, str], there: Mapping[str, str]) -> str:
    names = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
    shown = [f'"{name[:60]}" is {_shown(here.get(name))}, not {_shown(there.get(name))}' for name in names[:3]]
    return ", ".join(shown) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _shown(text: str | None) -> str:
    return "absent" if text is None else f'"{text[:60]}"'


def _files(directory: Path, leave_out: Collection[str]) -> Mapping[str, Path]:
    files = {str(file.relative_to(directory)): file for file in _walk(directory)}
    return {name: file for name, file in files.items() if name not in leave_out}


def _walk(directory: Path) -> Iterator[Path]:
    for entry in os.scandir(directory):
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(Path(entry.path))
        else:
            yield Path(entry.path)


def _content(file: Path) -> _Content:
    """Return of a weight file its tensors, whose digests are kept, and its texts; of others every byte."""
    if file.suffix == ".safetensors":
        try:
            shard = read_shard(file)
        except CheckpointDefect:
            pass  # no weight file, whatever its name says: its bytes are compared
        else:
            digests = tuple(sorted(tensor_digests(file, shard).items()))
            return _Content(read=(shard.tensors, digests), metadata=read_metadata(file, shard))
    descriptor = open_regular(file)
    try:
        size_bytes = os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)
    return _Content(read=(size_bytes, hash_parts([Part(file, 0, size_bytes)])[0]))
