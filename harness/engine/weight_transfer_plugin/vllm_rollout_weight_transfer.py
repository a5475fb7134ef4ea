"""A transfer engine for vLLM's weight updates that takes tensors from safetensors files, so that it works without a GPU.

Those that come with vLLM need CUDA. What the workers do around them (which weights are replaced when, and what a chunk that is
absent or refused leaves behind) is vLLM's own code, and the same. Files are named relative to the directory that the engine was
started on, as the engine sees it, so that a sender need not know where that is mounted.

vLLM finds it through the entry point beside this file; the directory only has to be on `PYTHONPATH`. It imports nothing but the
standard library until vLLM calls `register`.
"""

# mypy: disable-error-code="import-not-found, misc, unused-ignore"

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

BACKEND = "rollout_files"


def register() -> None:
    """Register the backend with vLLM; called by it in every process of the engine."""
    from safetensors import safe_open
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    @dataclass
    class Init(WeightTransferInitInfo):
        pass

    @dataclass
    class Update(WeightTransferUpdateInfo):
        files: dict[str, list[str]]  # names of tensors by the file that holds them

    class FileTransferEngine(WeightTransferEngine):
        init_info_cls = Init
        update_info_cls = Update

        def init_transfer_engine(self, init_info: Any) -> None:
            pass

        def start_weight_update(self) -> None:
            initialize_layerwise_reload(self.model)

        def update_weights(self, update_info: dict[str, Any]) -> None:
            # Without the synchronisation of the base class, which asks for an accelerator.
            self.receive_weights(self.parse_update_info(update_info))

        def receive_weights(self, update_info: Any) -> None:
            for name, tensors in update_info.files.items():
                with safe_open(Path(self.model_config.model) / name, framework="pt") as file:
                    self.model.load_weights([(tensor, file.get_tensor(tensor)) for tensor in tensors])

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)

        def shutdown(self) -> None:
            pass

    WeightTransferEngineFactory.register_engine(BACKEND, FileTransferEngine)
