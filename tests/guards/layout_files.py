"""Captured layouts of real checkpoints, and checkpoints rebuilt from them: true headers, no values, no disk space."""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from harness.checkpoint.header import BITS_OF_DTYPE, Tensor
from harness.checkpoint.shard import Shard
from harness.checkpoint.survey import Checkpoint

DIRECTORY = Path(__file__).parent / "layouts"
TOKENIZER = {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "added_tokens": []}


@dataclass(frozen=True)
class Layout:
    """What transformers wrote for one tiny model; `tensors` by name, as (dtype, shape, number of its shard)."""

    name: str
    config: dict[str, Any]
    has_formula: bool
    tensors: Mapping[str, tuple[str, tuple[int, ...], int]]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes by name."""
        return {name: shape for name, (_, shape, _) in self.tensors.items()}

    def with_shapes(self, shapes: Mapping[str, tuple[int, ...]], **config: Any) -> Layout:
        """Return the layout with other tensors, in one shard, and config values replaced."""
        tensors = {name: ("BF16", shape, 0) for name, shape in shapes.items()}
        return replace(self, tensors=tensors, config=self.config | config)

    def as_checkpoint(self) -> Checkpoint:
        """Return it as if it had been read from files."""
        tensors = tuple(Tensor(name, *entry[:2], "model.safetensors", 0, 0) for name, entry in self.tensors.items())
        return Checkpoint(Path("captured"), self.config, (Shard("model.safetensors", 0, 0, 0, tensors),), None)


def load(name: str) -> Layout:
    """Return one captured layout."""
    content = json.loads((DIRECTORY / f"{name}.json").read_text())
    tensors = {name: (dtype, tuple(shape), shard) for name, dtype, shape, shard in content["tensors"]}
    return Layout(name, content["config"], content["has_formula"], tensors)


def names(*, with_formula: bool | None = None) -> list[str]:
    """Return the names of the captured layouts."""
    found = sorted(path.stem for path in DIRECTORY.glob("*.json"))
    return found if with_formula is None else [name for name in found if load(name).has_formula is with_formula]


def write(layout: Layout, path: Path, *, sharded: bool = False) -> Path:
    """Write a checkpoint with true headers over sparse files, whole or in the shards in which it was captured."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(layout.config))
    (path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    of_shard: dict[int, dict[str, tuple[str, tuple[int, ...]]]] = defaultdict(dict)
    for name, (dtype, shape, shard) in layout.tensors.items():
        of_shard[shard if sharded else 0][name] = (dtype, shape)
    weight_map, total = {}, 0
    for number, tensors in sorted(of_shard.items()):
        name = f"model-{number + 1:05d}-of-{len(of_shard):05d}.safetensors" if sharded else "model.safetensors"
        weight_map |= dict.fromkeys(tensors, name)
        total += write_shard(path / name, tensors)
    if sharded:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def write_shard(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> int:
    """Write one safetensors file whose values are a hole; return how many bytes they would take."""
    header, offset = {}, 0
    for name, (dtype, shape) in tensors.items():
        end = offset + prod(shape) * BITS_OF_DTYPE[dtype] // 8
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    with path.open("r+b") as file:
        file.truncate(8 + len(text) + offset)
    return offset
