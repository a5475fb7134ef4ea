"""Identify a checkpoint by what it holds, never by path, file name, sharding or time."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from blake3 import blake3

from harness.checkpoint.adapter import ADAPTER, ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapter_of
from harness.checkpoint.defect import Defect
from harness.checkpoint.hashing import Part, hash_parts
from harness.checkpoint.header import Tensor
from harness.checkpoint.shard import Shard, open_regular, read_shard
from harness.checkpoint.survey import Checkpoint, survey
from harness.errors import CheckpointDefect

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

# File systems stamp times in steps, of milliseconds or up to two seconds, and give the number of a removed file to the next
# one: what was written within a step cannot be told from what was there before, so it is not remembered.
SETTLED_NS = 2_000_000_000

_digests: dict[tuple[int, int, int, int, int], dict[str, bytes]] = {}  # per file as it was


def weights_id(path: Path) -> str:
    """Return "w-" and 16 hex digits of a digest over every tensor's name, dtype, shape and bytes, sorted by name.

    Those of its own LoRA adapter count too, and so does the config that scales them.
    Reads every tensor byte once per process and settled file (by inode, size and mtime_ns). Defects between files, such as an
    absent shard, do not matter here: what an engine would read is what is digested.
    Raises: CheckpointDefect when a file cannot be read as safetensors.
    """
    found, defects = survey(path)
    for defect in defects:
        if _stops_reading(found, defect):
            raise defect
    described: dict[str, bytes] = {}
    for shard in found.shards:
        digests = tensor_digests(path / shard.name, shard)
        described |= {tensor.name: _described(tensor, digests[tensor.name]) for tensor in shard.tensors}
    described |= _of_adapter(path)
    whole = blake3()
    for name in sorted(described):
        whole.update(described[name])
    return f"w-{whole.hexdigest()[:16]}"


def checkpoint_id(path: Path) -> str:
    """Return "c-" and 16 hex digits of a digest over the weights, config, generation defaults, tokenizer and template.

    Raises: CheckpointDefect when a file cannot be read.
    """
    whole = blake3(weights_id(path).encode())
    for name in SERVED_FILES:
        if os.path.lexists(path / name):
            content = _content(path / name)
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
    is_consolidated = any(name.startswith("consolidated") for name in loaded)  # then the other family is never read
    listed = {
        entry.name
        for entry in os.scandir(found.path)
        if entry.name.endswith(".safetensors") and (entry.name.startswith("consolidated") or not is_consolidated)
    }
    if found.index is not None:
        listed &= set(found.index.weight_map.values())
    return listed - loaded


def tensor_digests(path: Path, shard: Shard) -> Mapping[str, bytes]:
    """Return the 32-byte digest of every tensor of a safetensors file, read once per process and file that has settled.

    Raises: CheckpointDefect when the file cannot be read.
    """
    descriptor = open_regular(path)
    try:
        status = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    # The time of change too: copies keep the time of modification, and file systems give an inode's number out again.
    key = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
    if key in _digests:
        return _digests[key]
    is_settled = time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) > SETTLED_NS
    start = shard.data_start_byte
    parts = [Part(path, start + one.begin_byte, start + one.end_byte, one.name) for one in shard.tensors]
    digests = dict(zip((tensor.name for tensor in shard.tensors), hash_parts(parts), strict=True))
    if is_settled:
        _digests[key] = digests
    return digests


def _of_adapter(path: Path) -> dict[str, bytes]:
    adapter = adapter_of(path)
    if adapter is None:
        return {}
    shard = read_shard(adapter / ADAPTER_WEIGHTS)
    digests = tensor_digests(adapter / ADAPTER_WEIGHTS, shard)
    config = adapter / ADAPTER_CONFIG
    told = {} if not os.path.lexists(config) else {f"{ADAPTER}/{ADAPTER_CONFIG}": blake3(_content(config)).digest()}
    return told | {f"{ADAPTER}/{each.name}": _described(each, digests[each.name]) for each in shard.tensors}


def _content(path: Path) -> bytes:
    """Return the content of a small file.

    Raises: CheckpointDefect when it cannot be read.
    """
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            return file.read()
    except OSError as error:
        raise CheckpointDefect(Defect.UNREADABLE_FILE, error.strerror or str(error), path=path) from error


def _described(tensor: Tensor, digest: bytes) -> bytes:
    name = tensor.name.encode("utf-8")
    fields = f"{len(name)}:".encode(), name, f":{tensor.dtype}:{list(tensor.shape)}:".encode(), digest
    return b"".join(fields)
