"""One safetensors file: open it safely, read its header, check its length."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from harness.checkpoint.defect import MAX_HEADER_BYTES, Defect, foreign_content
from harness.checkpoint.header import LENGTH_BYTES, METADATA, Tensor, parse_header
from harness.checkpoint.json_reader import JsonReader
from harness.errors import CheckpointDefect


@dataclass(frozen=True, slots=True)
class Shard:
    """One safetensors file: its layout as the header gives it. `repeated` names occur twice in the header."""

    name: str
    size_bytes: int
    header_bytes: int  # without the 8 length bytes
    data_start_byte: int
    tensors: tuple[Tensor, ...]
    repeated: tuple[str, ...] = ()


def read_shard(path: Path) -> Shard:
    """Read the header of one safetensors file; accepts and refuses exactly what the safetensors library does.

    Raises: CheckpointDefect naming the first rule broken, the tensor and the byte.
    """
    descriptor = open_regular(path)
    try:
        size = os.fstat(descriptor).st_size
        try:
            return _read_open_shard(descriptor, size, path)
        except CheckpointDefect as defect:
            foreign = foreign_content(os.pread(descriptor, 4096, 0))
            if foreign is None:
                raise
            raise CheckpointDefect(*foreign, path=path) from defect
    except OSError as error:
        raise CheckpointDefect(Defect.UNREADABLE_FILE, f"{error.strerror or error}", path=path) from error
    finally:
        os.close(descriptor)


def read_metadata(path: Path, shard: Shard) -> dict[str, str]:
    """Return the texts that the header of a shard holds beside its tensors, by their names.

    Raises: CheckpointDefect when the file cannot be read, or is not as it was.
    """
    descriptor = open_regular(path)
    try:
        reader = JsonReader(_header_text(descriptor, shard.header_bytes, path))
        for name in reader.members():
            if name == METADATA and reader.peek() == "{":
                return {key: reader.string() for key in reader.members()}
            reader.skip()
    except ValueError as error:
        raise CheckpointDefect(Defect.HEADER_NOT_JSON, f"the header changed: {error}", path=path) from None
    except OSError as error:
        raise CheckpointDefect(Defect.UNREADABLE_FILE, f"{error.strerror or error}", path=path) from error
    finally:
        os.close(descriptor)
    return {}


def open_regular(path: Path) -> int:
    """Open a regular file for reading; never blocks on a named pipe."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        if path.is_symlink():
            target = os.readlink(path)
            raise CheckpointDefect(Defect.DANGLING_LINK, f'a link to "{target}", which is absent', path=path) from None
        raise CheckpointDefect(Defect.ABSENT_FILE, "no such file", path=path) from None
    except (OSError, ValueError) as error:
        what = getattr(error, "strerror", None) or str(error)
        raise CheckpointDefect(Defect.UNREADABLE_FILE, what, path=path) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointDefect(Defect.NOT_A_REGULAR_FILE, "a directory, pipe or device, not a file", path=path)
    return descriptor


def _read_open_shard(descriptor: int, size: int, path: Path) -> Shard:
    if size == 0:
        raise CheckpointDefect(Defect.EMPTY_FILE, "0 bytes", path=path)
    if size < LENGTH_BYTES:
        raise CheckpointDefect(Defect.HEADER_TOO_SMALL, f"{size} bytes, a header length alone takes 8", path=path)
    length = int.from_bytes(os.pread(descriptor, LENGTH_BYTES, 0), "little")
    if length > MAX_HEADER_BYTES:
        what = f"the header length is {length:,} bytes, the limit {MAX_HEADER_BYTES:,}"
        raise CheckpointDefect(Defect.HEADER_TOO_LARGE, what, path=path, offset_bytes=0)
    if LENGTH_BYTES + length > size:
        what = f"the header should take {length:,} bytes, the file holds {size - LENGTH_BYTES:,} after its length"
        raise CheckpointDefect(Defect.HEADER_TRUNCATED, what, path=path, offset_bytes=size)
    data_start = LENGTH_BYTES + length
    tensors, repeated = parse_header(_header_text(descriptor, length, path), path=path, data_start_byte=data_start)
    expected = data_start + (tensors[-1].end_byte if tensors else 0)
    if size != expected:
        reason = Defect.DATA_SECTION_SHORT if size < expected else Defect.DATA_SECTION_LONG
        cut = next((tensor.name for tensor in tensors if data_start + tensor.end_byte > size), None)
        what = f"the file has {size:,} bytes, its header describes {expected:,}"
        raise CheckpointDefect(reason, what, path=path, tensor=cut, offset_bytes=min(size, expected))
    return Shard(path.name, size, length, data_start, tensors, repeated)


def _header_text(descriptor: int, length: int, path: Path) -> str:
    try:
        return os.pread(descriptor, length, LENGTH_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        what = f"the header is not valid JSON: {error.reason} at byte {error.start:,}"
        raise CheckpointDefect(Defect.HEADER_NOT_JSON, what, path=path) from None
