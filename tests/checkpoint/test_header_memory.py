"""Whatever a header holds, reading it takes less than ten times its size in memory, and pre-flight less than 100 MB more.

The headers have 4 MB here, so that the tests are quick; one of 90 MB is in the slow tier.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from memory_of_header import ACCEPTED, KINDS

PROGRAM = Path(__file__).with_name("memory_of_header.py")
HEADER_BYTES = 4_000_000
BASE_LIMIT_BYTES = 100_000_000
RATIO_LIMIT = 10


def measure(kind: str, directory: Path, size_bytes: int, what: str) -> tuple[list[str], int, int]:
    """Return what was found, the peak of memory and the header's size."""
    done = subprocess.run(
        [sys.executable, PROGRAM, kind, directory, str(size_bytes), what],
        capture_output=True,
        text=True,
        check=True,
        timeout=500,
    )
    said = json.loads(done.stdout)
    return said["found"], said["peak_bytes"], said["header_bytes"]


@pytest.mark.parametrize("kind", KINDS)
def test_reading_a_header(kind: str, tmp_path: Path) -> None:
    _, without_bytes, _ = measure(kind, tmp_path, 0, "read")
    found, peak_bytes, header_bytes = measure(kind, tmp_path, HEADER_BYTES, "read")
    assert header_bytes >= HEADER_BYTES
    assert (peak_bytes - without_bytes) / header_bytes < RATIO_LIMIT
    assert found == ([] if kind in ACCEPTED else ["tensor_info_invalid"])


@pytest.mark.parametrize("kind", ["tensors", "nested lists"])
def test_preflight(kind: str, tmp_path: Path) -> None:
    found, peak_bytes, header_bytes = measure(kind, tmp_path, HEADER_BYTES, "check")
    assert any("config" in finding for finding in found)
    assert peak_bytes < BASE_LIMIT_BYTES + RATIO_LIMIT * header_bytes


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tensors", "nested lists"])
def test_preflight_on_the_largest_header(kind: str, tmp_path: Path) -> None:
    _, peak_bytes, header_bytes = measure(kind, tmp_path, 90_000_000, "check")
    assert peak_bytes < BASE_LIMIT_BYTES + RATIO_LIMIT * header_bytes


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("kind", ["[0],", "{},", '{"a":0},', '"ab",', "1.5,", "300,"])
def test_preflight_on_a_side_file(name: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text('{"weight_map":[' + kind * (HEADER_BYTES // len(kind)) + "0]}")
    measured = measure("tensors", tmp_path, 0, "check")
    assert measured[1] < BASE_LIMIT_BYTES + RATIO_LIMIT * HEADER_BYTES
