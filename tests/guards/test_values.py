"""The scan of values without NumPy counts what NumPy counts, in blocks, and names zero tails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.checkpoint.copy import RawTensor, save_shard
from harness.checkpoint.survey import survey
from harness.guards import values
from harness.guards.finding import PreflightFinding, Severity

SPECIAL = {
    "BF16": [0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7F81, 0x4780, 0x477F, 0xC780, 0x4800, 0x7F7F, 0x8000, 0x0001, 0x3F80],
    "F16": [0x7C00, 0xFC00, 0x7E01, 0xFFFF, 0x7BFF, 0xFBFF, 0x8000, 0x0001, 0x3C00],
    "F32": [0x7F800000, 0xFF800000, 0x7FC00001, 0x47800000, 0x477FFFFF, 0xC7800000, 0x7F7FFFFF, 0x80000000, 0x3F800000],
    "F8_E5M2": [0x7C, 0xFC, 0x7D, 0x7F, 0x7B, 0xFB, 0x80, 0x01],
    "F8_E4M3": [0x7F, 0xFF, 0x7E, 0xFE, 0x7C, 0x80, 0x01],
}
WIDTH = {"BF16": 2, "F16": 2, "F32": 4, "F8_E5M2": 1, "F8_E4M3": 1}


@np.errstate(all="ignore")
def decoded(data: bytes, dtype: str) -> np.ndarray:
    """Return the values as float64."""
    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4").astype("f8")
    if dtype == "F8_E5M2":
        return (np.frombuffer(data, "u1").astype("<u2") << 8).view("<f2").astype("f8")
    if dtype == "F8_E4M3":
        bits = np.frombuffer(data, "u1").astype("i4")
        return np.where((bits & 0x7F) == 0x7F, np.nan, 1.0)  # it has no infinity, and its largest value is 448
    return np.frombuffer(data, {"F16": "<f2", "F32": "<f4"}[dtype]).astype("f8")


def scan(directory: Path, data: bytes, dtype: str) -> values._Seen:
    path = directory / "model.safetensors"
    save_shard(path, {"x": RawTensor(dtype, (len(data) // WIDTH[dtype],), data)})
    (shard,) = survey(directory)[0].shards
    with path.open("rb") as file:
        return values._scan(file.fileno(), shard, shard.tensors[0])


@pytest.mark.parametrize("dtype", SPECIAL)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(draw=st.data())
def test_counts_agree_with_numpy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, draw: st.DataObject
) -> None:
    monkeypatch.setattr(values, "BLOCK_BYTES", 64)
    monkeypatch.setattr(values, "ZEROS", bytes(64))
    width = WIDTH[dtype]
    bits = st.one_of(st.just(0), st.sampled_from(SPECIAL[dtype]), st.integers(0, 2 ** (8 * width) - 1))
    data = b"".join(number.to_bytes(width, "little") for number in draw.draw(st.lists(bits, min_size=1, max_size=100)))
    expected = decoded(data, dtype)
    seen = scan(tmp_path, data, dtype)
    assert seen.not_finite == np.count_nonzero(~np.isfinite(expected))
    finite = expected[np.isfinite(expected)]
    assert seen.beyond_fp16 == np.count_nonzero(np.abs(finite) >= 65536)
    assert seen.is_zero == (not any(data))


def test_every_half_precision_pattern(tmp_path: Path) -> None:
    data = np.arange(65536, dtype="<u2").tobytes()
    for dtype in ("BF16", "F16"):
        expected = decoded(data, dtype)
        seen = scan(tmp_path, data, dtype)
        assert seen.not_finite == np.count_nonzero(~np.isfinite(expected))
        finite = expected[np.isfinite(expected)]
        assert seen.beyond_fp16 == np.count_nonzero(np.abs(finite) >= 65536)
        assert seen.huge == np.count_nonzero(np.abs(finite) >= 2.0**65)


def test_integers_are_not_taken_for_values(tmp_path: Path) -> None:
    save_shard(tmp_path / "model.safetensors", {"x": RawTensor("U8", (4,), b"\x7f\xff\x7f\xff")})
    assert list(values.value_findings(survey(tmp_path)[0], to_fp16=True)) == []


def find(directory: Path, tensors: dict[str, RawTensor], *, to_fp16: bool = False) -> list[PreflightFinding]:
    save_shard(directory / "model.safetensors", tensors)
    return list(values.value_findings(survey(directory)[0], to_fp16=to_fp16))


def ones(count: int) -> bytes:
    return b"\x80\x3f" * count


def test_a_value_in_the_last_place_of_a_block_is_seen(tmp_path: Path) -> None:
    count = values.BLOCK_BYTES // 2
    for place in (count - 1, count, 2 * count - 1):
        data = bytearray(ones(2 * count + 3))
        data[2 * place : 2 * place + 2] = b"\xc0\x7f"
        (finding,) = find(tmp_path, {"x": RawTensor("BF16", (2 * count + 3,), bytes(data))})
        assert finding.seen.startswith("1 values")
        assert 'tensor "x"' in finding.where


@pytest.mark.parametrize(("to_fp16", "severity"), [(True, Severity.SILENT), (False, Severity.RISK)])
def test_beyond_fp16_matters_where_fp16_is_served(tmp_path: Path, to_fp16: bool, severity: Severity) -> None:
    (finding,) = find(tmp_path, {"x": RawTensor("BF16", (3,), ones(2) + b"\x80\x47")}, to_fp16=to_fp16)
    assert (finding.id, finding.severity) == ("C07", severity)


@pytest.mark.parametrize(
    ("tensors", "severity", "where"),
    [
        ({"a": (2, 400), "b": (2, 400)}, Severity.SILENT, "byte"),
        ({"a": (2, 400), "model.embed_tokens.weight": (2, 400)}, Severity.SILENT, "byte"),
        ({"model.embed_tokens.weight": (20, 400)}, Severity.RISK, "byte"),
    ],
)
def test_a_zero_tail_is_one_finding(
    tmp_path: Path, tensors: dict[str, tuple[int, int]], severity: Severity, where: str
) -> None:
    raw = {}
    for name, (rows, columns) in tensors.items():
        raw[name] = RawTensor("BF16", (rows, columns), ones(rows * columns))
    last = list(raw)[-1]
    zero = raw[last]
    kept = len(zero.data) // 2 if len(raw) == 1 else 0
    raw[last] = RawTensor("BF16", zero.shape, zero.data[:kept] + bytes(len(zero.data) - kept))
    (finding,) = find(tmp_path, raw)
    assert (finding.id, finding.severity) == ("D15", severity)
    assert where in finding.where


@pytest.mark.parametrize("change", [lambda path: path.unlink(), lambda path: path.write_bytes(b"x")])
def test_a_file_that_goes_or_shrinks_before_it_is_read_is_a_finding(
    tmp_path: Path, change: Callable[[Path], object]
) -> None:
    save_shard(tmp_path / "model.safetensors", {"x": RawTensor("BF16", (2,), ones(2))})
    (tmp_path / "config.json").write_text("{}")
    checkpoint = survey(tmp_path)[0]
    change(tmp_path / "model.safetensors")
    (finding,) = values.value_findings(checkpoint, to_fp16=False)
    assert (finding.id, finding.severity) == ("D20", Severity.REFUSES)
