"""Is `np/` made from the `.bin` beside it? Checksums of both are compared; no pickle is loaded and no array built.

Source: `--load-format npcache` of vLLM 0.28.0 to 0.33.0 writes `np/` once, a file a tensor, and never looks at the `.bin`
again. A `.bin` is a zip archive, whose directory holds a CRC-32 of every tensor's bytes as they are stored.
"""

from __future__ import annotations

import os
import re
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from harness.checkpoint.shard import open_regular
from harness.errors import CheckpointDefect
from harness.guards.finding import PreflightFinding, Severity, shortened

STORED = re.compile(r"(?:.*/)?data/\d{1,9}")
MAGIC = b"\x93NUMPY"
PREFIX_BYTES = 12  # of either version: magic, version, and the length of the header in 2 or 4 bytes
BLOCK_BYTES = 1 << 22
DIRECTORY_MAX_BYTES = 1 << 24  # over a hundred thousand tensors; what it costs to read is many times that
END_RECORD, WIDE_END_RECORD = b"PK\x05\x06", b"PK\x06\x06"
TAIL_BYTES = (1 << 16) + 128  # the longest comment, and the records before it


def numpy_cache_findings(path: Path, suffix: str = ".bin") -> Iterator[PreflightFinding]:
    """Yield the first array in `np/` that no tensor of the weights has the bytes of; nothing where that cannot be told."""
    try:
        arrays = sorted(entry.name for entry in os.scandir(path / "np") if entry.name != "weight_names.json")
        archives = sorted(name for name in os.listdir(path) if name.endswith(suffix))
    except OSError:
        return
    stored = _stored_checksums([path / name for name in archives])
    if len(stored) < 2:
        return  # no such archives, or a writer that leaves the checksums out
    for name in arrays:
        checksum = _array_checksum(path / "np" / name)
        if checksum is not None and checksum not in stored:
            yield PreflightFinding(
                id="D22",
                severity=Severity.SILENT,
                seen="an array whose bytes are in no tensor of the weights",
                expected=f"np/ made from {', '.join(map(shortened, archives[:3]))}",
                where=f'"np/{shortened(name)}"',
                remedy="delete np/ before every start, or leave --load-format out",
            )
            return


def _stored_checksums(archives: list[Path]) -> set[int]:
    found: set[int] = set()
    for path in archives:
        try:
            with os.fdopen(open_regular(path), "rb") as file:
                if _directory_bytes(file) > DIRECTORY_MAX_BYTES:
                    continue
                with zipfile.ZipFile(file) as archive:
                    found |= {entry.CRC for entry in archive.infolist() if STORED.fullmatch(entry.filename)}
        except (OSError, CheckpointDefect, ValueError, NotImplementedError, zipfile.BadZipFile):
            continue
    return found


def _directory_bytes(file: BinaryIO) -> int:
    """Return how long an archive says its directory is, which is read as a whole; 0 where it says nothing usable."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - TAIL_BYTES))
    tail = file.read(TAIL_BYTES)
    end, wide = tail.rfind(END_RECORD), tail.rfind(WIDE_END_RECORD)
    found = int.from_bytes(tail[end + 12 : end + 16], "little") if end >= 0 else 0
    if wide >= 0 and found == 2**32 - 1:  # beyond 4 GiB, where another record holds it
        found = int.from_bytes(tail[wide + 40 : wide + 48], "little")
    return found


def _array_checksum(path: Path) -> int | None:
    """Return the CRC-32 of what follows the header of an `.npy` file; None when it is none."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            prefix = file.read(PREFIX_BYTES)
            if len(prefix) < PREFIX_BYTES or not prefix.startswith(MAGIC):
                return None
            length_bytes = 2 if prefix[6] == 1 else 4
            start = 8 + length_bytes + int.from_bytes(prefix[8 : 8 + length_bytes], "little")
            file.seek(start)
            checksum = 0
            while block := file.read(BLOCK_BYTES):
                checksum = zlib.crc32(block, checksum)
            return checksum
    except (OSError, CheckpointDefect, ValueError):
        return None
