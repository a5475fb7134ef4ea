"""A transfer engine for vLLM's weight updates that takes tensors from safetensors files, so that it works without a GPU.

Those that come with vLLM need CUDA. What the workers do around them - which weights are replaced when, and what a chunk that is
absent or refused leaves behind - is vLLM's own code, and the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


def register() -> None:
    """Register the backend "rollout_files" with vLLM; called by it in every process of the engine."""
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
        path: str
        names: list[str]

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
            with safe_open(update_info.path, framework="pt") as file:
                self.model.load_weights([(name, file.get_tensor(name)) for name in update_info.names])

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)

        def shutdown(self) -> None:
            pass

    WeightTransferEngineFactory.register_engine("rollout_files", FileTransferEngine)
