"""Numbers of tensors without torch: bf16, fp16 and fp32 to fp32 and back, and elements moved as plain words."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from harness.checkpoint.copy import RawTensor
from harness.checkpoint.header import BITS_OF_DTYPE
from harness.errors import FaultNotApplicable

FLOAT_DTYPES = ("BF16", "F16", "F32")
FP16_LARGEST = 65504.0
WORDS = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}


def words(tensor: RawTensor) -> NDArray[np.unsignedinteger]:
    """Return the elements as unsigned words in the tensor's shape, to be moved and never computed with.

    Raises: FaultNotApplicable when elements do not fill whole bytes.
    """
    word = WORDS.get(BITS_OF_DTYPE[tensor.dtype])
    if word is None:
        raise FaultNotApplicable(f"{tensor.dtype} elements do not fill whole bytes: they cannot be moved one by one")
    return np.frombuffer(tensor.data, dtype=np.dtype(word).newbyteorder("<")).reshape(tensor.shape)


def from_words(values: NDArray[np.unsignedinteger], dtype: str) -> RawTensor:
    """Return a tensor of this dtype with these words as its elements."""
    return RawTensor(dtype, tuple(values.shape), bytes_of(values))


def bytes_of(values: NDArray[np.generic]) -> memoryview:
    """Return the bytes of an array in row-major order: the array's own where they lie so, which then must not change."""
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data


def to_float32(tensor: RawTensor) -> NDArray[np.float32]:
    """Return the values as fp32, exactly.

    Raises: FaultNotApplicable for other dtypes than BF16, F16 and F32.
    """
    if tensor.dtype == "BF16":
        wide = words(tensor).astype(np.uint32) << np.uint32(16)
        return wide.view(np.float32)
    if tensor.dtype in ("F16", "F32"):
        stored = np.frombuffer(tensor.data, dtype="<f2" if tensor.dtype == "F16" else "<f4")
        return stored.reshape(tensor.shape).astype(np.float32)
    raise FaultNotApplicable(f"a {tensor.dtype} tensor has no values to convert; known: {', '.join(FLOAT_DTYPES)}")


def from_float32(values: NDArray[np.float32], dtype: str) -> RawTensor:
    """Return the values in another dtype, rounded to nearest even; what is out of range becomes infinite.

    "I8" scales the largest magnitude to 127 and keeps no scale, as a quantiser whose scale is lost.
    """
    shape = tuple(values.shape)
    if dtype == "BF16":
        bits = np.ascontiguousarray(values).view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        quiet = (bits >> np.uint32(16)) | np.uint32(0x40)  # rounding could carry a NaN over into zero
        return RawTensor(dtype, shape, bytes_of(np.where(np.isnan(values), quiet, rounded).astype("<u2")))
    if dtype == "F16":
        with np.errstate(over="ignore", under="ignore"):
            return RawTensor(dtype, shape, bytes_of(values.astype("<f2")))
    if dtype == "F32":
        return RawTensor(dtype, shape, bytes_of(values.astype("<f4")))
    if dtype == "I8":
        peak = largest_magnitude(values)
        scaled = np.rint(np.nan_to_num(values) * (127.0 / peak if peak > 0 else 0.0))
        return RawTensor(dtype, shape, bytes_of(np.clip(scaled, -127, 127).astype(np.int8)))
    raise FaultNotApplicable(f'no conversion to "{dtype}"; known: {", ".join(FLOAT_DTYPES)}, I8')


def largest_magnitude(values: NDArray[np.float32]) -> float:
    """Return the largest finite magnitude; 0 for an empty tensor."""
    finite = np.abs(values[np.isfinite(values)])
    return float(finite.max()) if finite.size else 0.0
