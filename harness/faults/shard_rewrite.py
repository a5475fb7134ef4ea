"""A safetensors file written anew beside the old one, then given its name.

Whoever has the old file open, mapped, or under another name keeps the old file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import IO, Any

from harness.checkpoint.copy import RawTensor
from harness.checkpoint.file_range import allocate, copy_range
from harness.checkpoint.header import BITS_OF_DTYPE, LENGTH_BYTES
from harness.checkpoint.manifest import Shard, Tensor, read_shard
from harness.errors import HarnessError

BLOCK_BYTES = 4 * 1024 * 1024
PAGE_BYTES = 4096


def rewrite_tensors(path: Path, changes: Mapping[str, RawTensor | None], metadata: Mapping[str, str]) -> None:
    """Replace a safetensors file by one with these tensors added, replaced, or left out (None).

    Takes the memory of the changed tensors alone.
    Raises: CheckpointDefect when the file is damaged; HarnessError when data does not fit its shape.
    """
    shard = read_shard(path)
    kept: list[tuple[str, Tensor | RawTensor]] = [
        (tensor.name, changes.get(tensor.name) or tensor)
        for tensor in shard.tensors
        if changes.get(tensor.name, tensor) is not None
    ]
    there = {tensor.name for tensor in shard.tensors}
    kept += [(name, tensor) for name, tensor in changes.items() if tensor is not None and name not in there]
    kept.sort(key=lambda pair: -BITS_OF_DTYPE[pair[1].dtype])  # as the library does: every tensor stays aligned
    with path.open("rb") as old, replacing(path, size_bytes=shard.size_bytes) as new:
        new.write(_header(kept, metadata, path, like_bytes=shard.header_bytes))
        new.flush()
        for begin, end, data in _pieces(kept, shard):
            if data is None:
                copy_range(old.fileno(), new.fileno(), begin, end - begin)
            else:
                new.write(data)
                new.flush()


@contextmanager
def replacing(path: Path, *, size_bytes: int = 0) -> Iterator[IO[bytes]]:
    """Write a new file beside `path` and give it that name at the end; nothing is left when that fails.

    `size_bytes` is about as much as will be written: its space is allocated first, which makes writing faster.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("xb") as file:
            allocate(file.fileno(), size_bytes)
            yield file
            file.flush()
            if size_bytes:  # less may have been written than was allocated
                os.ftruncate(file.fileno(), os.lseek(file.fileno(), 0, os.SEEK_CUR))
        path.unlink(missing_ok=True)  # renaming over a name makes ext4 write out the whole new file first
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)


def _header(
    kept: list[tuple[str, Tensor | RawTensor]], metadata: Mapping[str, str], path: Path, *, like_bytes: int
) -> bytes:
    """Return length and header, padded so that data keep their place within a page: those are copied much faster."""
    described: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    begin = 0
    for name, tensor in kept:
        size = len(tensor.data) if isinstance(tensor, RawTensor) else tensor.size_bytes
        if size * 8 != prod(tensor.shape) * BITS_OF_DTYPE[tensor.dtype]:
            raise HarnessError(
                f'cannot write "{path}": tensor "{name}" has {size:,} bytes, expected those of '
                f"{tensor.dtype} {list(tensor.shape)}"
            )
        described[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, begin + size]}
        begin += size
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8 if like_bytes % 8 else (like_bytes - len(text)) % PAGE_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _pieces(
    kept: list[tuple[str, Tensor | RawTensor]], shard: Shard
) -> Iterator[tuple[int, int, bytes | memoryview | None]]:
    """Yield the data section: ranges of the old file, as long as they can be, and the bytes of changed tensors."""
    begin = end = 0
    for _, tensor in kept:
        if isinstance(tensor, RawTensor):
            if end > begin:
                yield begin, end, None
            begin = end = 0
            yield 0, 0, tensor.data
            continue
        first, last = shard.data_start_byte + tensor.begin_byte, shard.data_start_byte + tensor.end_byte
        if first != end:
            if end > begin:
                yield begin, end, None
            begin = first
        end = last
    if end > begin:
        yield begin, end, None
