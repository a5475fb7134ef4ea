"""`np/` that belongs to another `.bin` is found by checksums, and nothing is said where they cannot tell."""

from __future__ import annotations

import tempfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from harness.checkpoint.copy import RawTensor
from harness.faults.torch_file import write_torch_file
from harness.guards.finding import Severity
from harness.guards.numpy_cache import numpy_cache_findings

Arrays = dict[str, NDArray[np.float32]]


def arrays(seed: int) -> Arrays:
    generator = np.random.default_rng(seed)
    return {
        name: generator.standard_normal((4, 6), dtype=np.float32) for name in ("model.norm.weight", "lm_head.weight")
    }


def write(path: Path, *, weights: Arrays, cached: Arrays) -> Path:
    tensors = ((name, RawTensor("F32", values.shape, values.tobytes())) for name, values in weights.items())
    write_torch_file(path / "pytorch_model.bin", tensors)
    (path / "np").mkdir()
    (path / "np" / "weight_names.json").write_text("[]")
    for name, values in cached.items():
        with (path / "np" / name).open("wb") as file:
            np.save(file, values)
    return path


def seen(path: Path) -> list[str]:
    assert {(f.id, f.severity) for f in numpy_cache_findings(path)} <= {("D22", Severity.SILENT)}
    return [finding.where for finding in numpy_cache_findings(path)]


def test_arrays_of_these_weights_are_right_and_those_of_others_are_found(tmp_path: Path) -> None:
    assert seen(write(tmp_path, weights=arrays(1), cached=arrays(1))) == []
    with (tmp_path / "np" / "lm_head.weight").open("wb") as file:
        np.save(file, arrays(2)["lm_head.weight"])
    assert seen(tmp_path) == ['"np/lm_head.weight"']


def test_an_array_in_column_order_has_the_bytes_that_were_stored(tmp_path: Path) -> None:
    turned = {name: values.T for name, values in arrays(1).items()}  # npcache saves what it got, a view too
    assert seen(write(tmp_path, weights=arrays(1), cached=turned)) == []


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY\x01", b"no array", b"\x93NUMPY\x01\x00\xff\xff"])
def test_what_is_no_array_says_nothing_of_the_weights(tmp_path: Path, content: bytes) -> None:
    write(tmp_path, weights=arrays(1), cached={})
    (tmp_path / "np" / "model.norm.weight").write_bytes(content)
    assert seen(tmp_path) == []


def test_weights_that_are_no_archive_or_have_no_checksums_say_nothing(tmp_path: Path) -> None:
    write(tmp_path, weights=arrays(1), cached=arrays(2))
    (tmp_path / "pytorch_model.bin").write_bytes(b"an old pickle")
    assert seen(tmp_path) == []
    with zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w") as archive:
        archive.writestr("archive/data/0", b"the same")
        archive.writestr("archive/data/1", b"the same")
    assert seen(tmp_path) == []
    (tmp_path / "pytorch_model.bin").unlink()
    assert seen(tmp_path) == []


def test_an_archive_that_claims_a_huge_directory_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, weights=arrays(1), cached=arrays(2))
    assert seen(tmp_path) != []
    archive = bytearray((tmp_path / "pytorch_model.bin").read_bytes())
    at = archive.rfind(b"PK\x05\x06")
    archive[at + 12 : at + 16] = (2**31).to_bytes(4, "little")
    (tmp_path / "pytorch_model.bin").write_bytes(archive)
    monkeypatch.setattr(zipfile, "ZipFile", None)  # whoever opens it fails
    assert seen(tmp_path) == []


@settings(max_examples=60, deadline=None)
@given(at=st.integers(0, 1200), put=st.binary(max_size=24), cut=st.integers(0, 1200))
def test_any_bytes_are_survived(at: int, put: bytes, cut: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = write(Path(directory), weights=arrays(1), cached=arrays(1))
        for name in ("pytorch_model.bin", "np/lm_head.weight"):
            content = (path / name).read_bytes()
            (path / name).write_bytes((content[:at] + put + content[at + len(put) :])[: len(content) - cut])
        seen(path)
