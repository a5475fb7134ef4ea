"""Identify a checkpoint by what it holds, never by path, file name, sharding or time."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from harness.checkpoint.defect import Defect
from harness.checkpoint.header import Tensor
from harness.checkpoint.shard import Shard, open_regular
from harness.checkpoint.survey import Checkpoint, survey
from harness.errors import CheckpointDefect

BLOCK_BYTES = 1024 * 1024
DIGEST_BYTES = 16
SERVED_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)

_digests: dict[tuple[int, int, int, int], dict[str, bytes]] = {}  # per file as it was: device, inode, size, mtime_ns


def weights_id(path: Path) -> str:
    """Return "w-" and 16 hex digits of a digest over every tensor's name, dtype, shape and bytes, sorted by name.

    Reads every tensor byte once per process and file (by inode, size and mtime_ns). Defects between files, such as an
    absent shard, do not matter here: what an engine would read is what is digested.
    Raises: CheckpointDefect when a file cannot be read as safetensors.
    """
    found, defects = survey(path)
    for defect in defects:
        if _stops_reading(found, defect):
            raise defect
    described: dict[str, bytes] = {}
    for shard in found.shards:
        digests = _tensor_digests(path / shard.name, shard)
        described |= {tensor.name: _described(tensor, digests[tensor.name]) for tensor in shard.tensors}
    whole = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for name in sorted(described):
        whole.update(described[name])
    return f"w-{whole.hexdigest()[:16]}"


def checkpoint_id(path: Path) -> str:
    """Return "c-" and 16 hex digits of a digest over the weights, config, generation defaults, tokenizer and template.

    Raises: CheckpointDefect when a file cannot be read.
    """
    whole = hashlib.blake2b(weights_id(path).encode(), digest_size=DIGEST_BYTES)
    for name in SERVED_FILES:
        if os.path.lexists(path / name):
            with os.fdopen(open_regular(path / name), "rb") as file:
                content = file.read()
            whole.update(f"\0{name}\0{len(content)}\0".encode())
            whole.update(content)
    return f"c-{whole.hexdigest()[:16]}"


def _stops_reading(found: Checkpoint, defect: CheckpointDefect) -> bool:
    """Say whether a defect keeps tensors from being read: of the directory, or of a weight file that was not loaded."""
    if defect.path == found.path:
        return not found.shards
    return defect.path.name.endswith(".safetensors") and defect.path.name in _files_to_load(found)


def _files_to_load(found: Checkpoint) -> set[str]:
    loaded = {shard.name for shard in found.shards}
    listed = {entry.name for entry in os.scandir(found.path) if entry.name.endswith(".safetensors")}
    if found.index is not None:
        listed &= set(found.index.weight_map.values())
    return listed - loaded


def _tensor_digests(path: Path, shard: Shard) -> dict[str, bytes]:
    descriptor = open_regular(path)
    try:
        status = os.fstat(descriptor)
        key = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        if key not in _digests:
            _digests[key] = {tensor.name: _digest(descriptor, shard, tensor, path) for tensor in shard.tensors}
        return _digests[key]
    finally:
        os.close(descriptor)


def _digest(descriptor: int, shard: Shard, tensor: Tensor, path: Path) -> bytes:
    state = hashlib.blake2b(digest_size=DIGEST_BYTES)
    position, end = shard.data_start_byte + tensor.begin_byte, shard.data_start_byte + tensor.end_byte
    while position < end:
        try:
            block = os.pread(descriptor, min(BLOCK_BYTES, end - position), position)
        except OSError as error:
            raise CheckpointDefect(Defect.UNREADABLE_FILE, str(error), path=path, tensor=tensor.name) from error
        if not block:
            what = "the file became shorter while it was read"
            raise CheckpointDefect(
                Defect.DATA_SECTION_SHORT, what, path=path, tensor=tensor.name, offset_bytes=position
            )
        state.update(block)
        position += len(block)
    return state.digest()


def _described(tensor: Tensor, digest: bytes) -> bytes:
    name = tensor.name.encode("utf-8")
    fields = f"{len(name)}:".encode(), name, f":{tensor.dtype}:{list(tensor.shape)}:".encode(), digest
    return b"".join(fields)
