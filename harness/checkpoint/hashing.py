"""Hash parts of files with BLAKE3 on every core, by reads in bounded memory.

Reads, not mappings: a mapped file that another process cuts short kills its reader with SIGBUS.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from harness.checkpoint.defect import Defect
from harness.checkpoint.shard import open_regular
from harness.errors import CheckpointDefect

BLOCK_BYTES = 2 * 1024 * 1024
WIDE_BLOCK_BYTES = 16 * 1024 * 1024  # where one hash has all threads
MAX_THREADS = 16  # 32 MB of blocks, and more than any disk feeds


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of a file that are hashed together; `tensor` names them in an error."""

    path: Path
    begin_byte: int
    end_byte: int
    tensor: str | None = None


def hash_parts(parts: Sequence[Part]) -> list[bytes]:
    """Return the 32 bytes of each part's BLAKE3, in the parts' order.

    Raises: CheckpointDefect when a file cannot be read, or is shorter than its part.
    """
    threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
    if len(parts) < threads:
        return [_hash(part, wide=True) for part in parts]
    # the largest first, so that no thread begins a long one when the others are done
    order = sorted(range(len(parts)), key=lambda number: parts[number].begin_byte - parts[number].end_byte)
    digests = [b""] * len(parts)
    with ThreadPoolExecutor(threads, thread_name_prefix="hash") as pool:
        try:
            for number, digest in zip(order, pool.map(_hash, [parts[number] for number in order]), strict=True):
                digests[number] = digest
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return digests


def _hash(part: Part, wide: bool = False) -> bytes:
    state = blake3(max_threads=blake3.AUTO if wide else 1)
    left = part.end_byte - part.begin_byte
    block = memoryview(bytearray(min(left, WIDE_BLOCK_BYTES if wide else BLOCK_BYTES)))
    descriptor = open_regular(part.path)
    try:
        while left:
            position = part.end_byte - left
            size = os.preadv(descriptor, [block[:left]], position)
            if not size:
                what = "the file became shorter while it was read"
                raise CheckpointDefect(
                    Defect.DATA_SECTION_SHORT, what, path=part.path, tensor=part.tensor, offset_bytes=position
                )
            state.update(block[:size])
            left -= size
    except OSError as error:
        what = error.strerror or str(error)
        raise CheckpointDefect(Defect.UNREADABLE_FILE, what, path=part.path, tensor=part.tensor) from error
    finally:
        os.close(descriptor)
    return state.digest()
