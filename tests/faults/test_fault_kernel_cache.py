from __future__ import annotations

import _ctypes
import ctypes
import shutil
from pathlib import Path
from random import Random

import pytest

from harness import faults
from harness.engine.engine import EngineIdentity
from harness.errors import EnvironmentMissing, FaultNotApplicable, ScenarioInvalid
from harness.faults import FAULTS, CompileCacheFault, kernel_cache

# The head of a kernel as Triton keeps it: an ELF file of the GPU's own platform and ABI version.
KERNEL = b"\x7fELF\x02\x01\x01\x33\x07" + bytes(55) + b"kernel"
LIBRARY = Path(_ctypes.__file__)  # a compiled library that comes with Python
TRITON = Path("torch_compile_cache/0a1b/rank_0_0/triton_cache/KEY")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    directory = tmp_path / "compile_cache"
    (directory / TRITON).mkdir(parents=True)
    (directory / TRITON / "triton_poi_fused_0.cubin").write_bytes(KERNEL)
    (directory / TRITON / "triton_poi_fused_0.json").write_text('{"hash": "0a1b"}')
    (directory / TRITON / "empty.lock").touch()
    shutil.copyfile(LIBRARY, directory / TRITON / "launcher.so")
    return directory


def test_kernels_say_that_another_runtime_made_them_and_loaders_believe_it(cache: Path) -> None:
    ctypes.CDLL(str(cache / TRITON / "launcher.so"))
    fault = faults.foreign_kernels()

    where, injected = fault.spoil(cache, random=Random(1))

    assert isinstance(fault, CompileCacheFault)
    assert FAULTS["foreign_kernels"] is faults.foreign_kernels
    assert where == cache
    assert injected.proved, injected.because
    assert injected.because.startswith("2 of 2 compiled kernels are for ABI version 255 now")
    assert (cache / TRITON / "triton_poi_fused_0.cubin").read_bytes() == KERNEL[:8] + b"\xff" + KERNEL[9:]
    assert (cache / TRITON / "triton_poi_fused_0.json").read_text() == '{"hash": "0a1b"}'
    shutil.copyfile(cache / TRITON / "launcher.so", cache / "opened-anew.so")  # what was opened once stays open
    with pytest.raises(OSError, match="ABI version invalid"):
        ctypes.CDLL(str(cache / "opened-anew.so"))
    assert not fault.spoil(cache, random=Random(1))[1].proved, "they were foreign already"
    assert LIBRARY.read_bytes()[8] == 0, "only the cache's own files change"


def test_kernels_that_stay_or_change_elsewhere_prove_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cache, "_restamp", lambda path, abi_version: None)
    assert not faults.foreign_kernels().spoil(cache, random=Random(1))[1].proved
    monkeypatch.setattr(kernel_cache, "_restamp", lambda path, abi_version: path.write_bytes(KERNEL[:8] + b"\xff"))
    assert not faults.foreign_kernels().spoil(cache, random=Random(1))[1].proved


def test_a_cache_without_kernels_is_refused(cache: Path) -> None:
    for name in ("triton_poi_fused_0.cubin", "launcher.so"):
        (cache / TRITON / name).unlink()
    with pytest.raises(FaultNotApplicable, match="no compiled kernel lies in"):
        faults.foreign_kernels().spoil(cache, random=Random(1))
    with pytest.raises(ScenarioInvalid, match="abi_version=256"):
        faults.foreign_kernels(abi_version=256)
    with pytest.raises(EnvironmentMissing, match="compiles nothing"):
        faults.foreign_kernels().require(
            EngineIdentity(kind="reference", name="reference", version="1", build="", hardware="")
        )
