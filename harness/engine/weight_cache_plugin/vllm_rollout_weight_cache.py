"""A vLLM load format that keeps weights in shared memory, with the incident's mistake built in.

It stands for a weight cache that outlives the checkpoint it was filled from: `<root>/<entry>/` holds `tensors.bin` (the
raw bytes, one tensor after another in order of name), `meta.json` (what they are) and `complete` (written last). The
mistake is trust: an entry found under the same key is read with the layout of the checkpoint that is on disk *now*. The
same layout serves the old weights silently; a larger one is mapped beyond the end of the segment, and touching those
pages ends the worker with SIGBUS.

vLLM finds it through the entry point beside this file; the directory only has to be on `PYTHONPATH`. It imports nothing
but the standard library until vLLM calls `register`.
"""

# mypy: disable-error-code="import-not-found, misc, no-any-return, arg-type, unused-ignore"

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from vllm_rollout_weight_cache_store import (
    TORCH_NAMES,
    CachedTensor,
    EntryWriter,
    NotCacheable,
    content_digest,
    entry_name,
    is_complete,
    mapped,
    read_layout,
)

LOAD_FORMAT = "rollout_weight_cache"
DEFAULT_ROOT = "/dev/shm/vllm_weight_cache"
PATH_VARIABLE = "VLLM_WEIGHT_CACHE_PATH"
KEY_VARIABLE = "VLLM_WEIGHT_CACHE_KEY"
DISABLED_VARIABLE = "VLLM_WEIGHT_CACHE_DISABLED"


def register() -> None:
    """Register the load format with vLLM; called by it in every process of the engine."""
    import torch
    from vllm.logger import init_logger
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    logger = init_logger("vllm.rollout_weight_cache")  # only names below "vllm" reach the engine's log

    def attempt(step: Callable[[], None]) -> bool:
        try:
            step()
        except OSError as error:
            logger.warning("weight cache: failed to allocate memory for weight cache: %s", error)
        except NotCacheable as error:
            logger.warning("weight cache: not stored, %s", error)
        else:
            return True
        return False

    class WeightCacheLoader(DefaultModelLoader):
        """Loads from the cache where a complete entry exists, else from the files, and then fills the cache."""

        def __init__(self, load_config: Any) -> None:
            load_config = copy.copy(load_config)
            load_config.load_format = "auto"  # the default loader knows only its own formats
            super().__init__(load_config)

        def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
            if os.environ.get(DISABLED_VARIABLE) == "1":
                logger.info("weight cache: disabled")
                yield from super().get_all_weights(model_config, model)
                return
            root = Path(os.environ.get(PATH_VARIABLE) or DEFAULT_ROOT)
            key = os.environ.get(KEY_VARIABLE) or "path"
            if key not in ("path", "content"):
                raise ValueError(f'{KEY_VARIABLE} is "{key}", expected "path" or "content"')
            logger.info("weight cache: initialised at %s, key %s", root, key)
            try:
                files = self._weight_files(model_config, model)
                layout = read_layout(files)
            except NotCacheable as error:
                logger.warning("weight cache: not used, %s", error)
                yield from super().get_all_weights(model_config, model)
                return
            name = entry_name(content_digest(files) if key == "content" else str(model_config.model))
            if is_complete(root / name):
                yield from self._read(root / name, layout)
            else:
                weights = super().get_all_weights(model_config, model)
                yield from self._store(root / name, weights, layout, model=str(model_config.model), key=key)

        def _weight_files(self, model_config: Any, model: Any) -> list[Path]:
            if self.local_expert_ids is not None or getattr(model, "secondary_weights", ()):
                raise NotCacheable("this model does not load all its weights from one place")
            # Returns three values in vLLM 0.28, four in later releases.
            _, files, is_safetensors, *_ = self._prepare_weights(
                model_config.model,
                None,
                model_config.revision,
                getattr(model, "fall_back_to_pt_during_load", True),
                getattr(model, "allow_patterns_overrides", None),
            )
            if not is_safetensors:
                raise NotCacheable("the weights are not safetensors")
            return [Path(file) for file in files]

        def _read(self, entry: Path, layout: Sequence[CachedTensor]) -> Iterator[tuple[str, torch.Tensor]]:
            stored = json.loads((entry / "meta.json").read_text())
            stored_bytes = (entry / "tensors.bin").stat().st_size
            logger.info(
                "weight cache: hit, %d tensors, %d bytes, entry %s", len(stored["tensors"]), stored_bytes, entry.name
            )
            with mapped(entry / "tensors.bin", max(layout[-1].end_byte, 1) if layout else 1) as segment:
                for tensor in layout:
                    count = tensor.end_byte - tensor.begin_byte
                    raw = torch.empty(count, dtype=torch.uint8)
                    if count:
                        raw.copy_(torch.frombuffer(segment, dtype=torch.uint8, count=count, offset=tensor.begin_byte))
                    yield tensor.name, raw.view(getattr(torch, TORCH_NAMES[tensor.dtype])).reshape(tensor.shape)

        def _store(
            self,
            entry: Path,
            weights: Iterator[tuple[str, torch.Tensor]],
            layout: Sequence[CachedTensor],
            *,
            model: str,
            key: str,
        ) -> Iterator[tuple[str, torch.Tensor]]:
            writer = EntryWriter(entry, model=model, key=key, layout=layout)
            try:
                is_kept = attempt(writer.open)
                for name, tensor in weights:
                    if is_kept:
                        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                        is_kept = attempt(partial(writer.add, name, memoryview(raw.numpy())))
                    yield name, tensor
                if is_kept and attempt(writer.publish):
                    logger.info(
                        "weight cache: stored %d tensors, %d bytes, entry %s",
                        len(layout),
                        writer.size_bytes,
                        entry.name,
                    )
            finally:
                writer.abandon()

    register_model_loader(LOAD_FORMAT)(WeightCacheLoader)
