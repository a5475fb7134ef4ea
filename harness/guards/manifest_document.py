"""What a manifest says and how it is written down: a small JSON document, versioned."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.checkpoint.defect import MAX_JSON_BYTES
from harness.guards.durable import sync

FORMAT, VERSION = "vllm-rollout-harness manifest", 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRecord:
    """A tensor as it was published; `digest` is the BLAKE3 of its bytes, in hex."""

    dtype: str
    shape: tuple[int, ...]
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """A file as it was published; tensors in the order of their offsets, none for what is no safetensors file."""

    size_bytes: int
    digest: str
    tensors: Mapping[str, TensorRecord] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Every file of a checkpoint, by its path relative to the checkpoint."""

    files: Mapping[str, FileRecord]


def parse_manifest(raw: bytes) -> Manifest:
    """Read a manifest.

    Raises: ValueError saying what is wrong with it.
    """
    if len(raw) > MAX_JSON_BYTES:
        raise ValueError(f"longer than {MAX_JSON_BYTES:,} bytes")
    try:
        document = json.loads(raw)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f'not a manifest: "format" is not "{FORMAT}"')
    if document.get("version") != VERSION:
        raise ValueError(f"version {str(document.get('version'))[:20]}, expected {VERSION}")
    try:
        return Manifest(files={_text(name): _file_record(entry) for name, entry in document["files"].items()})
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"an entry is not as a manifest has it ({type(error).__name__}: {str(error)[:80]})") from None


def save_manifest(manifest: Manifest, file: Path) -> None:
    """Write a manifest durably; what lies there is replaced in one step.

    Raises: OSError.
    """
    text = json.dumps(_as_json(manifest), indent=1)
    partial = file.with_name(f".{file.name}.{os.getpid()}.partial")
    try:
        with partial.open("x", encoding="utf-8") as opened:
            opened.write(text + "\n")
            opened.flush()
            os.fsync(opened.fileno())
        partial.replace(file)
        sync(file.parent)
    finally:
        partial.unlink(missing_ok=True)


def _as_json(manifest: Manifest) -> dict[str, Any]:
    files: dict[str, Any] = {}
    for name, record in manifest.files.items():
        files[name] = {"size_bytes": record.size_bytes, "blake3": record.digest}
        if record.tensors:
            files[name]["tensors"] = {
                tensor: {"dtype": one.dtype, "shape": list(one.shape), "blake3": one.digest}
                for tensor, one in record.tensors.items()
            }
    return {"format": FORMAT, "version": VERSION, "files": files}


def _file_record(entry: Mapping[str, Any]) -> FileRecord:
    tensors = {
        _text(name): TensorRecord(
            dtype=_text(one["dtype"]), shape=tuple(map(_size, one["shape"])), digest=_text(one["blake3"])
        )
        for name, one in entry.get("tensors", {}).items()
    }
    return FileRecord(size_bytes=_size(entry["size_bytes"]), digest=_text(entry["blake3"]), tensors=tensors)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{str(value)[:40]} is no text")
    return value


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise TypeError(f"{str(value)[:40]} is no size")
    return value
