"""Where raw tensor bytes come from: the shards, or something in front of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from harness.checkpoint.manifest import Checkpoint, Tensor
from harness.errors import CheckpointDefect

SHARD_CHANGED = "shard_changed"


class TensorSource(Protocol):
    """Hands out raw bytes of tensors."""

    def tensors(self, checkpoint: Checkpoint, wanted: Iterable[Tensor]) -> Iterator[tuple[Tensor, bytes]]:
        """Yield each wanted tensor with its raw little-endian bytes, in any order."""


class CheckpointFiles:
    """Tensors read from the shards themselves."""

    def tensors(self, checkpoint: Checkpoint, wanted: Iterable[Tensor]) -> Iterator[tuple[Tensor, bytes]]:
        """Yield each wanted tensor with its raw bytes, shard by shard in file order.

        Raises: CheckpointDefect when a shard has become shorter than its header said.
        """
        chosen = frozenset(wanted)
        for shard in checkpoint.shards:
            path = checkpoint.path / shard.name
            with path.open("rb") as file:
                for tensor in shard.tensors:
                    if tensor not in chosen:
                        continue
                    file.seek(shard.data_start_byte + tensor.begin_byte)
                    raw = file.read(tensor.size_bytes)
                    if len(raw) != tensor.size_bytes:
                        what = (
                            f"{tensor.size_bytes:,} bytes expected, {len(raw):,} there: the file shrank while loading"
                        )
                        raise CheckpointDefect(SHARD_CHANGED, what, path=path, tensor=tensor.name)
                    yield tensor, raw
