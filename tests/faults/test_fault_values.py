from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.checkpoint.copy import RawTensor
from harness.errors import FaultNotApplicable
from harness.faults.values import from_float32, to_float32

EVERY_16_BITS = np.arange(2**16, dtype="<u2").tobytes()


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_every_16_bit_number_survives_fp32_and_back(dtype: str) -> None:
    tensor = RawTensor(dtype, (256, 256), EVERY_16_BITS)
    values = to_float32(tensor)

    back = from_float32(values, dtype)

    assert back.shape == (256, 256)
    assert np.array_equal(to_float32(back), values, equal_nan=True)
    is_number = ~np.isnan(values)
    bits = np.frombuffer(back.data, "<u2").reshape(256, 256)
    assert np.array_equal(bits[is_number], np.frombuffer(tensor.data, "<u2").reshape(256, 256)[is_number])


@settings(deadline=None)
@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_bf16_is_the_nearest_and_even_on_a_tie(value: float) -> None:
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    low, rest = bits >> 16, bits & 0xFFFF
    is_up = rest > 0x8000 or (rest == 0x8000 and low & 1)

    stored = from_float32(np.array([value], np.float32), "BF16")

    assert struct.unpack("<H", stored.data)[0] == low + is_up


@settings(deadline=None)
@given(st.floats(width=32, allow_nan=False, min_value=-65504.0, max_value=65504.0))
def test_fp16_is_what_the_struct_module_makes(value: float) -> None:
    assert from_float32(np.array([value], np.float32), "F16").data == struct.pack("<e", value)


@pytest.mark.parametrize("value", [65520.0, 3e38, np.inf])
def test_beyond_fp16_becomes_infinite_without_a_warning(value: float) -> None:
    assert np.isinf(to_float32(from_float32(np.array([value], np.float32), "F16")))[0]


def test_int8_takes_the_whole_range_and_forgets_the_scale() -> None:
    stored = from_float32(np.array([-0.5, 0.0, 0.25], np.float32), "I8")

    assert np.frombuffer(stored.data, np.int8).tolist() == [-127, 0, 64]
    assert from_float32(np.zeros(3, np.float32), "I8").data == bytes(3)


def test_dtypes_without_values_are_refused() -> None:
    with pytest.raises(FaultNotApplicable, match="I8 tensor has no values"):
        to_float32(RawTensor("I8", (1,), b"\0"))
    with pytest.raises(FaultNotApplicable, match='no conversion to "F64"'):
        from_float32(np.zeros(1, np.float32), "F64")
