"""Which files of two checkpoints differ: weights, config, tokenizer, templates, and whatever else lies there."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from harness.checkpoint.digest import tensor_digests
from harness.checkpoint.hashing import Part, hash_parts
from harness.checkpoint.shard import open_regular, read_shard
from harness.errors import CheckpointDefect

Content = tuple[object, ...]  # equal where two files hold the same


def differing_files(path: Path, wanted: Path, *, leave_out: Collection[str] = ()) -> tuple[str, ...]:
    """Say of each file below either directory in what it is not as in `wanted`: "config.json differs", "np/a is surplus".

    A link counts as what it points to; names in `leave_out` are skipped at the top. Reads everything, tensors once per
    process and file. Empty means that both hold the same, byte for byte of what an engine reads.
    """
    here, there = _files(path, leave_out), _files(wanted, leave_out)
    named = {name: "is absent" for name in there.keys() - here.keys()}
    named |= {name: "is surplus" for name in here.keys() - there.keys()}
    for name in here.keys() & there.keys():
        try:
            if _content(here[name]) != _content(there[name]):
                named[name] = "differs"
        except CheckpointDefect as defect:
            named[name] = f"cannot be read ({defect.detail})"
    return tuple(f"{name} {what}" for name, what in sorted(named.items()))


def _files(directory: Path, leave_out: Collection[str]) -> Mapping[str, Path]:
    files = {str(file.relative_to(directory)): file for file in _walk(directory)}
    return {name: file for name, file in files.items() if name not in leave_out}


def _walk(directory: Path) -> Iterator[Path]:
    for entry in os.scandir(directory):
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(Path(entry.path))
        else:
            yield Path(entry.path)


def _content(file: Path) -> Content:
    """Return what an engine reads of a file: of a weight file its tensors, whose digests are kept, of others each byte."""
    if file.suffix == ".safetensors":
        try:
            shard = read_shard(file)
        except CheckpointDefect:
            pass  # no weight file, whatever its name says: its bytes are compared
        else:
            return shard.tensors, tuple(sorted(tensor_digests(file, shard).items()))
    descriptor = open_regular(file)
    try:
        size_bytes = os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)
    return size_bytes, hash_parts([Part(file, 0, size_bytes)])[0]
