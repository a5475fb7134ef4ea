"""Private, writable copies of checkpoints, and safetensors files rewritten aside and renamed into place.

Writing through a hard link or a symlink would destroy the file that the user gave, so a private copy holds neither:
each file is a reflink where the file system can (free until written to), else a real copy.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.checkpoint.shard import read_shard
from harness.errors import HarnessError, UsageError

FICLONE = 0x40049409  # ioctl of Linux: share the source's extents with the open file
LIBRARY_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor's bytes as they lie in a safetensors file; `dtype` as in the header ("BF16")."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview  # a view: of an array


def load_shard(path: Path) -> dict[str, RawTensor]:
    """Read every tensor of one safetensors file, in file order, as raw bytes.

    Raises: CheckpointDefect when the file is damaged.
    """
    shard = read_shard(path)
    loaded = {}
    with path.open("rb") as file:
        for tensor in shard.tensors:
            file.seek(shard.data_start_byte + tensor.begin_byte)
            loaded[tensor.name] = RawTensor(tensor.dtype, tensor.shape, file.read(tensor.size_bytes))
    return loaded


def save_shard(path: Path, tensors: Mapping[str, RawTensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file with the safetensors library, aside, then rename it to `path`.

    Whoever has the old file open or mapped keeps the old file.
    Raises: UsageError when a dtype is one the library cannot write; HarnessError when the data does not fit the shape.
    """
    import safetensors

    specs, keep = {}, []
    for name, tensor in tensors.items():
        if tensor.dtype not in LIBRARY_DTYPES:
            raise UsageError(f'tensor "{name}" has dtype "{tensor.dtype}", expected one of {", ".join(LIBRARY_DTYPES)}')
        pointer = ctypes.c_char_p(bytes(tensor.data))
        keep.append(pointer)
        address = ctypes.cast(pointer, ctypes.c_void_p).value or 0
        specs[name] = safetensors.TensorSpec(
            dtype=LIBRARY_DTYPES[tensor.dtype],
            shape=list(tensor.shape),
            data_ptr=address,
            data_len=len(tensor.data),
        )
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        safetensors.serialize_file(specs, partial, metadata=dict(metadata or {"format": "pt"}))
        partial.replace(path)
    except safetensors.SafetensorError as error:
        raise HarnessError(f'cannot write "{path}": {error}') from error
    finally:
        partial.unlink(missing_ok=True)


def rewrite_shard(path: Path, change: Callable[[dict[str, RawTensor]], Mapping[str, RawTensor]]) -> None:
    """Replace one safetensors file by what `change` makes of its tensors, aside and then by rename.

    Raises: UsageError when the file is shared with another path.
    """
    refuse_shared(path)
    save_shard(path, change(load_shard(path)))


def refuse_shared(path: Path) -> None:
    """Make sure that a file may be written in place: a regular file that no other path shares.

    Raises: UsageError naming the links.
    """
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise UsageError(f'"{path}" is not a regular file, so it is not written to')
    if status.st_nlink > 1:
        raise UsageError(
            f'"{path}" has {status.st_nlink} hard links, expected 1: writing to it would change the other paths too'
        )


def private_copy(source: Path, target: Path, *, share: bool = True, link_unchanged: bool = False) -> Path:
    """Copy a checkpoint directory to `target`, which must not exist, so that every file in it may be changed.

    Links in `source` are followed, so the copy holds files only. `share` uses reflinks where the file system can.
    `link_unchanged` makes hard links instead: as fast as nothing, but **writing to such a file in place changes the
    original**, so it is only for directories that are mounted read-only or changed by rename alone.
    Raises: UsageError when `source` is no directory or `target` exists; OSError when copying fails (nothing is left).
    """
    if not source.is_dir():
        raise UsageError(f'"{source}" is not a directory')
    if target.is_symlink() or target.exists():
        raise UsageError(f'"{target}" exists already, expected a new path')
    target.parent.mkdir(parents=True, exist_ok=True)
    target.mkdir(mode=0o755)
    try:
        _copy_tree(source, target, share=share, link_unchanged=link_unchanged)
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise
    return target


def _copy_tree(source: Path, target: Path, *, share: bool, link_unchanged: bool) -> None:
    for entry in sorted(os.scandir(source), key=lambda entry: entry.name):
        inner = target / entry.name
        if entry.is_dir(follow_symlinks=False):
            inner.mkdir(mode=0o755)
            _copy_tree(Path(entry.path), inner, share=share, link_unchanged=link_unchanged)
        elif entry.is_file():
            if link_unchanged:
                os.link(os.path.realpath(entry.path), inner)
            else:
                copy_file(Path(entry.path), inner, share=share)
        else:
            raise UsageError(f'"{entry.path}" is a dangling link, a linked directory or no file, so it is not copied')


def copy_file(source: Path, target: Path, *, share: bool = True) -> bool:
    """Copy one file to a new path, writable by its owner; return whether the two share storage (reflink)."""
    with source.open("rb") as reader, target.open("xb") as writer:
        shared = share and _reflink(reader.fileno(), writer.fileno())
        if not shared:
            shutil.copyfileobj(reader, writer, 4 * 1024 * 1024)
        status = os.fstat(reader.fileno())
        os.fchmod(writer.fileno(), stat.S_IMODE(status.st_mode) | stat.S_IWUSR)
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
    return shared


def _reflink(source: int, target: int) -> bool:
    try:
        fcntl.ioctl(target, FICLONE, source)
    except OSError:
        return False
    return True
