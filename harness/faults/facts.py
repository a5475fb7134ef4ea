"""What is on disk in a checkpoint now, for proofs: read back every time, never remembered."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from harness.checkpoint.copy import RawTensor
from harness.checkpoint.defect import Defect
from harness.checkpoint.digest import weights_id
from harness.checkpoint.hashing import Part, hash_parts
from harness.checkpoint.manifest import Shard, Tensor, read_shard
from harness.errors import CheckpointDefect, FaultNotApplicable

INDEX_NAME = "model.safetensors.index.json"
BLOCK_BYTES = 256 * 1024  # a block that stays in the processor's cache
CONFIG_NAME = "config.json"


def weight_files(path: Path) -> tuple[str, ...]:
    """Return the names of the weight files an engine would load from a directory, in name order."""
    if (path / INDEX_NAME).exists():
        named = set(read_json(path / INDEX_NAME).get("weight_map", {}).values())
        return tuple(sorted(name for name in named if Path(name).name == name and (path / name).exists()))
    return tuple(sorted(file.name for file in path.glob("*.safetensors")))


def read_shards(path: Path) -> tuple[Shard, ...]:
    """Return the headers of a directory's weight files.

    Raises: FaultNotApplicable when there is none, or one cannot be read.
    """
    names = weight_files(path)
    if not names:
        raise FaultNotApplicable(f'no safetensors file in "{path}"')
    try:
        return tuple(read_shard(path / name) for name in names)
    except CheckpointDefect as error:
        raise FaultNotApplicable(f'"{path}" cannot be read: {error}') from error


def read_json(path: Path) -> dict[str, Any]:
    """Return a decoded JSON object.

    Raises: FaultNotApplicable when the file is absent or holds something else.
    """
    try:
        decoded = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FaultNotApplicable(f'"{path}" cannot be read: {error}') from error
    if not isinstance(decoded, dict):
        raise FaultNotApplicable(f'"{path}" is not a JSON object')
    return decoded


def read_tensor(path: Path, shard: str, name: str) -> RawTensor | None:
    """Return a tensor with its bytes as they are on disk; None when it is absent.

    Read, not mapped: in a mapping, a file that somebody cuts meanwhile would end this process (SIGBUS). Bytes may be written to:
    they are this tensor's own.
    Raises: CheckpointDefect when the file ends before the tensor does.
    """
    header = read_shard(path / shard)
    tensor = next((tensor for tensor in header.tensors if tensor.name == name), None)
    if tensor is None:
        return None
    data = np.empty(tensor.size_bytes, np.uint8).data
    begin, filled = header.data_start_byte + tensor.begin_byte, 0
    with (path / shard).open("rb", buffering=0) as file:
        file.seek(begin)
        while filled < tensor.size_bytes:
            read = file.readinto(data[filled:])
            if not read:
                what = "the file became shorter while it was read"
                raise CheckpointDefect(
                    Defect.DATA_SECTION_SHORT, what, path=path / shard, tensor=name, offset_bytes=begin + filled
                )
            filled += read
    return RawTensor(tensor.dtype, tensor.shape, data)


def holds_tensor(path: Path, shard: str, name: str, wanted: RawTensor) -> bool:
    """Say whether a tensor on disk is the wanted one in dtype, shape and every byte; reads it in blocks."""
    header = read_shard(path / shard)
    tensor = next((tensor for tensor in header.tensors if tensor.name == name), None)
    if tensor is None or (tensor.dtype, tensor.shape) != (wanted.dtype, wanted.shape):
        return False
    if len(wanted.data) != tensor.size_bytes:
        return False
    block = memoryview(bytearray(min(BLOCK_BYTES, max(1, tensor.size_bytes))))
    with (path / shard).open("rb", buffering=0) as file:
        file.seek(header.data_start_byte + tensor.begin_byte)
        for begin in range(0, tensor.size_bytes, len(block)):
            part = block[: min(len(block), tensor.size_bytes - begin)]
            expected = np.frombuffer(wanted.data, np.uint8, count=len(part), offset=begin)
            if file.readinto(part) != len(part) or not np.array_equal(np.frombuffer(part, np.uint8), expected):
                return False
    return True


def tensor_facts(path: Path, shard: str, name: str) -> dict[str, Any] | None:
    """Return dtype, shape and digest of a tensor as they are on disk; None when it is absent. Reads it in blocks."""
    header = read_shard(path / shard)
    tensor = next((tensor for tensor in header.tensors if tensor.name == name), None)
    if tensor is None:
        return None
    (digest,) = hash_parts([_part(path, header, tensor)])
    return {"dtype": tensor.dtype, "shape": list(tensor.shape), "blake3": digest.hex()}


def facts_of(tensor: RawTensor, *, threads: int = blake3.AUTO) -> dict[str, Any]:
    """Return what `tensor_facts` will find when this tensor is on disk."""
    digest = blake3(tensor.data, max_threads=threads).hexdigest()
    return {"dtype": tensor.dtype, "shape": list(tensor.shape), "blake3": digest}


def file_facts(path: Path) -> dict[str, Any] | None:
    """Return size and digest of a file as it is on disk; None when it is absent."""
    if not path.exists():
        return None
    size = path.stat().st_size
    try:
        (digest,) = hash_parts([Part(path, 0, size)])
    except CheckpointDefect as defect:  # it became shorter while it was read, or may not be read
        return {"size_bytes": size, "blake3": None, "defect": str(defect.reason)}
    return {"size_bytes": size, "blake3": digest.hex()}


def weight_facts(path: Path) -> dict[str, Any]:
    """Return the facts of every tensor that an engine would load from a directory, by name."""
    tensors = [(shard, tensor) for shard in read_shards(path) for tensor in shard.tensors]
    parts = [_part(path, shard, tensor) for shard, tensor in tensors]
    return {
        tensor.name: {"dtype": tensor.dtype, "shape": list(tensor.shape), "blake3": digest.hex()}
        for (_, tensor), digest in zip(tensors, hash_parts(parts), strict=True)
    }


def _part(path: Path, shard: Shard, tensor: Tensor) -> Part:
    begin = shard.data_start_byte
    return Part(path / shard.name, begin + tensor.begin_byte, begin + tensor.end_byte, tensor.name)


def shard_facts(path: Path) -> dict[str, Any] | None:
    """Return digests of the layout and of the whole of one weight file; None when it cannot be read."""
    try:
        shard = read_shard(path)
    except CheckpointDefect:
        return None
    layout = [(tensor.name, tensor.dtype, tensor.shape, tensor.begin_byte) for tensor in shard.tensors]
    return {"layout": digest_of(layout), **(file_facts(path) or {})}


def refusal(path: Path) -> str | None:
    """Return why a weight file would be refused; None when it is whole."""
    try:
        read_shard(path)
    except CheckpointDefect as defect:
        return str(defect)
    return None


def loaded_weights_id(path: Path) -> str | None:
    """Return the weights_id of what an engine would load from a directory; None when it would load nothing."""
    try:
        return weights_id(path)
    except CheckpointDefect:
        return None


def digest_of(facts: Any) -> str:
    """Return one short digest of facts, for evidence that stays readable."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
