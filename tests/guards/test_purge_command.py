"""`harness purge-cache` as an operator calls it: it lists much and removes only what was named or labelled, own and unused."""

from __future__ import annotations

import json
import mmap
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness import label as labels
from harness.cli import main
from harness.guards import leftovers, purge_command
from harness.guards.leftovers import Places


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Places]:
    """Everything lies below the test's own directories: nothing of this machine is listed, let alone removed."""
    (tmp_path / "shm").mkdir()
    for name in (
        "VLLM_WEIGHT_CACHE_PATH",
        "VLLM_CACHE_ROOT",
        "XDG_CACHE_HOME",
        "TORCHINDUCTOR_CACHE_DIR",
        "TRITON_CACHE_DIR",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("LOGNAME", "USER"):
        monkeypatch.setenv(name, "somebody")
    monkeypatch.setattr(leftovers, "SHARED_MEMORY", tmp_path / "shm")
    with tempfile.TemporaryDirectory(prefix="t") as temporary:  # a short path: a socket's may not be long
        monkeypatch.setattr(tempfile, "tempdir", temporary)
        yield Places.of(os.environ)


def filled(root: Path, name: str = "0123456789abcdef") -> Path:
    entry = root / name
    entry.mkdir(parents=True)
    (entry / "tensors.bin").write_bytes(bytes(1500))
    (entry / "meta.json").write_text(json.dumps({"model": "/models/\x1b[2Jlive"}))
    return root


def with_numpy_cache(checkpoint: Path) -> Path:
    (checkpoint / "np").mkdir(parents=True)
    (checkpoint / "np" / "lm_head.weight").write_bytes(bytes(64))
    (checkpoint / "np" / "weight_names.json").write_text('["lm_head.weight"]')
    return checkpoint


def listed(capsys: pytest.CaptureFixture[str], *arguments: object, code: int) -> dict[str, dict[str, Any]]:
    """Run the command and return what it says about each path, by name."""
    assert main(["purge-cache", *map(str, arguments), "--json"]) == code
    return {Path(item["path"]).name: item for item in json.loads(capsys.readouterr().out)["items"]}


@contextmanager
def held(path: Path) -> Iterator[int]:
    """Have another process map a file."""
    code = (
        "import mmap, sys; file = open(sys.argv[1], 'r+b'); mapped = mmap.mmap(file.fileno(), 0); "
        "print('up', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
            yield process.pid
        finally:
            process.kill()


# one weight cache


def test_lists_first_and_removes_when_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = filled(tmp_path / "cache")
    assert main(["purge-cache", str(root)]) == 1
    printed = capsys.readouterr().out
    assert "0123456789abcdef" in printed
    assert "\\x1b[2Jlive" in printed
    assert "\x1b" not in printed
    assert "unfinished" in printed
    assert "not seen in use" in printed
    assert "not mapped" not in printed
    assert "found: 1 entry, 1,5" in printed
    assert "nothing was removed" in printed
    assert list(root.iterdir())
    assert main(["purge-cache", str(root), "--yes"]) == 0
    assert "removed: 1 entry, 1,5" in capsys.readouterr().out
    assert not list(root.iterdir())
    assert main(["purge-cache", str(root), "--yes"]) == 0
    assert "holds no cache entries" in capsys.readouterr().out


def test_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = filled(tmp_path / "cache")
    (item,) = listed(capsys, root, code=1).values()
    assert (item["kind"], item["owners"], item["used_by"], item["kept_because"]) == (
        "weight cache",
        [os.geteuid()],
        [],
        "",
    )
    assert 0 <= item["age_s"] < 60
    assert (item["removed"], item["chosen"]) == (False, True)
    (gone,) = listed(capsys, root, "--yes", code=0).values()
    assert gone["removed"]


def test_refuses_what_is_no_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = filled(tmp_path / "cache")
    (root / "notes.txt").touch()
    for arguments in ((root,), (root, "--yes"), (root, "--yes", "--all-kinds")):
        assert main(["purge-cache", *map(str, arguments)]) == 3
        assert "is not a weight cache, nothing was removed" in capsys.readouterr().err
    link = tmp_path / "link"
    link.symlink_to(filled(tmp_path / "other"))
    assert main(["purge-cache", str(link), "--yes"]) == 3
    assert "a symbolic link" in capsys.readouterr().err
    assert len(list(root.iterdir())) == 2
    assert list((tmp_path / "other").iterdir())


@pytest.mark.parametrize("asked", [[], ["--yes"], ["--yes", "--json"]])
def test_a_mistyped_path_is_no_success(tmp_path: Path, capsys: pytest.CaptureFixture[str], asked: list[str]) -> None:
    absent = tmp_path / "cahce"
    assert main(["purge-cache", str(absent), *asked]) == 3
    printed = capsys.readouterr()
    assert printed.err == f'harness: there is no directory "{absent}" that could hold a weight cache\n'
    assert printed.out == ""
    absent.mkdir()
    assert main(["purge-cache", str(absent), *asked]) == 0


def test_an_entry_in_use_is_kept_and_its_user_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = filled(filled(tmp_path / "cache"), "fedcba9876543210")
    with held(root / "0123456789abcdef" / "tensors.bin") as pid:
        seen = listed(capsys, root, "--yes", code=1)
        assert [path.name for path in root.iterdir()] == ["0123456789abcdef"]
        kept, gone = seen["0123456789abcdef"], seen["fedcba9876543210"]
        assert re.match(rf'process {pid} \(".*"\) maps it \(--even-mapped\)', kept["kept_because"])
        assert (kept["removed"], gone["removed"]) == (False, True)
        listed(capsys, root, "--yes", "--even-mapped", code=0)
        assert list(root.iterdir()) == []


def test_what_belongs_to_others_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = filled(tmp_path / "cache")
    monkeypatch.setattr(purge_command.os, "geteuid", lambda: 12345)
    (item,) = listed(capsys, root, "--yes", code=1).values()
    assert "it belongs to user" in item["kept_because"]
    assert list(root.iterdir())
    listed(capsys, root, "--yes", "--even-of-others", code=0)
    assert not list(root.iterdir())


# everything


def test_everything_is_listed_and_nothing_that_nobody_named_is_removed(
    tmp_path: Path, places: Places, capsys: pytest.CaptureFixture[str]
) -> None:
    shm = places.shared_memory
    for name in ("psm_0123abcd", "sem.mp-xyz", "vllm_offload_1.mmap", "nccl-abc", "unrelated"):
        (shm / name).write_bytes(bytes(10))
    filled(shm / "vllm_weight_cache")
    compiled = tmp_path / "home" / ".cache" / "vllm" / "torch_compile_cache"
    (compiled / "hash" / "rank_0_0").mkdir(parents=True)
    (compiled / "hash" / "rank_0_0" / "code.py").write_bytes(bytes(7))
    (places.temporary / "torchinductor_somebody").mkdir()
    sockets = places.temporary / f"vllm_weight_cache_{os.geteuid()}"
    sockets.mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(sockets / "vllm_weight_cache_ab.sock"))
    roots = (tmp_path, places.temporary)

    def everything() -> set[str]:
        return {str(path) for root in roots for path in root.rglob("*")}

    before = everything()

    for arguments in ([], ["--all-kinds"], ["--yes"]):
        seen = listed(capsys, *arguments, code=0)
        assert {name: item["kind"] for name, item in seen.items()} == {
            "0123456789abcdef": "weight cache",
            "psm_0123abcd": "segment",
            "sem.mp-xyz": "segment",
            "vllm_offload_1.mmap": "segment",
            "nccl-abc": "segment",
            "torch_compile_cache": "compile cache",
            "torchinductor_somebody": "compile cache",
            "vllm_weight_cache_ab.sock": "daemon socket",
        }
        assert {item["kept_because"] for item in seen.values()} == {
            "nobody named it, and no dead run of this harness labelled it"
        }
        assert seen["torch_compile_cache"]["size_bytes"] == 7
        assert seen["psm_0123abcd"]["about"] == "any Python program makes such"
        assert everything() == before
    assert main(["purge-cache"]) == 0
    assert "--yes would remove nothing" in capsys.readouterr().out

    named = [shm / "psm_0123abcd", compiled, sockets / "vllm_weight_cache_ab.sock"]
    assert set(listed(capsys, *named, code=1)) == {path.name for path in named}
    assert all(item["removed"] for item in listed(capsys, *named, "--yes", code=0).values())
    assert not any(path.exists() for path in named)
    assert before - everything() == {path for path in before if path.startswith(tuple(map(str, named)))}


def test_what_the_variables_of_the_environment_name_is_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_WEIGHT_CACHE_PATH", str(filled(tmp_path / "elsewhere")))
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "root"))
    (tmp_path / "root" / "startup_plan").mkdir(parents=True)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "home"))  # a mistake that must not cost the home directory
    (tmp_path / "home").mkdir()
    seen = listed(capsys, code=0)
    assert set(seen) == {"0123456789abcdef", "startup_plan", "home"}
    assert seen["home"]["kept_because"] == "its name does not say that it is a cache: remove it yourself"


def test_a_named_directory_that_is_no_cache_is_kept_whatever_a_variable_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    precious = tmp_path / "home" / "precious"
    precious.mkdir(parents=True)
    (precious / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(precious))
    (item,) = listed(capsys, precious, "--yes", code=1).values()
    assert "remove it yourself" in item["kept_because"]
    assert (precious / "file").exists()


def test_a_segment_in_use_is_kept(places: Places, capsys: pytest.CaptureFixture[str]) -> None:
    segment = places.shared_memory / "psm_1"
    segment.write_bytes(bytes(4096))
    with segment.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
        (item,) = listed(capsys, segment, "--yes", code=1).values()
    assert f"process {os.getpid()}" in item["kept_because"]
    assert segment.exists()


def test_a_socket_that_is_listened_on_is_kept(places: Places, capsys: pytest.CaptureFixture[str]) -> None:
    directory = places.temporary / "vllm_weight_cache_0"
    directory.mkdir()
    path = directory / "vllm_weight_cache_ab.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        (item,) = listed(capsys, path, "--yes", code=1).values()
    assert "listens on it" in item["kept_because"]
    assert path.exists()


# what belongs to a checkpoint


def test_the_np_directory_of_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = with_numpy_cache(tmp_path / "versions" / "1")
    (checkpoint / "config.json").touch()
    live = tmp_path / "live"
    live.symlink_to("versions/1")
    (item,) = listed(capsys, "--checkpoint", live, code=1).values()
    assert (item["kind"], item["size_bytes"]) == ("np/", 64 + len('["lm_head.weight"]'))
    assert (checkpoint / "np").is_dir()
    listed(capsys, "--checkpoint", live, "--yes", code=0)
    assert [path.name for path in checkpoint.iterdir()] == ["config.json"]
    listed(capsys, "--checkpoint", live, "--yes", code=0)
    assert main(["purge-cache", "--checkpoint", str(tmp_path / "none")]) == 3


def test_an_np_directory_can_be_named_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = with_numpy_cache(tmp_path / "checkpoint")
    listed(capsys, checkpoint / "np", "--yes", code=0)
    assert not (checkpoint / "np").exists()


@pytest.mark.parametrize("kind", ["more", "unfinished", "nonsense", "link"])
def test_an_np_directory_that_vllm_did_not_write_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    checkpoint = with_numpy_cache(tmp_path / "checkpoint")
    names = checkpoint / "np" / "weight_names.json"
    if kind == "more":
        (checkpoint / "np" / "thesis.txt").touch()
    elif kind == "unfinished":
        names.unlink()
    elif kind == "nonsense":
        names.write_text("[" * 100_000)
    else:
        (checkpoint / "np").rename(tmp_path / "np")
        (checkpoint / "np").symlink_to(tmp_path / "np")
    before = sorted(tmp_path.rglob("*"))
    seen = listed(capsys, "--checkpoint", checkpoint, "--yes", code=0 if kind == "link" else 1)
    said = {
        "more": 'it holds "thesis.txt", which load format npcache did not write',
        "unfinished": "it is not finished (no weight_names.json), so its files cannot be told from others",
        "nonsense": "cannot be read",
    }
    if kind == "link":
        assert seen == {}
    else:
        assert said[kind] in seen["np"]["kept_because"]
    assert sorted(tmp_path.rglob("*")) == before


# what a run of this harness recorded


def test_what_a_dead_run_labelled_is_removed_and_what_a_living_one_did_is_not(
    places: Places, capsys: pytest.CaptureFixture[str]
) -> None:
    living = labels.new_label()
    dead = replace(living, token="0badca", owner_start_ticks=1)
    foreign = replace(living, token="0badf0", host="0000")
    directories = {
        name: filled(places.shared_memory / f"{labels.DIRECTORY_PREFIX}{label}" / "s" / "weight_cache").parent.parent
        for name, label in (("living", living), ("dead", dead), ("foreign", foreign))
    }
    (places.shared_memory / f"{labels.DIRECTORY_PREFIX}nonsense").mkdir()
    seen = listed(capsys, code=1)
    assert set(seen) == {path.name for path in directories.values()}
    assert [item["chosen"] for item in seen.values()] == [
        item["path"] == str(directories["dead"]) for item in seen.values()
    ]
    seen = listed(capsys, "--yes", code=0)
    assert {name: path.exists() for name, path in directories.items()} == {
        "living": True,
        "dead": False,
        "foreign": True,
    }
    assert f"still lives (process {os.getpid()})" in seen[directories["living"].name]["kept_because"]
    assert "another host" in seen[directories["foreign"].name]["kept_because"]


def test_a_dead_run_s_directory_that_is_still_mapped_is_kept(
    places: Places, capsys: pytest.CaptureFixture[str]
) -> None:
    dead = replace(labels.new_label(), owner_start_ticks=1)
    root = filled(places.shared_memory / f"{labels.DIRECTORY_PREFIX}{dead}" / "weight_cache")
    with held(root / "0123456789abcdef" / "tensors.bin"):
        (item,) = listed(capsys, "--yes", code=1).values()
        assert "maps it" in item["kept_because"]
    assert root.exists()
    listed(capsys, "--yes", code=0)
    assert not root.exists()


# races


def test_a_link_planted_between_look_and_removal_is_not_followed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = with_numpy_cache(tmp_path / "checkpoint")
    outside = with_numpy_cache(tmp_path / "outside")
    real = purge_command.look

    def plant(*arguments: Any, **options: Any) -> Any:
        sight = real(*arguments, **options)
        checkpoint.rename(tmp_path / "moved")
        checkpoint.symlink_to(outside)
        return sight

    monkeypatch.setattr(purge_command, "look", plant)
    (item,) = listed(capsys, "--checkpoint", checkpoint, "--yes", code=1).values()
    assert "cannot be removed" in item["kept_because"]
    for place in (outside, tmp_path / "moved"):
        assert sorted(path.name for path in (place / "np").iterdir()) == ["lm_head.weight", "weight_names.json"]


@pytest.mark.parametrize("variable", ["VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"])
def test_the_home_directory_of_nobody_is_a_place_as_it_is_written(variable: str) -> None:
    """Engines take it so, and make a directory of that name where they are started."""
    found = Places.of({"HOME": "/home/me", variable: "~nosuchuser/cache"}).compile_caches
    assert any(path.is_relative_to("~nosuchuser/cache") for path in found), found
    assert any(path.is_relative_to(Path.home() / "mine") for path in Places.of({variable: "~/mine"}).compile_caches)
