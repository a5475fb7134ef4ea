"""The incident's weight cache in front of the shards, with its mistake: an entry is trusted by its key alone.

It shares the segment format and the wording of its log with the vLLM plug-in, so that either engine fills it for the other.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

from harness.checkpoint.manifest import Checkpoint, Tensor
from harness.engine.launch import (
    WEIGHT_CACHE_DISABLED_VARIABLE,
    WEIGHT_CACHE_KEY_VARIABLE,
    WEIGHT_CACHE_PATH_VARIABLE,
    WEIGHT_CACHE_ROOT,
)
from harness.engine.reference.tensor_source import CheckpointFiles
from harness.engine.weight_cache_plugin.vllm_rollout_weight_cache_store import (
    CachedTensor,
    EntryWriter,
    NotCacheable,
    content_digest,
    entry_name,
    is_complete,
    mapped,
    read_layout,
)

Log = Callable[[str, str], None]  # level, message


class WeightCacheSource:
    """Tensors from the cache where a complete entry exists, else from the shards, and then the entry is filled."""

    def __init__(self, *, model: str, environment: Mapping[str, str], log: Log) -> None:
        """Cache under the name `model` that was asked for; raises ValueError for an unknown kind of key."""
        self._model = model
        self._root = Path(environment.get(WEIGHT_CACHE_PATH_VARIABLE) or WEIGHT_CACHE_ROOT)
        self._key = environment.get(WEIGHT_CACHE_KEY_VARIABLE) or "path"
        self._is_disabled = environment.get(WEIGHT_CACHE_DISABLED_VARIABLE) == "1"
        self._log = log
        if self._key not in ("path", "content"):
            raise ValueError(f'{WEIGHT_CACHE_KEY_VARIABLE} is "{self._key}", expected "path" or "content"')

    def tensors(self, checkpoint: Checkpoint, wanted: Iterable[Tensor]) -> Iterator[tuple[Tensor, bytes]]:
        """Yield each wanted tensor with its raw bytes.

        A larger layout than the one stored is read beyond the end of the segment, which ends the process with SIGBUS.
        """
        if self._is_disabled:
            self._log("INFO", "weight cache: disabled")
            yield from CheckpointFiles().tensors(checkpoint, wanted)
            return
        self._log("INFO", f"weight cache: initialised at {self._root}, key {self._key}")
        files = [checkpoint.path / shard.name for shard in checkpoint.shards]
        try:
            layout = read_layout(files)
        except NotCacheable as error:
            self._log("WARNING", f"weight cache: not used, {error}")
            yield from CheckpointFiles().tensors(checkpoint, wanted)
            return
        entry = self._root / entry_name(content_digest(files) if self._key == "content" else self._model)
        if is_complete(entry):
            yield from self._read(entry, layout, wanted)
        else:
            yield from self._store(entry, layout, checkpoint, wanted)

    def _read(
        self, entry: Path, layout: list[CachedTensor], wanted: Iterable[Tensor]
    ) -> Iterator[tuple[Tensor, bytes]]:
        segment = entry / "tensors.bin"
        stored = json.loads((entry / "meta.json").read_text(encoding="utf-8"))
        size_bytes = os.stat(segment).st_size
        self._log(
            "INFO", f"weight cache: hit, {len(stored['tensors'])} tensors, {size_bytes} bytes, entry {entry.name}"
        )
        places = {tensor.name: tensor for tensor in layout}
        with mapped(segment, max(layout[-1].end_byte, 1) if layout else 1) as memory:
            for tensor in wanted:
                place = places[tensor.name]
                count = place.end_byte - place.begin_byte
                yield tensor, ctypes.string_at(ctypes.addressof(memory) + place.begin_byte, count)

    def _store(
        self, entry: Path, layout: list[CachedTensor], checkpoint: Checkpoint, wanted: Iterable[Tensor]
    ) -> Iterator[tuple[Tensor, bytes]]:
        writer = EntryWriter(entry, model=self._model, key=self._key, layout=layout)
        try:
            is_kept = self._attempt(writer.open)
            for tensor, raw in CheckpointFiles().tensors(checkpoint, wanted):
                if is_kept:
                    is_kept = self._attempt(partial(writer.add, tensor.name, memoryview(raw)))
                yield tensor, raw
            if is_kept and self._attempt(writer.publish):
                size = f"{len(layout)} tensors, {writer.size_bytes} bytes"
                self._log("INFO", f"weight cache: stored {size}, entry {entry.name}")
        finally:
            writer.abandon()

    def _attempt(self, step: Callable[[], None]) -> bool:
        try:
            step()
        except OSError as error:
            self._log("WARNING", f"weight cache: failed to allocate memory for weight cache: {error}")
        except NotCacheable as error:
            self._log("WARNING", f"weight cache: not stored, {error}")
        else:
            return True
        return False
