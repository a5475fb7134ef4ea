"""Measure how fast a manifest's digests are computed, against how fast the same file is read from the page cache.

    python benchmarks/digest.py [--size-gib 1] [--rounds 7] [--directory DIR]

"How fast it is read" depends on where the bytes go, so it is measured in four ways:
    cat                 `cat FILE > /dev/null`: a copy into 128 KiB that stay in the cache of one core
    one thread          the same with `readinto` and 256 KiB
    into memory         by one thread into a buffer as large as the file: the bytes arrive in memory
    through a pipe      `cat FILE | cat > /dev/null`: the bytes are copied three times, by two processes
Every round does each thing once, so that all of them meet the same disturbances; the best of each counts. Prints each as
a ratio to the first three; asserts nothing.
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

WRITE_BYTES = 16 * 1024 * 1024
CACHED_BYTES = 256 * 1024
PARTS = 20
CAT, CACHED, MEMORY = "cat", "read: one thread", "read: into memory"


def main() -> None:
    """Write a file, read and hash it, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--directory", type=Path, help="where the file lies while it is read")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as scratch:
        path = Path(scratch) / "weights"
        with path.open("wb") as file:
            for _ in range(max(1, int(options.size_gib * 1024**3 / WRITE_BYTES))):
                file.write(secrets.token_bytes(WRITE_BYTES))
        size = path.stat().st_size
        best = measured(path, size, options.rounds)
    print(f"{size / 1024**3:.1f} GiB, {len(os.sched_getaffinity(0))} cores, load average {os.getloadavg()[0]:.1f}")
    print(f"{'':30} {'GB/s':>6}   {'of cat':>9} {'of one thread':>14} {'of into memory':>15}")
    for name, gb_per_s in best.items():
        ratios = [gb_per_s / best[reading] for reading in (CAT, CACHED, MEMORY)]
        print(f"{name:30} {gb_per_s:6.2f}   {ratios[0]:9.2f} {ratios[1]:14.2f} {ratios[2]:15.2f}")


def measured(path: Path, size: int, rounds: int) -> dict[str, float]:
    """Return the best rate of each thing, in GB/s."""
    edges = [size * number // PARTS for number in range(PARTS + 1)]
    tensors = [Part(path, begin, end) for begin, end in pairwise(edges)]
    memory = bytearray(size)
    cached = bytearray(CACHED_BYTES)
    things: dict[str, Callable[[], object]] = {
        CAT: lambda: subprocess.run(["cat", path], stdout=subprocess.DEVNULL, check=True),
        CACHED: lambda: read(path, cached),
        MEMORY: lambda: read(path, memory),
        "read: through a pipe": lambda: through_pipe(path),
        f"harness: {PARTS} tensors": lambda: hash_parts(tensors),
        "harness: one file": lambda: hash_parts([Part(path, 0, size)]),
        "BLAKE3, mapped, all threads": lambda: blake3(max_threads=blake3.AUTO).update_mmap(path).digest(),
        "BLAKE3, in memory, all threads": lambda: blake3(memory, max_threads=blake3.AUTO).digest(),
        "BLAKE3, in memory, one thread": lambda: blake3(memory).digest(),
        "sha256sum": lambda: subprocess.run(["sha256sum", path], stdout=subprocess.DEVNULL, check=True),
    }
    best = dict.fromkeys(things, 0.0)
    for _ in range(rounds):
        for name, do in things.items():
            begun = time.perf_counter()
            do()
            best[name] = max(best[name], size / (time.perf_counter() - begun) / 1e9)
    return best


def read(path: Path, block: bytearray) -> None:
    """Read a file into one buffer, again and again."""
    with path.open("rb", buffering=0) as file:
        while file.readinto(block):
            pass


def through_pipe(path: Path) -> None:
    """Read a file in one process and hand it to another."""
    with subprocess.Popen(["cat", path], stdout=subprocess.PIPE) as reader:
        subprocess.run(["cat"], stdin=reader.stdout, stdout=subprocess.DEVNULL, check=True)


if __name__ == "__main__":
    main()
