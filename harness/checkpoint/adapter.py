"""Where a checkpoint keeps a LoRA adapter of its own: in one directory beside its weights, in the files of the PEFT library."""

from __future__ import annotations

import stat
from pathlib import Path

from harness.checkpoint.defect import Defect
from harness.errors import CheckpointDefect

ADAPTER = "adapter"  # the directory in a checkpoint
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"


def adapter_of(checkpoint: Path) -> Path | None:
    """Return the directory of a checkpoint's own adapter, None where it has none.

    Raises: CheckpointDefect where it cannot be told, as in a directory that this user may not look into.
    """
    weights = checkpoint / ADAPTER / ADAPTER_WEIGHTS
    try:
        status = weights.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointDefect(Defect.UNREADABLE_FILE, error.strerror or str(error), path=weights) from None
    return weights.parent if stat.S_ISREG(status.st_mode) else None
