"""Measure what a damaged copy costs: time and new disk, against copying the one shard that the damage rewrites.

    python benchmarks/damage.py [--gib 8] [--shards 16] [--rounds 5] [--only NAME,...] [--directory DIR]

The checkpoint is made of random bytes. Each round copies the shard and makes the damaged copy, in alternating order, both from
a warm page cache. Prints medians with the smallest and largest value, and both ratios: on a busy machine that of the smallest
values says more. Asserts nothing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

from harness import faults
from harness.checkpoint.copy import RawTensor, save_shard
from harness.checkpoint.tiny import write_json
from harness.clock import now_ns, seconds_between
from harness.damage import damage_copy
from harness.faults import Damage

HIDDEN = 4096
MATRICES = 14  # in a shard, as in two layers of a Llama
GIB = 1024**3


def main() -> None:
    """Make the checkpoint, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=8.0)
    parser.add_argument("--shards", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="comma-separated names of damages; default: all")
    parser.add_argument("--directory", type=Path, help="where to work; default: a temporary directory")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as scratch:
        place = Path(scratch)
        tensors = write_checkpoint(place / "checkpoint", size_bytes=int(options.gib * GIB), shards=options.shards)
        shard = place / "checkpoint" / f"model-00001-of-{options.shards:05}.safetensors"
        damages: dict[str, Damage] = {
            "widen_tensor": faults.widen_tensor(tensors, dim=0, by=1),
            "drop_tensor": faults.drop_tensor(tensors),
            "flip_bit": faults.flip_bit(tensors),
            "truncate_shard": faults.truncate_shard(0, cut_bytes=1),
            "zero_tail": faults.zero_tail(0),
            "mismatched_config": faults.mismatched_config(changes={"rope_theta": 1.0}),
        }
        print(f"{options.shards} shards of {shard.stat().st_size / 2**20:.0f} MiB, {options.rounds} rounds")
        wanted = options.only.split(",") if options.only else list(damages)
        for name, fault in ((name, damages[name]) for name in wanted):
            measure(name, fault, place, shard, options.rounds)


def measure(name: str, fault: Damage, place: Path, shard: Path, rounds: int) -> None:
    """Time a damage and a copy of the shard, in alternating order, and print both."""
    copies_s: list[float] = []
    damages_s: list[float] = []
    written = 0

    def copy() -> None:
        copies_s.append(timed(lambda: shutil.copyfile(shard, place / "copied")))
        (place / "copied").unlink()

    def damage() -> None:
        nonlocal written
        free = disk_used(place)
        damages_s.append(timed(lambda: damage_copy(place / "checkpoint", place / "out", fault)))
        written = disk_used(place) - free
        (place / "out").chmod(0o755)
        shutil.rmtree(place / "out")

    for number in range(rounds):
        for step in (copy, damage) if number % 2 else (damage, copy):
            step()
    ratio, least = statistics.median(damages_s) / statistics.median(copies_s), min(damages_s) / min(copies_s)
    print(
        f"{name:18} {told(damages_s)}; copy of one shard {told(copies_s)}; {ratio:.2f} times (smallest: {least:.2f}); "
        f"{written / shard.stat().st_size:.3f} shards of new disk",
        flush=True,
    )


def write_checkpoint(path: Path, *, size_bytes: int, shards: int) -> str:
    """Write config, weight index and shards of random BF16 matrices; return the name of a matrix in the first shard."""
    path.mkdir()
    rows = max(1, size_bytes // shards // MATRICES // (HIDDEN * 2))
    weight_map = {}
    for number in range(1, shards + 1):
        name = f"model-{number:05}-of-{shards:05}.safetensors"
        tensors = {
            f"model.layers.{number}.{part}.weight": RawTensor("BF16", (rows, HIDDEN), os.urandom(rows * HIDDEN * 2))
            for part in range(MATRICES)
        }
        save_shard(path / name, tensors)
        weight_map |= dict.fromkeys(tensors, name)
    write_json(path / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    write_json(path / "config.json", {"rope_theta": 10000.0, "hidden_size": HIDDEN})
    return "model.layers.1.2.weight"


def disk_used(path: Path) -> int:
    """Return the bytes on disk of every file below a directory, each once however many names it has."""
    states = {(s.st_dev, s.st_ino): s for each in path.rglob("*") if not each.is_symlink() for s in [each.stat()]}
    return sum(state.st_blocks * 512 for state in states.values())


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that some work takes."""
    started = now_ns()
    work()
    return seconds_between(started, now_ns())


def told(values_s: list[float]) -> str:
    """Return median, smallest and largest."""
    return f"{statistics.median(values_s):.3f} s ({min(values_s):.3f} to {max(values_s):.3f})"


if __name__ == "__main__":
    main()
