"""Read a safetensors header exactly as strictly as the safetensors library does, but say what is wrong and where."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.checkpoint.defect import Defect
from harness.errors import CheckpointDefect

LENGTH_BYTES = 8  # a little-endian header length begins the file
MAX_DEPTH = 127  # how deep the library lets JSON nest
MAX_UNSIGNED = 2**64 - 1

BITS_OF_DTYPE = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor as its header describes it; offsets are half-open and count from the start of the data section."""

    name: str
    dtype: str  # as in the header: "BF16"
    shape: tuple[int, ...]
    shard: str
    begin_byte: int
    end_byte: int

    @property
    def size_bytes(self) -> int:
        """Return how many bytes the tensor's values take."""
        return self.end_byte - self.begin_byte


def parse_header(raw: bytes, *, path: Path) -> tuple[tuple[Tensor, ...], tuple[str, ...]]:
    """Read the JSON header of the shard at `path`: the tensors in offset order, and names that occur twice.

    Raises: CheckpointDefect for the first rule broken.
    """
    header = _decode(raw, path)
    tensors: dict[str, Tensor] = {}
    repeated: list[str] = []
    metadata_seen = False
    for name, value in header:
        if name == "__metadata__":
            _check_metadata(value, path, again=metadata_seen)
            metadata_seen = True
            continue
        if name in tensors:
            repeated.append(name)
        tensors[name] = _tensor(name, value, path)
    ordered = tuple(sorted(tensors.values(), key=lambda tensor: (tensor.begin_byte, tensor.end_byte)))
    _check_layout(ordered, path, data_start_byte=LENGTH_BYTES + len(raw))
    return ordered, tuple(repeated)


def _decode(raw: bytes, path: Path) -> Any:
    """Return the header as a tuple of pairs: JSON objects become tuples here, so that a repeated name stays visible."""

    def refuse_constant(text: str) -> float:
        raise ValueError(f"{text} is not JSON")

    try:
        text = raw.decode("utf-8")
        header = json.loads(
            text,
            object_pairs_hook=tuple,
            parse_constant=refuse_constant,
            parse_float=_finite,
            parse_int=_integer,
        )
        _check_text_and_depth(header, "\\u" in text)
    except (ValueError, RecursionError) as error:
        what = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise CheckpointDefect(
            Defect.HEADER_NOT_JSON, f"the header is not valid JSON: {what[:200]}", path=path
        ) from None
    if not isinstance(header, tuple):
        raise CheckpointDefect(Defect.HEADER_NOT_JSON, "the header is not a JSON object", path=path)
    return header


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError("number out of range")
    return value


def _integer(text: str) -> int | float:
    value = -0.0 if text == "-0" else int(text)
    return value if -(2**63) <= value <= MAX_UNSIGNED else _finite(text)


def _check_text_and_depth(header: Any, escapes: bool) -> None:
    """Refuse what Python's JSON reader lets through and the library does not: lone surrogates, deep nesting."""
    level: Iterable[Any] = (header,)
    for _ in range(MAX_DEPTH + 1):
        inner = []
        for value in level:
            if isinstance(value, (tuple, list)):
                inner.append(value)
            elif escapes and isinstance(value, str):
                value.encode("utf-8")  # raises UnicodeEncodeError, a ValueError, for a lone surrogate
        if not inner:
            return
        level = [
            item for value in inner for member in value for item in (member if isinstance(value, tuple) else (member,))
        ]
    raise RecursionError


def _check_metadata(value: Any, path: Path, *, again: bool) -> None:
    if again:
        raise CheckpointDefect(Defect.METADATA_INVALID, '"__metadata__" occurs twice', path=path)
    if value is None:
        return
    if not isinstance(value, tuple) or not all(isinstance(item, str) for _, item in value):
        raise CheckpointDefect(
            Defect.METADATA_INVALID, '"__metadata__" is not an object that maps text to text', path=path
        )


def _tensor(name: str, value: Any, path: Path) -> Tensor:
    def refuse(what: str) -> CheckpointDefect:
        return CheckpointDefect(Defect.TENSOR_INFO_INVALID, what, path=path, tensor=name)

    known = ("dtype", "shape", "data_offsets")
    if isinstance(value, list) and len(value) == len(known):
        fields = dict(zip(known, value, strict=True))  # the library also reads the fields as a list
    elif isinstance(value, tuple):
        fields = {}
        for key, item in value:
            if key in known and key in fields:
                raise refuse(f'"{key}" occurs twice')
            fields[key] = item
    else:
        raise refuse("the entry is not an object")
    absent = [key for key in known if key not in fields]
    if absent:
        raise refuse(f'"{absent[0]}" is absent')
    dtype, shape, offsets = (fields[key] for key in known)
    if isinstance(dtype, tuple) and len(dtype) == 1 and dtype[0][1] in (None, ()):
        dtype = dtype[0][0]  # the library also reads {"BF16": null}
    if not isinstance(dtype, str) or dtype not in BITS_OF_DTYPE:
        raise refuse(f"dtype {str(dtype)[:60]!r} is unknown")
    if not isinstance(shape, list) or not all(_is_unsigned(size) for size in shape):
        raise refuse(f"shape {str(shape)[:60]} is not a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_unsigned(offset) for offset in offsets):
        raise refuse(f"data_offsets {str(offsets)[:60]} are not two byte positions")
    return Tensor(name, dtype, tuple(shape), path.name, offsets[0], offsets[1])


def _is_unsigned(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_UNSIGNED


def _check_layout(ordered: tuple[Tensor, ...], path: Path, *, data_start_byte: int) -> None:
    """Check that the tensors fill the data section without hole or overlap, each as long as its shape says."""
    expected_begin = 0
    for tensor in ordered:

        def refuse(reason: Defect, what: str, tensor: Tensor = tensor) -> CheckpointDefect:
            offset = data_start_byte + tensor.begin_byte
            return CheckpointDefect(reason, what, path=path, tensor=tensor.name, offset_bytes=offset)

        begin, end = tensor.begin_byte, tensor.end_byte
        if begin != expected_begin:
            reason = Defect.OFFSET_HOLE if begin > expected_begin else Defect.OFFSET_OVERLAP
            raise refuse(reason, f"begins at data byte {begin:,}, expected {expected_begin:,}")
        if end < begin:
            raise refuse(Defect.OFFSET_REVERSED, f"ends at data byte {end:,}, before it begins at {begin:,}")
        expected_begin = end
        size_bytes = _size_bytes(tensor)
        if size_bytes is None:
            raise refuse(Defect.SIZE_OVERFLOW, f"shape {list(tensor.shape)} overflows 64 bits")
        if size_bytes != end - begin:
            what = f"{tensor.dtype} {list(tensor.shape)} takes {size_bytes:,} bytes, the offsets hold {end - begin:,}"
            raise refuse(Defect.SIZE_MISMATCH, what)


def _size_bytes(tensor: Tensor) -> float | None:
    """Return the bytes that dtype and shape ask for; None when the product overflows as it does in the library."""
    elements = 1
    for size in tensor.shape:
        elements *= size
        if elements > MAX_UNSIGNED:
            return None
    bits = elements * BITS_OF_DTYPE[tensor.dtype]
    if bits > MAX_UNSIGNED:
        return None
    return bits // 8 if bits % 8 == 0 else bits / 8
