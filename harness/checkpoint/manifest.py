"""What a checkpoint directory holds, from its headers and small files alone; digests read the tensors too."""

from __future__ import annotations

from pathlib import Path

from harness.checkpoint.defect import Defect
from harness.checkpoint.digest import checkpoint_id, weights_id
from harness.checkpoint.header import Tensor
from harness.checkpoint.shard import Shard, read_shard
from harness.checkpoint.survey import Checkpoint, WeightIndex, survey
from harness.errors import CheckpointDefect

__all__ = [
    "Checkpoint",
    "Defect",
    "Shard",
    "Tensor",
    "WeightIndex",
    "checkpoint_id",
    "find_defects",
    "layout_of",
    "read_checkpoint",
    "read_shard",
    "weights_id",
]


def read_checkpoint(path: Path) -> Checkpoint:
    """Read what an engine would load from a checkpoint directory.

    Raises: CheckpointDefect with the first structural defect.
    """
    found, defects = survey(path)
    if defects:
        raise defects[0]
    return found


def find_defects(path: Path) -> tuple[CheckpointDefect, ...]:
    """Return every structural defect of a checkpoint directory; never raises for what is in its files."""
    return survey(path)[1]


def layout_of(path: Path) -> frozenset[tuple[str, str, tuple[int, ...]]]:
    """Return name, dtype and shape of every tensor.

    Raises: CheckpointDefect with the first structural defect.
    """
    return frozenset((tensor.name, tensor.dtype, tensor.shape) for tensor in read_checkpoint(path).tensors)
