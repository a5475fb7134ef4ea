"""PyTorch `.bin` files, written without PyTorch and read without unpickling anything."""

from __future__ import annotations

import pickle
import pickletools
import zipfile
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import IO, Any

from blake3 import blake3

from harness.checkpoint.copy import RawTensor
from harness.checkpoint.header import BITS_OF_DTYPE
from harness.errors import FaultNotApplicable
from harness.faults.shard_rewrite import BLOCK_BYTES, replacing

STORAGES = {
    "BF16": "BFloat16Storage",
    "F16": "HalfStorage",
    "F32": "FloatStorage",
    "F64": "DoubleStorage",
    "I8": "CharStorage",
    "U8": "ByteStorage",
    "I16": "ShortStorage",
    "I32": "IntStorage",
    "I64": "LongStorage",
    "BOOL": "BoolStorage",
}


def write_torch_file(path: Path, tensors: Iterable[tuple[str, RawTensor]]) -> None:
    """Write what `torch.save` writes for a dict of contiguous tensors; `weights_only=True` loads it.

    Takes the memory of one tensor at a time.
    Raises: FaultNotApplicable for a dtype that has no storage class.
    """
    described: list[bytes] = []
    with replacing(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for number, (name, tensor) in enumerate(tensors):
            if tensor.dtype not in STORAGES:
                raise FaultNotApplicable(f'tensor "{name}" is {tensor.dtype}, which a .bin file cannot hold')
            archive.writestr(_entry(f"archive/data/{number}"), tensor.data)
            described.append(_described(name, number, tensor))
        program = [pickle.PROTO, b"\x02", pickle.EMPTY_DICT, pickle.MARK, *described, pickle.SETITEMS, pickle.STOP]
        archive.writestr(_entry("archive/data.pkl"), b"".join(program))
        archive.writestr(_entry("archive/byteorder"), b"little")
        archive.writestr(_entry("archive/version"), b"3\n")


def torch_file_facts(path: Path) -> dict[str, Any] | None:
    """Return size and digest of every tensor in such a file by name, None when it is absent or no such file.

    The pickle is taken apart as a list of words, never executed.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            words = [argument for _, argument, _ in pickletools.genops(archive.read("archive/data.pkl"))]
            sizes = {entry.filename: entry.file_size for entry in archive.infolist()}
            names = [words[index - 1] for index, word in enumerate(words) if word == "torch._utils _rebuild_tensor_v2"]
            facts = {}
            for number, name in enumerate(names):
                with archive.open(f"archive/data/{number}") as data:
                    digest = _digest(data)
                facts[str(name)] = {"size_bytes": sizes[f"archive/data/{number}"], "blake3": digest}
            return facts
    except (OSError, KeyError, ValueError, zipfile.BadZipFile):
        return None


def facts_in_torch_file(tensors: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return what `torch_file_facts` will find when these tensors (by their facts) are in the file."""
    return {
        name: {
            "size_bytes": prod(facts["shape"]) * BITS_OF_DTYPE[facts["dtype"]] // 8,
            "blake3": facts["blake3"],
        }
        for name, facts in tensors.items()
    }


def _digest(file: IO[bytes]) -> str:
    state = blake3()
    while block := file.read(BLOCK_BYTES):
        state.update(block)
    return state.hexdigest()


def _entry(name: str) -> zipfile.ZipInfo:
    return zipfile.ZipInfo(name)  # with a fixed date: the same tensors give the same file


def _described(name: str, number: int, tensor: RawTensor) -> bytes:
    """Return the pickle words that put one tensor under its name."""
    elements = prod(tensor.shape)
    strides = [prod(tensor.shape[index + 1 :]) for index in range(len(tensor.shape))]
    words = [_text("storage"), _global("torch", STORAGES[tensor.dtype]), _text(str(number)), _text("cpu")]
    storage = [pickle.MARK, *words, _integer(elements), pickle.TUPLE, pickle.BINPERSID]
    hooks = [_global("collections", "OrderedDict"), pickle.EMPTY_TUPLE, pickle.REDUCE]
    arguments = [*storage, _integer(0), _integers(tensor.shape), _integers(strides), pickle.NEWFALSE, *hooks]
    rebuild = [_global("torch._utils", "_rebuild_tensor_v2"), pickle.MARK, *arguments, pickle.TUPLE, pickle.REDUCE]
    return b"".join([_text(name), *rebuild])


def _text(text: str) -> bytes:
    data = text.encode()
    return pickle.BINUNICODE + len(data).to_bytes(4, "little") + data


def _integer(value: int) -> bytes:
    if value < 2**31:
        return pickle.BININT + value.to_bytes(4, "little")
    data = value.to_bytes(8, "little", signed=True)
    return pickle.LONG1 + bytes([len(data)]) + data


def _integers(values: Iterable[int]) -> bytes:
    return b"".join([pickle.MARK, *(_integer(value) for value in values), pickle.TUPLE])


def _global(module: str, name: str) -> bytes:
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()
