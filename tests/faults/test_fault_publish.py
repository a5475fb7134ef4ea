from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import threading
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from damage_cases import Pair, contents, tree

from harness import faults
from harness.checkpoint.copy import private_copy
from harness.checkpoint.digest import weights_id
from harness.checkpoint.manifest import read_shard
from harness.clock import now_ns, poll_until, seconds_between
from harness.errors import CheckpointDefect, FaultNotApplicable, ScenarioInvalid
from harness.faults import FAULTS, PublishFault, slow_copy
from harness.guards.durable import exchange

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
PUBLISH_FAULTS = [
    faults.slow_sync(duration_s=600.0),
    faults.nested_move(),
    faults.overwrite_in_place(),
    faults.rsync_in_place(duration_s=20.0),
]
every_fault = pytest.mark.parametrize("fault", PUBLISH_FAULTS, ids=lambda fault: fault.name)


def start(fault: PublishFault, source: Path, live: Path) -> faults.Acting:
    return fault.start(source, live, random=Random(1))


def slow_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "slow-copy"]


@every_fault
def test_publish_fault_is_proved_and_leaves_the_source_and_the_old_checkpoint(
    fault: PublishFault, pair: Pair, live: Path
) -> None:
    before, live_before = (tree(pair.new), tree(pair.old)), contents(live)

    acting = start(fault, pair.new, live)
    try:
        assert isinstance(fault, PublishFault)
        assert fault.name in FAULTS
        assert acting.injected.proved, acting.injected.because
        assert acting.state().proved, acting.state().because
        assert contents(live) != live_before
    finally:
        acting.finish(limit_s=0)

    assert (tree(pair.new), tree(pair.old)) == before
    assert sorted(path.name for path in live.parent.iterdir()) == ["live"]
    assert not slow_threads()


@every_fault
def test_publish_fault_is_undone_by_an_exchange_and_the_proof_of_that_is_the_disk(
    fault: PublishFault, pair: Pair, live: Path, tmp_path: Path
) -> None:
    acting = start(fault, pair.new, live)
    acting.finish(limit_s=0)

    exchange(private_copy(pair.new, live.parent / "repaired"), live)

    assert contents(live) == contents(pair.new)
    assert weights_id(live) == weights_id(pair.new)


@every_fault
@pytest.mark.parametrize("kind", ["symlink to a directory", "file", "absent", "the source itself", "hard links"])
def test_publish_fault_refuses_a_live_directory_that_is_not_its_own(
    fault: PublishFault, kind: str, pair: Pair, live: Path, tmp_path: Path
) -> None:
    source, wrong = pair.new, tmp_path / "wrong"
    if kind == "symlink to a directory":
        wrong.symlink_to(live)
    elif kind == "file":
        wrong.write_bytes(b"")
    elif kind == "the source itself":
        source = wrong = private_copy(pair.new, tmp_path / "source")
    elif kind == "hard links":
        wrong.mkdir()
        for file in live.iterdir():
            os.link(file, wrong / file.name)
    before = contents(live), contents(source)

    with pytest.raises(FaultNotApplicable):
        start(fault, source, wrong)

    assert (contents(live), contents(source)) == before
    assert not slow_threads()


# slow sync


def test_slow_sync_finds_new_small_files_and_a_cut_weight_file(pair: Pair, live: Path) -> None:
    acting = start(faults.slow_sync(duration_s=600.0), pair.new, live)
    try:
        assert (live / "config.json").read_bytes() == (pair.new / "config.json").read_bytes()
        with pytest.raises(CheckpointDefect):
            read_shard(live / FIRST)
        assert (live / SECOND).read_bytes() == (pair.old / SECOND).read_bytes()
        assert acting.state().after["incomplete_files"] == [FIRST, SECOND]
    finally:
        acting.finish(limit_s=0)


def test_slow_sync_with_weights_first_leaves_the_old_config_until_the_end(pair: Pair, live: Path) -> None:
    acting = start(faults.slow_sync(duration_s=600.0, order="weights_first"), pair.new, live)
    try:
        assert (live / "config.json").read_bytes() == (pair.old / "config.json").read_bytes()
    finally:
        acting.finish(limit_s=0)


def test_slow_sync_that_preallocates_shows_a_file_of_full_size_with_a_zero_tail(pair: Pair, live: Path) -> None:
    size = (pair.new / FIRST).stat().st_size
    acting = start(faults.slow_sync(rate_bytes_per_s=size / 5, preallocate=True), pair.new, live)
    try:
        shard = poll_until(lambda: _shard(live / FIRST), what="a header behind a zero tail", limit_s=20.0)
        state = acting.state()
    finally:
        acting.finish(limit_s=0)
    assert shard.size_bytes == size
    assert state.proved, state.because
    assert (live / FIRST).read_bytes().endswith(bytes(100))


def _shard(path: Path) -> Any:
    try:
        return read_shard(path)
    except CheckpointDefect:
        return None


@pytest.mark.parametrize("order", ["small_first", "weights_first"])
def test_slow_sync_ends_with_the_whole_new_checkpoint_and_then_is_no_longer_proved(
    order: str, pair: Pair, live: Path
) -> None:
    acting = start(faults.slow_sync(duration_s=0.3, order=order), pair.new, live)

    acting.finish(limit_s=30.0)

    state = acting.state()
    assert contents(live) == contents(pair.new)
    assert state.after["copied_bytes"] == state.before["total_bytes"]
    assert state.after["incomplete_files"] == []
    assert not state.proved
    assert not slow_threads()


def test_slow_sync_that_is_called_off_stays_half_done(pair: Pair, live: Path) -> None:
    acting = start(faults.slow_sync(duration_s=600.0), pair.new, live)

    acting.finish(limit_s=0)
    acting.finish(limit_s=0)

    state = acting.state()
    assert not state.after["is_running"]
    assert state.after["copied_bytes"] < state.before["total_bytes"]
    assert not state.proved


def test_slow_sync_is_not_proved_once_every_weight_file_is_complete(
    pair: Pair, live: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acting = start(faults.slow_sync(duration_s=600.0), pair.new, live)
    try:
        monkeypatch.setattr(slow_copy.SlowCopy, "_is_complete", lambda self, name: True)
        state = acting.state()
    finally:
        acting.finish(limit_s=0)
    assert state.after["is_running"]
    assert not state.proved


def test_slow_sync_keeps_to_its_rate(pair: Pair, live: Path) -> None:
    started_ns = now_ns()
    acting = start(faults.slow_sync(duration_s=0.5), pair.new, live)

    acting.finish(limit_s=30.0)

    assert seconds_between(started_ns, now_ns()) >= 0.49


def test_slow_sync_whose_disk_fails_says_so(pair: Pair, live: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: object, name: str, started_ns: int) -> bool:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(slow_copy.SlowCopy, "_copy", full)
    acting = start(faults.slow_sync(duration_s=600.0), pair.new, live)
    acting.finish(limit_s=10.0)

    assert not acting.state().proved
    assert "No space left on device" in acting.state().because


def test_slow_sync_without_weights_to_copy_is_refused(live: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")

    with pytest.raises(FaultNotApplicable, match="no safetensors file"):
        start(faults.slow_sync(), source, live)


# nested move


def test_nested_move_leaves_the_old_files_on_top(pair: Pair, live: Path) -> None:
    old = {name: digest for name, digest in contents(live).items()}

    acting = start(faults.nested_move(), pair.new, live)

    assert {name: digest for name, digest in contents(live).items() if "/" not in name and name != "new"} == old
    assert weights_id(live / "new") == weights_id(pair.new)
    assert acting.injected.after["exit_code"] == 0


def test_nested_move_is_not_proved_when_the_move_did_nothing(
    pair: Pair, live: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = SimpleNamespace(returncode=0, stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **options: done)

    acting = start(faults.nested_move(), pair.new, live)

    assert not acting.injected.proved
    assert sorted(path.name for path in live.parent.iterdir()) == ["live"]


def test_a_second_nested_move_is_refused_by_mv_and_not_proved(pair: Pair, live: Path) -> None:
    start(faults.nested_move(), pair.new, live)

    again = start(faults.nested_move(), pair.new, live)

    assert again.injected.after["exit_code"] != 0
    assert not again.injected.proved


def test_nested_move_is_no_longer_proved_once_it_was_repaired(pair: Pair, live: Path) -> None:
    acting = start(faults.nested_move(), pair.new, live)
    shutil.rmtree(live / "new")

    assert not acting.state().proved


def test_nested_move_is_not_proved_when_the_old_files_on_top_changed(pair: Pair, live: Path) -> None:
    acting = start(faults.nested_move(), pair.new, live)
    (live / "config.json").write_text("{}")

    assert not acting.state().proved


def test_nested_move_is_not_proved_when_something_else_was_moved(pair: Pair, live: Path) -> None:
    acting = start(faults.nested_move(), pair.new, live)
    shutil.rmtree(live / "new")
    private_copy(pair.old, live / "new")

    assert not acting.state().proved


def test_nested_move_of_unreadable_weights_is_not_proved(pair: Pair, live: Path, target: Path) -> None:
    for file in target.glob("*.safetensors"):
        file.write_bytes(b"")

    assert not start(faults.nested_move(), target, live).injected.proved


# overwrite in place


def test_overwrite_keeps_the_inodes_and_brings_the_new_bytes(pair: Pair, live: Path) -> None:
    inode = (live / FIRST).stat().st_ino

    start(faults.overwrite_in_place(), pair.new, live)

    assert (live / FIRST).stat().st_ino == inode
    assert contents(live) == contents(pair.new)


def test_overwrite_is_not_proved_when_nothing_was_written(
    pair: Pair, live: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "copyfile", lambda source, target: None)

    assert not start(faults.overwrite_in_place(), pair.new, live).injected.proved


def test_overwrite_with_the_same_bytes_is_not_proved(pair: Pair, tmp_path: Path) -> None:
    live = private_copy(pair.new, tmp_path / "same")

    assert not start(faults.overwrite_in_place(), pair.new, live).injected.proved


def test_overwrite_by_rename_is_not_proved(pair: Pair, live: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def renamed(source: Path, target: Path) -> None:
        aside = target.with_name("aside")
        aside.write_bytes(source.read_bytes())
        aside.rename(target)

    monkeypatch.setattr(shutil, "copyfile", renamed)

    assert not start(faults.overwrite_in_place(), pair.new, live).injected.proved


# rsync in place


def test_rsync_in_place_leaves_a_mixture_behind_a_good_header_in_the_same_file(single: Pair, tmp_path: Path) -> None:
    live = private_copy(single.old, tmp_path / "live")
    (weights,) = live.glob("*.safetensors")
    inode = weights.stat().st_ino
    with weights.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        acting = start(faults.rsync_in_place(duration_s=20.0), single.new, live)
        acting.finish(limit_s=0)
        new, old = (single.new / weights.name).read_bytes(), (single.old / weights.name).read_bytes()
        assert mapped[:] == weights.read_bytes(), "whoever maps it sees it change"
    found = weights.read_bytes()
    assert weights.stat().st_ino == inode
    assert found not in (new, old)
    assert set(read_shard(weights).tensors) == set(read_shard(single.new / weights.name).tensors)
    border = next(at for at in range(len(found), 0, -1) if found[at - 1] != old[at - 1])
    assert found == new[:border] + old[border:]


def test_rsync_in_place_writes_only_the_blocks_that_differ(
    single: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = private_copy(single.new, tmp_path / "live")
    (weights,) = live.glob("*.safetensors")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    written: list[int] = []
    real = os.pwrite

    def pwrite(descriptor: int, block: bytes, begin: int) -> int:
        written.append(begin)
        return real(descriptor, block, begin)

    monkeypatch.setattr(os, "pwrite", pwrite)
    start(faults.rsync_in_place(duration_s=0.3), single.new, live).finish(limit_s=30.0)

    assert contents(live) == contents(single.new)
    assert len(written) == 1
    assert written[0] > 0


def test_rsync_in_place_ends_with_the_whole_new_checkpoint_and_then_is_no_longer_proved(pair: Pair, live: Path) -> None:
    (live / FIRST).write_bytes((live / FIRST).read_bytes() + b"a longer file before")
    acting = start(faults.rsync_in_place(duration_s=0.3), pair.new, live)

    acting.finish(limit_s=30.0)

    assert contents(live) == contents(pair.new)
    assert not acting.state().proved
    assert "ended" in acting.state().because


def test_rsync_in_place_with_the_same_bytes_is_not_proved(pair: Pair, tmp_path: Path) -> None:
    live = private_copy(pair.new, tmp_path / "same")
    acting = start(faults.rsync_in_place(duration_s=0.2), pair.new, live)

    assert not acting.injected.proved
    assert "no new blocks in old files" in acting.injected.because


def test_rsync_in_place_into_other_files_is_not_proved(pair: Pair, live: Path) -> None:
    """What `rsync` does without --inplace: the file is replaced, and who has it mapped keeps the old one."""
    acting = start(faults.rsync_in_place(duration_s=20.0), pair.new, live)
    try:
        assert acting.state().proved, acting.state().because
        shutil.copy(live / SECOND, live / "aside")
        (live / "aside").rename(live / SECOND)
        state = acting.state()
    finally:
        acting.finish(limit_s=0)
    assert state.after["is_running"]
    assert not state.proved
    assert "1 under another inode" in state.because


def test_rsync_in_place_that_wrote_nothing_is_not_proved(
    pair: Pair, live: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwrite", lambda descriptor, block, begin: len(block))
    acting = start(faults.rsync_in_place(duration_s=20.0), pair.new, live)
    acting.finish(limit_s=0)

    assert not acting.injected.proved


@pytest.mark.parametrize("duration_s", [0.0, -1.0])
def test_rsync_in_place_takes_some_time(duration_s: float) -> None:
    with pytest.raises(ScenarioInvalid, match="must be above 0"):
        faults.rsync_in_place(duration_s=duration_s)


def test_rsync_in_place_without_weights_is_refused(live: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")

    with pytest.raises(FaultNotApplicable, match="no safetensors file"):
        start(faults.rsync_in_place(), source, live)
