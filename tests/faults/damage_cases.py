"""One or more uses of every damage, on a small pair of checkpoints; shared by the tests of what holds for all."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness import faults
from harness.checkpoint import models
from harness.checkpoint.copy import private_copy
from harness.faults import Damage

DOWN = "model.layers.1.mlp.down_proj.weight"
UP = "model.layers.1.mlp.up_proj.weight"
SQUARE = "model.layers.0.self_attn.o_proj.weight"

DAMAGES: dict[str, Damage] = {
    "widen_columns": faults.widen_tensor(DOWN, dim=1, by=8),
    "widen_rows_at_end": faults.widen_tensor("*.layers.1.mlp.gate_proj.weight", dim=0, by=3, at="end"),
    "narrow": faults.narrow_tensor(DOWN, dim=1, by=5),
    "transpose": faults.transpose_tensor(SQUARE),
    "relayout": faults.relayout_tensor(DOWN),
    "relayout_square": faults.relayout_tensor(SQUARE),
    "relayout_vector": faults.relayout_tensor("model.norm.weight"),
    "drop": faults.drop_tensor(DOWN),
    "drop_fused_part": faults.drop_tensor("*.layers.0.self_attn.k_proj.weight"),
    "wider_weights": faults.wider_weights(),
    "flip_all": faults.flip_dtype_in_header(dtype="F16"),
    "flip_one": faults.flip_dtype_in_header(dtype="I16", tensor=DOWN),
    "cast_one_f16": faults.cast_tensor(DOWN, dtype="F16"),
    "cast_one_f32": faults.cast_tensor(DOWN, dtype="F32"),
    "cast_one_i8": faults.cast_tensor(DOWN, dtype="I8"),
    "cast_all_f16": faults.cast_all(dtype="F16"),
    "cast_all_f32": faults.cast_all(dtype="F32"),
    "cast_all_i8": faults.cast_all(dtype="I8"),
    "beyond_fp16": faults.beyond_fp16_range(UP),
    "beyond_fp16_compensated": faults.beyond_fp16_range(UP, inverse=DOWN),
    "missing_shard": faults.missing_shard(),
    "truncate_half": faults.truncate_shard(),
    "truncate_byte": faults.truncate_shard(0, cut_bytes=1),
    "zero_tail": faults.zero_tail(),
    "pointer_file": faults.pointer_file(),
    "new_config_old_weights": faults.new_config_old_weights(),
    "old_config_new_weights": faults.old_config_new_weights(),
    "stale_index": faults.stale_index(),
    "config_intermediate": faults.mismatched_config(changes={"intermediate_size": 48}),
    "config_rope": faults.mismatched_config(changes={"rope_theta": 500.0}),
}

# What the safetensors library says to the files afterwards: the damages that no reader of one file can see.
SILENT_FOR_THE_LIBRARY = set(DAMAGES) - {"missing_shard", "truncate_half", "truncate_byte", "pointer_file"}


@dataclass(frozen=True)
class Pair:
    """An old and a new checkpoint, which nobody may change, and private copies of the new one."""

    old: Path
    new: Path

    @contextmanager
    def copy(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory() as directory:
            yield private_copy(self.new, Path(directory) / "target")


def small(seed: int, *, shards: int = 2, intermediate: int = 64) -> models.ModelSource:
    """Return a checkpoint of about 100 KB."""
    return models.tiny_llama(
        seed, shards=shards, hidden=32, heads=2, kv_heads=1, intermediate=intermediate, vocabulary=300
    )


def tree(path: Path) -> dict[str, tuple[int, int, int, str]]:
    """Return inode, mtime, links and digest of every file below a directory."""
    found = {}
    for file in sorted(path.rglob("*")):
        state = file.lstat()
        content = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""
        found[str(file.relative_to(path))] = (state.st_ino, state.st_mtime_ns, state.st_nlink, content)
    return found


def contents(path: Path) -> dict[str, str]:
    """Return the digest of every file below a directory."""
    return {name: digest for name, (_, _, _, digest) in tree(path).items()}
