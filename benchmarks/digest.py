"""Measure how fast a manifest's digests are computed, against how fast the same file is read from the page cache.

    python benchmarks/digest.py [--size-gb 2] [--rounds 7] [--directory DIR]

Every round does each thing once, so that all of them meet the same disturbances; the best of each counts. Prints ratios
to reading; asserts nothing.
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from blake3 import blake3

from harness.checkpoint.hashing import Part, hash_parts

BLOCK_BYTES = 16 * 1024 * 1024
PARTS = 20
READ = "read by one thread"


def main() -> None:
    """Write a file, read and hash it, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-gb", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--directory", type=Path, help="where the file lies while it is read")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as scratch:
        path = Path(scratch) / "weights"
        with path.open("wb") as file:
            for _ in range(max(1, int(options.size_gb * 1e9 / BLOCK_BYTES))):
                file.write(secrets.token_bytes(BLOCK_BYTES))
        size = path.stat().st_size
        edges = [size * number // PARTS for number in range(PARTS + 1)]
        tensors = [Part(path, begin, end) for begin, end in pairwise(edges)]
        things: dict[str, Callable[[], object]] = {
            READ: lambda: read(path),
            "cat": lambda: subprocess.run(["cat", path], stdout=subprocess.DEVNULL, check=True),
            f"digests of {PARTS} tensors": lambda: hash_parts(tensors),
            "digest of one file": lambda: hash_parts([Part(path, 0, size)]),
            "BLAKE3, mapped, all threads": lambda: blake3(max_threads=blake3.AUTO).update_mmap(path).digest(),
            "sha256sum": lambda: subprocess.run(["sha256sum", path], stdout=subprocess.DEVNULL, check=True),
        }
        best = dict.fromkeys(things, 0.0)
        for _ in range(options.rounds):
            for name, do in things.items():
                begun = time.perf_counter()
                do()
                best[name] = max(best[name], size / (time.perf_counter() - begun) / 1e9)
    print(f"{size / 1e9:.1f} GB, {len(os.sched_getaffinity(0))} cores, load average {os.getloadavg()[0]:.1f}")
    for name, gb_per_s in best.items():
        print(f"{name:30} {gb_per_s:6.2f} GB/s   {gb_per_s / best[READ]:5.2f} of reading")


def read(path: Path) -> None:
    """Read a file into memory that stays in the cache of the core."""
    block = bytearray(256 * 1024)
    with path.open("rb", buffering=0) as file:
        while file.readinto(block):
            pass


if __name__ == "__main__":
    main()
