"""The small files beside the weights: read whole, unless they are too long or made to take far more memory than their size."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from harness.checkpoint.defect import MAX_JSON_BYTES, Defect
from harness.checkpoint.shard import open_regular
from harness.errors import CheckpointDefect

# What a Python object costs for each character that begins one, at most; a text of "[0],[0]," costs 24 times its size.
BUILT_BYTES = {b"[": 96, b"{": 232, b",": 64}
SMALL_BUILT_BYTES, MAX_BUILT_RATIO = 64_000_000, 6


def read_json(path: Path) -> dict[str, Any]:
    """Read a small JSON file that must hold an object.

    Raises: CheckpointDefect when it cannot be read; ValueError with the reason when it is not a JSON object.
    """
    return parse_object(read_small(path))


def read_small(path: Path) -> bytes:
    """Return the bytes of a side file.

    Raises: CheckpointDefect when it cannot be read; ValueError when it is too long.
    """
    descriptor = open_regular(path)
    with os.fdopen(descriptor, "rb") as file:
        try:
            # Asked for the most at once, Python would map 100 MB and give them back, for every small file.
            expected_bytes = min(os.fstat(descriptor).st_size, MAX_JSON_BYTES) + 1
            raw = file.read(expected_bytes)
            if len(raw) == expected_bytes:  # it grew
                raw += file.read(MAX_JSON_BYTES + 1 - expected_bytes)
        except OSError as error:
            raise CheckpointDefect(Defect.UNREADABLE_FILE, error.strerror or str(error), path=path) from None
    if len(raw) > MAX_JSON_BYTES:
        raise ValueError(f"longer than {MAX_JSON_BYTES:,} bytes")
    return raw


def refuse_made_for_memory(raw: bytes) -> None:
    """Raise ValueError when a JSON text is made to take far more memory than its size."""
    built_bytes = sum(raw.count(character) * size for character, size in BUILT_BYTES.items())
    if built_bytes > SMALL_BUILT_BYTES + MAX_BUILT_RATIO * len(raw):
        raise ValueError(f"{len(raw):,} bytes that hold values enough for {built_bytes:,}")


def parse_object(raw: bytes) -> dict[str, Any]:
    """Read a JSON object, unless it is made to take far more memory than its text does.

    Raises: ValueError with the reason.
    """
    refuse_made_for_memory(raw)
    try:
        value = json.loads(raw.decode("utf-8"))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"holds a {type(value).__name__}, expected an object")
    return value
