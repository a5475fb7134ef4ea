"""Read a safetensors header exactly as strictly as the safetensors library does, but say what is wrong and where."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from sys import intern
from typing import Any

from harness.checkpoint.defect import Defect
from harness.checkpoint.json_reader import MAX_UNSIGNED, JsonReader
from harness.errors import CheckpointDefect

LENGTH_BYTES = 8  # a little-endian header length begins the file
METADATA = "__metadata__"  # the name of what is no tensor
FIELDS = ("dtype", "shape", "data_offsets")
FIELD_LIMIT_CHARACTERS = 64 * 1024  # of the text of one field: thousands of dimensions
NUMBER = r"(?:0|[1-9][0-9]{0,18}+)"
# A comma and the entry of a tensor behind it, as every writer makes them.
NEXT_USUAL = re.compile(
    rf',[ ]?"(?!{METADATA}")([^"\\\x00-\x1f]*+)":[ ]?\{{"dtype":[ ]?"(\w++)",'
    rf'[ ]?"shape":[ ]?\[((?:{NUMBER}(?:,[ ]?{NUMBER}){{0,15}}+)?)\],'
    rf'[ ]?"data_offsets":[ ]?\[({NUMBER}),[ ]?({NUMBER})\]\}}'
)

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


def parse_header(text: str, *, path: Path, data_start_byte: int) -> tuple[tuple[Tensor, ...], tuple[str, ...]]:
    """Read the JSON header of the shard at `path`: the tensors in offset order, and names that occur twice.

    Takes a few times the text's size in memory, whatever the text is.
    Raises: CheckpointDefect for the first rule broken.
    """
    try:
        tensors, repeated = _read(JsonReader(text), path)
    except ValueError as error:
        what = f"the header is not valid JSON: {str(error)[:200]}"
        raise CheckpointDefect(Defect.HEADER_NOT_JSON, what, path=path) from None
    ordered = _in_order(tensors)
    _check_layout(ordered, path, data_start_byte=data_start_byte)
    return ordered, repeated


def _read(reader: JsonReader, path: Path) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Return the tensors by name, in the header's order; most are read in one step each."""
    tensors: dict[str, Tensor] = {}
    repeated: list[str] = []
    metadata_seen = False
    for name in reader.members():
        if name == METADATA:
            _check_metadata(reader, path, again=metadata_seen)
            metadata_seen = True
            continue
        for tensor in chain([_tensor(name, reader, path)], _usual_tensors(reader, path.name)):
            if tensor.name in tensors:
                repeated.append(tensor.name)
            tensors[tensor.name] = tensor
    reader.end()
    return tensors, tuple(repeated)


def _usual_tensors(reader: JsonReader, shard: str) -> Iterator[Tensor]:
    """Read the tensors that follow as every writer makes them, each in one step."""
    while (match := NEXT_USUAL.match(reader.text, reader.position)) is not None:
        name, dtype, sizes, begin, end = match.groups()
        if dtype not in BITS_OF_DTYPE:
            return
        reader.position = match.end()
        shape = tuple(map(int, sizes.split(","))) if sizes else ()
        yield Tensor(name, intern(dtype), shape, shard, int(begin), int(end))


def _in_order(tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Return the tensors by offset; most headers list them so, and sorting a million takes memory."""
    listed = tuple(tensors.values())
    if all(one.end_byte <= other.begin_byte for one, other in pairwise(listed)):
        return listed
    return tuple(sorted(listed, key=lambda tensor: (tensor.begin_byte, tensor.end_byte)))


def _check_metadata(reader: JsonReader, path: Path, *, again: bool) -> None:
    def refuse(what: str) -> CheckpointDefect:
        return CheckpointDefect(Defect.METADATA_INVALID, what, path=path)

    if again:
        raise refuse('"__metadata__" occurs twice')
    kind = reader.peek()
    if kind == "{":
        for _ in reader.members():
            if reader.peek() != '"':
                raise refuse('"__metadata__" is not an object that maps text to text')
            reader.string()
    elif kind == "n":
        reader.skip()
    else:
        raise refuse('"__metadata__" is not an object that maps text to text')


def _tensor(name: str, reader: JsonReader, path: Path) -> Tensor:
    def refuse(what: str) -> CheckpointDefect:
        return CheckpointDefect(Defect.TENSOR_INFO_INVALID, what, path=path, tensor=name)

    fields: dict[str, Any] = {}
    kind = reader.peek()
    if kind == "{":
        for key in reader.members():
            if key not in FIELDS:
                reader.skip()
            elif key in fields:
                raise refuse(f'"{key}" occurs twice')
            else:
                fields[key] = reader.value(limit_characters=FIELD_LIMIT_CHARACTERS)
    elif kind == "[":
        for number in reader.items():  # the library also reads the fields as a list
            if number == len(FIELDS):
                raise refuse("the entry is not an object")
            fields[FIELDS[number]] = reader.value(limit_characters=FIELD_LIMIT_CHARACTERS)
    else:
        reader.skip()
        raise refuse("the entry is not an object")
    absent = [key for key in FIELDS if key not in fields]
    if absent:
        raise refuse(f'"{absent[0]}" is absent')
    dtype, shape, offsets = (fields[key] for key in FIELDS)
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

    def refuse(reason: Defect, what: str) -> CheckpointDefect:
        offset = data_start_byte + tensor.begin_byte
        return CheckpointDefect(reason, what, path=path, tensor=tensor.name, offset_bytes=offset)

    expected_begin = 0
    for tensor in ordered:
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
