"""Hash parts of files with BLAKE3 on every core, by reads in bounded memory.

Reads, not mappings: a mapped file that another process cuts short kills its reader with SIGBUS.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from blake3 import blake3

from harness.checkpoint.defect import Defect
from harness.checkpoint.shard import open_regular
from harness.errors import CheckpointDefect

BLOCK_BYTES = 512 * 1024  # stays in the cache of the core that reads and then hashes it
WIDE_BLOCK_BYTES = 4 * 1024 * 1024  # where one hash has all threads
MAX_THREADS = 16  # more than any disk feeds


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of a file that are hashed together; `tensor` names them in an error."""

    path: Path
    begin_byte: int
    end_byte: int
    tensor: str | None = None

    @property
    def size_bytes(self) -> int:
        """Return how many bytes are hashed."""
        return self.end_byte - self.begin_byte


def hash_parts(parts: Sequence[Part]) -> list[bytes]:
    """Return the 32 bytes of each part's BLAKE3, in the parts' order.

    Raises: CheckpointDefect when a file cannot be read, or is shorter than its part.
    """
    digests = []
    for digest in hash_each(parts):
        if isinstance(digest, CheckpointDefect):
            raise digest
        digests.append(digest)
    return digests


def hash_each(parts: Sequence[Part]) -> list[bytes | CheckpointDefect]:
    """Return each part's digest, or why it has none, in the parts' order; never raises for what is in the files."""
    threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
    # A part that would keep one thread busy when the others are done is hashed by all of them.
    wide_bytes = sum(part.size_bytes for part in parts) // threads
    order = sorted(range(len(parts)), key=lambda number: -parts[number].size_bytes)
    digests: list[bytes | CheckpointDefect] = [b""] * len(parts)
    with ThreadPoolExecutor(min(threads, max(1, len(parts))), thread_name_prefix="hash") as pool:
        found = pool.map(lambda part: _try_hash(part, wide=part.size_bytes > wide_bytes), [parts[n] for n in order])
        try:
            for number, digest in zip(order, found, strict=True):
                digests[number] = digest
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return digests


def _try_hash(part: Part, *, wide: bool) -> bytes | CheckpointDefect:
    try:
        return _hash(part, wide=wide)
    except CheckpointDefect as defect:
        return defect


def _hash(part: Part, *, wide: bool) -> bytes:
    """Hash one part; a wide one with all threads, while the next block is already being read."""
    state = blake3(max_threads=blake3.AUTO if wide else 1)
    descriptor = open_regular(part.path)
    try:
        for block in _read_ahead(descriptor, part) if wide else _read(descriptor, part):
            state.update(block)
    except OSError as error:
        what = error.strerror or str(error)
        raise CheckpointDefect(Defect.UNREADABLE_FILE, what, path=part.path, tensor=part.tensor) from error
    finally:
        os.close(descriptor)
    return state.digest()


def _read(descriptor: int, part: Part) -> Iterator[memoryview]:
    block = memoryview(bytearray(min(part.size_bytes, BLOCK_BYTES)))
    position = part.begin_byte
    while position < part.end_byte:
        size = _read_into(block, descriptor, part, position)
        yield block[:size]
        position += size


def _read_ahead(descriptor: int, part: Part) -> Iterator[memoryview]:
    blocks = cycle([memoryview(bytearray(WIDE_BLOCK_BYTES)) for _ in range(2)])
    with ThreadPoolExecutor(1, thread_name_prefix="read") as reader:
        block, position = next(blocks), part.begin_byte
        reading = reader.submit(_read_into, block, descriptor, part, position)
        while position < part.end_byte:
            size, read = reading.result(), block
            position += size
            if position < part.end_byte:
                block = next(blocks)
                reading = reader.submit(_read_into, block, descriptor, part, position)
            yield read[:size]


def _read_into(block: memoryview, descriptor: int, part: Part, position: int) -> int:
    """Read up to a block and return how many bytes came.

    Raises: CheckpointDefect when the file ends before the part does.
    """
    size = os.preadv(descriptor, [block[: part.end_byte - position]], position)
    if not size:
        what = "the file became shorter while it was read"
        raise CheckpointDefect(
            Defect.DATA_SECTION_SHORT, what, path=part.path, tensor=part.tensor, offset_bytes=position
        )
    return size
