"""Where a checkpoint keeps a LoRA adapter of its own: in one directory beside its weights, in the files of the PEFT library."""

from __future__ import annotations

from pathlib import Path

ADAPTER = "adapter"  # the directory in a checkpoint
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"


def adapter_of(checkpoint: Path) -> Path | None:
    """Return the directory of a checkpoint's own adapter, None where it has none."""
    adapter = checkpoint / ADAPTER
    return adapter if (adapter / ADAPTER_WEIGHTS).is_file() else None
