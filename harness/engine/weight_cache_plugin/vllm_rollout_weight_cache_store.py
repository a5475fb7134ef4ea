"""The segment behind the weight cache: how tensors lie in it, how it is filled, named and mapped. Needs no vLLM."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shutil
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

ENTRY_NAME_CHARACTERS = 16
HEADER_LIMIT_BYTES = 100_000_000  # the format's own limit
READ_CHUNK_BYTES = 1 << 20

TORCH_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
}


class NotCacheable(ValueError):
    """The weights cannot be laid out by the cache, so they are loaded as if there were none."""


@dataclass(frozen=True)
class CachedTensor:
    """One tensor of a layout; `dtype` is spelled as safetensors spells it and offsets are in `tensors.bin`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin_byte: int
    end_byte: int


def read_layout(files: Sequence[Path]) -> list[CachedTensor]:
    """Return the tensors of all files in order of name, packed without gaps.

    Raises: NotCacheable when a header cannot be read, or two files hold the same name.
    """
    found: dict[str, tuple[str, tuple[int, ...], int]] = {}
    for path in files:
        for name, tensor in _read_header(path).items():
            if name == "__metadata__":
                continue
            if name in found:
                raise NotCacheable(f'tensor "{name}" is in two files')
            try:
                begin, end = tensor["data_offsets"]
                shape = tuple(int(size) for size in tensor["shape"])
                found[name] = (str(tensor["dtype"]), shape, int(end) - int(begin))
            except (TypeError, KeyError, ValueError) as error:
                raise NotCacheable(f'"{path.name}": tensor "{name}" is badly described') from error
            if found[name][0] not in TORCH_NAMES:
                raise NotCacheable(f'"{path.name}": tensor "{name}" has dtype "{found[name][0]}"')
    layout = []
    offset = 0
    for name in sorted(found):
        dtype, shape, length = found[name]
        layout.append(CachedTensor(name, dtype, shape, offset, offset + length))
        offset += length
    return layout


def _read_header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else HEADER_LIMIT_BYTES + 1
        if length > HEADER_LIMIT_BYTES:
            raise NotCacheable(f'"{path.name}" has no safetensors header')
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise NotCacheable(f'"{path.name}" has no safetensors header') from error
    if not isinstance(header, dict):
        raise NotCacheable(f'"{path.name}" has no safetensors header')
    return header


def content_digest(files: Sequence[Path]) -> str:
    """Return the SHA-256 of all bytes of the files, taken in order of their names, in hexadecimal."""
    digest = hashlib.sha256()
    for path in sorted(files, key=lambda path: path.name):
        with path.open("rb") as file:
            while chunk := file.read(READ_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


def entry_name(text: str) -> str:
    """Return the name of the entry for a model path or a content digest."""
    return hashlib.sha256(text.encode()).hexdigest()[:ENTRY_NAME_CHARACTERS]


class EntryWriter:
    """Fills an entry under a private name and publishes it whole; an abandoned one is removed."""

    def __init__(self, entry: Path, *, model: str, key: str, layout: Sequence[CachedTensor]) -> None:
        self._entry = entry
        self._partial = entry.with_name(f"{entry.name}.{os.getpid()}.partial")
        self._meta = {"model": model, "key": key, "tensors": [asdict(tensor) for tensor in layout]}
        self._missing = {tensor.name: tensor for tensor in layout}
        self._file: BinaryIO | None = None
        self.size_bytes = layout[-1].end_byte if layout else 0

    def open(self) -> None:
        """Create the private directory.

        Raises: OSError when memory is short.
        """
        shutil.rmtree(self._partial, ignore_errors=True)
        self._partial.mkdir(parents=True)
        self._file = (self._partial / "tensors.bin").open("wb")

    def add(self, name: str, data: memoryview) -> None:
        """Write the bytes of one tensor at its place.

        Raises: NotCacheable when the layout has no such tensor of this size; OSError when memory is short.
        """
        tensor = self._missing.pop(name, None)
        if tensor is None or data.nbytes != tensor.end_byte - tensor.begin_byte:
            raise NotCacheable(f'tensor "{name}" is not as its header says')
        if self._file is None:
            raise NotCacheable("the entry is not open")
        self._file.seek(tensor.begin_byte)
        self._file.write(data)

    def publish(self) -> None:
        """Make the entry visible, unless another worker was first.

        Raises: NotCacheable when tensors are missing or a purge came in between; OSError when memory is short.
        """
        self._close()
        if self._missing:
            raise NotCacheable(f"{len(self._missing)} tensors were not loaded")
        try:
            (self._partial / "meta.json").write_text(json.dumps(self._meta), encoding="utf-8")
            (self._partial / "complete").touch()
            if not is_complete(self._entry):
                shutil.rmtree(self._entry, ignore_errors=True)
                self._partial.rename(self._entry)
        except FileNotFoundError as error:
            raise NotCacheable("it was purged while it was written") from error

    def abandon(self) -> None:
        """Remove what is not published. Idempotent."""
        try:
            self._close()
        finally:
            shutil.rmtree(self._partial, ignore_errors=True)

    def _close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            file.close()


def is_complete(entry: Path) -> bool:
    """Say whether an entry was written to its end."""
    return (entry / "complete").is_file()


@contextmanager
def mapped(path: Path, length_bytes: int) -> Iterator[ctypes.Array[ctypes.c_ubyte]]:
    """Map `length_bytes` of a file, however long it is; pages beyond its end raise SIGBUS when touched.

    Python's own `mmap` checks the size of the file first. The cache of the incident did not.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    prot_read, map_shared = 1, 1
    descriptor = os.open(path, os.O_RDONLY)
    try:
        address = libc.mmap(None, length_bytes, prot_read, map_shared, descriptor, 0)
    finally:
        os.close(descriptor)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    try:
        yield (ctypes.c_ubyte * length_bytes).from_address(address)
    finally:
        libc.munmap(address, length_bytes)
