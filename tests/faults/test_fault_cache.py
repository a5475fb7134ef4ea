from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
from damage_cases import DOWN, Pair, contents

from harness import faults
from harness.checkpoint.copy import load_shard
from harness.engine.weight_cache_plugin.vllm_rollout_weight_cache_store import EntryWriter, entry_name, read_layout
from harness.errors import FaultNotApplicable
from harness.faults import CacheFault, StartRace, cache


def fill(root: Path, checkpoint: Path, *, model: str = "/models/live", key: str = "path") -> Path:
    """Fill the cache as an engine does that serves this checkpoint."""
    files = sorted(checkpoint.glob("*.safetensors"))
    loaded = {name: tensor for file in files for name, tensor in load_shard(file).items()}
    entry = root / entry_name(model)
    writer = EntryWriter(entry, model=model, key=key, layout=read_layout(files))
    writer.open()
    for name, tensor in loaded.items():
        writer.add(name, memoryview(tensor.data))
    writer.publish()
    return entry


@pytest.fixture
def root(tmp_path: Path) -> Path:
    directory = tmp_path / "cache"
    directory.mkdir()
    return directory


@pytest.mark.parametrize("key", ["path", "content"])
def test_a_cache_of_the_old_checkpoint_is_stale(key: str, root: Path, pair: Pair) -> None:
    entry = fill(root, pair.old, key=key)
    fault = faults.stale_weight_cache(key=key)

    injected = fault.prove(root, old=pair.old, new=pair.new)

    assert isinstance(fault, CacheFault)
    assert injected.proved, injected.because
    assert injected.after["stale"] == [entry.name]
    assert injected.after["entries"][entry.name]["model"] == "/models/live"


def test_a_cache_is_stale_for_a_wider_model_and_for_one_that_cannot_be_read(
    root: Path, pair: Pair, target: Path
) -> None:
    fill(root, pair.old)

    faults.widen_tensor(DOWN, dim=1, by=8).damage(target, old=pair.old, random=Random(1))
    assert faults.stale_weight_cache().prove(root, old=pair.old, new=target).proved
    faults.truncate_shard().damage(target, old=pair.old, random=Random(1))
    assert faults.stale_weight_cache().prove(root, old=pair.old, new=target).proved


def test_an_empty_or_absent_cache_is_not_proved(root: Path, pair: Pair) -> None:
    for directory in (root, root / "absent"):
        injected = faults.stale_weight_cache().prove(directory, old=pair.old, new=pair.new)
        assert not injected.proved
        assert "no complete entry" in injected.because


def test_a_cache_of_the_new_checkpoint_is_not_proved(root: Path, pair: Pair) -> None:
    fill(root, pair.new)

    assert not faults.stale_weight_cache().prove(root, old=pair.old, new=pair.new).proved


def test_equal_checkpoints_cannot_have_a_stale_cache(root: Path, pair: Pair) -> None:
    fill(root, pair.old)

    injected = faults.stale_weight_cache().prove(root, old=pair.old, new=pair.old)

    assert not injected.proved
    assert "the same weights" in injected.because


@pytest.mark.parametrize(
    "spoil",
    [
        lambda entry: (entry / "complete").unlink(),
        lambda entry: (entry / "meta.json").unlink(),
        lambda entry: (entry / "meta.json").write_text("[1"),
        lambda entry: (entry / "meta.json").write_text('{"model": "m", "tensors": [3]}'),
        lambda entry: (entry / "meta.json").write_text(
            '{"model": "m", "tensors": [{"begin_byte": -1, "end_byte": 9}]}'
        ),
        lambda entry: (entry / "tensors.bin").unlink(),
        lambda entry: (entry / "tensors.bin").write_bytes(b"short"),
        lambda entry: (entry / "tensors.bin").write_bytes(bytes((entry / "tensors.bin").stat().st_size)),
        lambda entry: (
            entry.rename(entry.with_suffix(".partial")) and (entry.with_suffix(".partial") / "complete").unlink()
        ),
    ],
)
def test_an_entry_that_does_not_hold_the_old_tensors_is_not_proved(spoil: object, root: Path, pair: Pair) -> None:
    spoil(fill(root, pair.old))  # type: ignore[operator]

    assert not faults.stale_weight_cache().prove(root, old=pair.old, new=pair.new).proved


def test_one_other_byte_in_the_segment_is_not_proved(root: Path, pair: Pair) -> None:
    segment = fill(root, pair.old) / "tensors.bin"
    with segment.open("r+b") as file:
        first = file.read(1)
        file.seek(0)
        file.write(bytes([first[0] ^ 1]))

    assert not faults.stale_weight_cache().prove(root, old=pair.old, new=pair.new).proved


def test_a_segment_that_is_a_link_is_not_followed(root: Path, pair: Pair, tmp_path: Path) -> None:
    entry = fill(root, pair.old)
    (entry / "tensors.bin").rename(tmp_path / "elsewhere")
    (entry / "tensors.bin").symlink_to(tmp_path / "elsewhere")

    assert not faults.stale_weight_cache().prove(root, old=pair.old, new=pair.new).proved


def test_the_proof_changes_nothing(root: Path, pair: Pair) -> None:
    entry = fill(root, pair.old)
    before = {file.name: file.stat().st_mtime_ns for file in entry.iterdir()}

    faults.stale_weight_cache().prove(root, old=pair.old, new=pair.new)

    assert {file.name: file.stat().st_mtime_ns for file in entry.iterdir()} == before


# the purge that races


def test_late_purge_is_still_to_come_and_then_has_emptied_the_cache(root: Path, pair: Pair) -> None:
    entry = fill(root, pair.old)
    (root / "0123456789abcdef.7.partial").mkdir()
    fault = faults.late_purge()

    acting = fault.after_start(root)
    assert isinstance(fault, StartRace)
    assert not acting.injected.proved, "a purge that has not run has lost no race"
    assert acting.injected.before["entries"] == [entry.name]
    assert (entry / "complete").is_file()
    acting.engine_is_ready()

    state = acting.state()
    assert state.proved, state.because
    assert state.after["purged_after_s"] is not None
    assert list(root.iterdir()) == []


def test_late_purge_with_nothing_to_purge_is_not_proved(root: Path) -> None:
    acting = faults.late_purge().after_start(root)
    acting.engine_is_ready()

    assert not acting.injected.proved
    assert not acting.state().proved


def test_late_purge_that_purges_nothing_is_not_proved(root: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(root, pair.old)

    def fail(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(cache, "purge", fail)
    acting = faults.late_purge().after_start(root)
    acting.engine_is_ready()

    assert not acting.state().proved
    assert "Permission denied" in acting.state().because


def test_late_purge_is_proved_though_the_engine_filled_the_cache_anew(root: Path, pair: Pair) -> None:
    fill(root, pair.old)
    acting = faults.late_purge().after_start(root)
    acting.engine_is_ready()

    entry = fill(root, pair.new)

    assert acting.state().proved
    assert json.loads((entry / "meta.json").read_text())["model"] == "/models/live"


@pytest.mark.parametrize("kind", ["absent", "a link to it", "something else in it", "a link in it"])
def test_late_purge_refuses_what_is_no_cache(kind: str, root: Path, pair: Pair, tmp_path: Path) -> None:
    fill(root, pair.old)
    directory = root
    if kind == "absent":
        directory = tmp_path / "absent"
    elif kind == "a link to it":
        directory = tmp_path / "link"
        directory.symlink_to(root)
    elif kind == "something else in it":
        (root / "precious").write_text("kept")
    else:
        (root / "0123456789abcdef").symlink_to(pair.old)
    before = contents(root)

    with pytest.raises(FaultNotApplicable, match="no cache to purge"):
        faults.late_purge().after_start(directory)

    assert contents(root) == before
