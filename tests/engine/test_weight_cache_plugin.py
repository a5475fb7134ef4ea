from __future__ import annotations

import ctypes
import hashlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from harness.engine import launch, process
from harness.engine.weight_cache_plugin import vllm_rollout_weight_cache_store as store

PLUGIN = process.WEIGHT_CACHE_PLUGIN_DIRECTORY
MIB = 1 << 20


def write_shards(directory: Path, *, seed: int = 0, columns: int = 8) -> list[Path]:
    random = np.random.default_rng(seed)
    directory.mkdir(exist_ok=True)
    first, second = directory / "model-1.safetensors", directory / "model-2.safetensors"
    save_file({"b": random.random((4, columns), dtype=np.float32)}, first, metadata={"format": "pt"})
    save_file({"a": random.random((3,), dtype=np.float32), "c": np.zeros((0, 2), np.float16)}, second)
    return [first, second]


def fill(entry: Path, files: list[Path], *, key: str = "path") -> list[store.CachedTensor]:
    layout = store.read_layout(files)
    writer = store.EntryWriter(entry, model="model", key=key, layout=layout)
    writer.open()
    for tensor in layout:
        writer.add(tensor.name, memoryview(bytes([len(tensor.name)]) * (tensor.end_byte - tensor.begin_byte)))
    writer.publish()
    return layout


def test_layout_packs_the_tensors_of_all_shards_by_name(tmp_path: Path) -> None:
    layout = store.read_layout(write_shards(tmp_path))

    assert [(t.name, t.dtype, t.shape, t.begin_byte, t.end_byte) for t in layout] == [
        ("a", "F32", (3,), 0, 12),
        ("b", "F32", (4, 8), 12, 140),
        ("c", "F16", (0, 2), 140, 140),
    ]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"version https://git-lfs.github.com/spec/v1\n",
        (2).to_bytes(8, "little") + b"[]",
        (9).to_bytes(8, "little") + b'{"a": {}}',
    ],
    ids=["empty", "pointer", "list", "tensor without offsets"],
)
def test_file_without_a_header_is_left_to_vllm(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)

    with pytest.raises(store.NotCacheable):
        store.read_layout([tmp_path / "model.safetensors"])


def test_one_name_in_two_shards_is_not_cached(tmp_path: Path) -> None:
    for name in ("1", "2"):
        save_file({"a": np.zeros(1, np.float32)}, tmp_path / name)

    with pytest.raises(store.NotCacheable, match='"a" is in two files'):
        store.read_layout([tmp_path / "1", tmp_path / "2"])


def test_entry_is_published_whole(tmp_path: Path) -> None:
    entry = tmp_path / "root" / "entry"

    layout = fill(entry, write_shards(tmp_path / "model"))

    assert sorted(path.name for path in entry.iterdir()) == ["complete", "meta.json", "tensors.bin"]
    assert (entry / "tensors.bin").stat().st_size == layout[-1].end_byte
    meta = json.loads((entry / "meta.json").read_text())
    assert (meta["model"], meta["key"]) == ("model", "path")
    assert meta["tensors"][1] == {"name": "b", "dtype": "F32", "shape": [4, 8], "begin_byte": 12, "end_byte": 140}
    assert [path.name for path in entry.parent.iterdir()] == ["entry"]


def test_incomplete_entry_is_not_published_and_not_used(tmp_path: Path) -> None:
    entry = tmp_path / "entry"
    writer = store.EntryWriter(entry, model="model", key="path", layout=store.read_layout(write_shards(tmp_path / "m")))
    writer.open()
    writer.add("a", memoryview(bytes(12)))

    with pytest.raises(store.NotCacheable, match="2 tensors were not loaded"):
        writer.publish()
    writer.abandon()

    assert not store.is_complete(entry)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_tensor_of_another_size_is_not_stored(tmp_path: Path) -> None:
    writer = store.EntryWriter(tmp_path / "e", model="m", key="path", layout=store.read_layout(write_shards(tmp_path)))
    writer.open()

    with pytest.raises(store.NotCacheable, match='"a" is not as its header says'):
        writer.add("a", memoryview(bytes(11)))
    writer.abandon()


def test_purge_in_the_middle_leaves_no_entry(tmp_path: Path) -> None:
    root = tmp_path / "root"
    writer = store.EntryWriter(root / "e", model="m", key="path", layout=[])
    writer.open()
    next(root.iterdir()).joinpath("tensors.bin").unlink()
    next(root.iterdir()).rmdir()
    root.rmdir()

    with pytest.raises(store.NotCacheable, match="purged"):
        writer.publish()
    assert not root.exists()


def test_content_digest_follows_bytes_and_not_paths(tmp_path: Path) -> None:
    one, same, other = (write_shards(tmp_path / name, seed=seed) for name, seed in (("1", 0), ("2", 0), ("3", 1)))

    expected = hashlib.sha256(one[0].read_bytes() + one[1].read_bytes()).hexdigest()
    assert store.content_digest(list(reversed(one))) == expected == store.content_digest(same)
    assert store.content_digest(other) != expected
    assert store.entry_name("/models/live") == hashlib.sha256(b"/models/live").hexdigest()[:16]


def read_mapped(path: Path, length_bytes: int, offset: int) -> None:
    with store.mapped(path, length_bytes) as segment:
        os._exit(segment[offset])


@pytest.mark.parametrize(("offset", "expected"), [(100, 7), (2 * MIB, -signal.SIGBUS)], ids=["inside", "beyond"])
def test_reading_beyond_the_old_segment_ends_the_process(tmp_path: Path, offset: int, expected: int) -> None:
    (tmp_path / "tensors.bin").write_bytes(b"\x07" * MIB)

    child = multiprocessing.get_context("spawn").Process(
        target=read_mapped, args=(tmp_path / "tensors.bin", 3 * MIB, offset)
    )
    child.start()
    child.join(30)

    assert child.exitcode == expected
    child.close()


def test_mapping_shows_the_bytes_and_is_released(tmp_path: Path) -> None:
    (tmp_path / "tensors.bin").write_bytes(b"weights")

    with store.mapped(tmp_path / "tensors.bin", 7) as segment:
        assert ctypes.string_at(segment, 7) == b"weights"
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_entry_point_is_found_on_the_search_path() -> None:
    (found,) = distributions(path=[str(PLUGIN)])

    (entry_point,) = found.entry_points
    assert (found.name, entry_point.group) == ("vllm-rollout-weight-cache", "vllm.general_plugins")
    assert entry_point.value == "vllm_rollout_weight_cache:register"
    assert {str(file) for file in found.files or ()} == {
        str(file.relative_to(PLUGIN)) for file in PLUGIN.rglob("*") if file.is_file() and file.suffix != ".pyc"
    }


def test_plugin_imports_without_vllm_and_without_the_harness() -> None:
    code = (
        "import json, sys, vllm_rollout_weight_cache as p; p.register\n"
        "names = [p.LOAD_FORMAT, p.DEFAULT_ROOT, p.PATH_VARIABLE, p.KEY_VARIABLE, p.DISABLED_VARIABLE]\n"
        "print(json.dumps([names, sorted({'torch', 'vllm', 'harness', 'numpy'} & {n.split('.')[0] for n in sys.modules})]))"
    )
    answer = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": str(PLUGIN), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        check=True,
        timeout=30,
    )

    assert json.loads(answer.stdout) == [
        [
            launch.WEIGHT_CACHE_LOAD_FORMAT,
            launch.WEIGHT_CACHE_ROOT,
            launch.WEIGHT_CACHE_PATH_VARIABLE,
            launch.WEIGHT_CACHE_KEY_VARIABLE,
            launch.WEIGHT_CACHE_DISABLED_VARIABLE,
        ],
        [],
    ]
