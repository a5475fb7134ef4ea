"""A LoRA adapter with random weights from a seed, in the files of the PEFT library, and the checkpoint that it makes of its base.

The merged checkpoint is what an adapter's answers are compared with: a cold start on it must answer the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING

from harness.checkpoint.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from harness.checkpoint.copy import RawTensor, load_shard, private_copy, save_shard
from harness.checkpoint.manifest import Tensor, read_checkpoint
from harness.checkpoint.tiny import encode, write_json
from harness.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PREFIX = "base_model.model."
MODULES = ("q_proj", "v_proj", "o_proj", "down_proj")
STRENGTH = 0.5  # of the change, as a share of the spread of a weight of the tiny model: answers differ by whole nats


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """What decides every byte of an adapter."""

    seed: int
    rank: int = 8
    modules: tuple[str, ...] = MODULES

    def __post_init__(self) -> None:
        if self.rank < 1 or not self.modules:
            raise UsageError(
                f"an adapter of rank {self.rank} for {len(self.modules)} modules; expected at least 1 of both"
            )
        if not isinstance(self.seed, int) or self.seed < 0:
            raise UsageError(f"the seed of an adapter is {self.seed!r}, expected a whole number of at least 0")


def write_adapter(target: Path, base: Path, adapter: Adapter) -> Path:
    """Write an adapter for the checkpoint `base` into `target`, which is made.

    Raises: UsageError when the checkpoint has none of the modules.
    """
    import numpy as np

    generator = np.random.default_rng(adapter.seed)
    target.mkdir(parents=True)
    tensors: dict[str, RawTensor] = {}
    for tensor in _adapted(base, adapter):
        rows, columns = tensor.shape
        module = PREFIX + tensor.name.removesuffix(".weight")
        down = generator.standard_normal((adapter.rank, columns), dtype=np.float32) / np.float32(sqrt(columns))
        up = generator.standard_normal((rows, adapter.rank), dtype=np.float32) / np.float32(sqrt(adapter.rank))
        tensors[f"{module}.lora_A.weight"] = encode(down, "BF16")
        tensors[f"{module}.lora_B.weight"] = encode(up * np.float32(STRENGTH), "BF16")
    if not tensors:
        raise UsageError(f'"{base}" has none of the modules {", ".join(adapter.modules)}')
    save_shard(target / ADAPTER_WEIGHTS, tensors)
    write_json(
        target / ADAPTER_CONFIG,
        {
            "base_model_name_or_path": base.name,
            "bias": "none",
            "lora_alpha": adapter.rank,  # the product of both matrices is added as it is
            "lora_dropout": 0.0,
            "peft_type": "LORA",
            "r": adapter.rank,
            "target_modules": list(adapter.modules),
            "task_type": "CAUSAL_LM",
        },
    )
    return target


def merged(target: Path, base: Path, adapter: Path) -> Path:
    """Write the checkpoint that `base` becomes with the adapter in it; float32, so that nothing is rounded once more.

    Raises: UsageError when the adapter belongs to another checkpoint.
    """
    config = json.loads((adapter / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    scale = float(config["lora_alpha"]) / float(config["r"])
    parts = load_shard(adapter / ADAPTER_WEIGHTS)
    private_copy(base, target)
    for file in sorted(target.glob("*.safetensors")):
        tensors = {name: encode(_float32(tensor), "F32") for name, tensor in load_shard(file).items()}
        for name, tensor in tensors.items():
            module = PREFIX + name.removesuffix(".weight")
            if f"{module}.lora_A.weight" not in parts:
                continue
            up, down = _float32(parts.pop(f"{module}.lora_B.weight")), _float32(parts.pop(f"{module}.lora_A.weight"))
            if (up.shape[0], down.shape[1]) != tensor.shape:
                raise UsageError(f'the adapter "{adapter}" is for another shape of "{name}" than {list(tensor.shape)}')
            tensors[name] = encode(_float32(tensor) + scale * (up @ down), "F32")
        file.chmod(0o644)
        save_shard(file, tensors)
    if parts:
        raise UsageError(f'the adapter "{adapter}" changes what "{base}" has not: {sorted(parts)[0]}')
    (target / "config.json").chmod(0o644)
    write_json(
        target / "config.json",
        {**json.loads((base / "config.json").read_text(encoding="utf-8")), "torch_dtype": "float32"},
    )
    return target


def _adapted(base: Path, adapter: Adapter) -> Iterator[Tensor]:
    endings = tuple(f".{module}.weight" for module in adapter.modules)
    return (tensor for tensor in read_checkpoint(base).tensors if tensor.name.endswith(endings))


def _float32(tensor: RawTensor) -> NDArray[np.float32]:
    """Return the values of a BF16 or F32 tensor."""
    import numpy as np

    if tensor.dtype == "BF16":
        return (np.frombuffer(tensor.data, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(tensor.shape)
    if tensor.dtype == "F32":
        return np.frombuffer(tensor.data, "<f4").reshape(tensor.shape)
    raise UsageError(f"a tensor is {tensor.dtype}; adapters are merged into BF16 and F32 alone")
