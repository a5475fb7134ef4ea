"""Purging empties a weight cache and nothing else."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from harness.errors import UsageError
from harness.guards import purge
from harness.guards.purge import list_cache


def entry(root: Path, name: str = "0123456789abcdef", *, model: object = "/models/live", complete: bool = True) -> Path:
    path = root / name
    path.mkdir(parents=True)
    (path / "tensors.bin").write_bytes(bytes(100))
    (path / "meta.json").write_text(json.dumps({"model": model, "tensors": []}))
    if complete:
        (path / "complete").touch()
    return path


def everything(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


def test_lists_and_removes_entries(tmp_path: Path) -> None:
    entry(tmp_path)
    entry(tmp_path, "fedcba9876543210.4711.partial", complete=False)
    listed = list_cache(tmp_path)
    assert [(item.name, item.is_complete, item.model) for item in listed] == [
        ("0123456789abcdef", True, "/models/live"),
        ("fedcba9876543210.4711.partial", False, "/models/live"),
    ]
    report = purge.purge(tmp_path)
    assert report.removed == listed
    assert report.size_bytes == sum(item.size_bytes for item in listed) > 200
    assert str(report).startswith("2 entries, ")
    assert everything(tmp_path) == set()
    assert purge.purge(tmp_path).removed == ()


def test_absent_directory_is_an_empty_cache(tmp_path: Path) -> None:
    assert list_cache(tmp_path / "none") == ()
    assert purge.purge(tmp_path / "none").removed == ()


@pytest.mark.parametrize("kind", ["file", "directory", "link", "file in entry", "link in entry", "directory in entry"])
def test_a_directory_with_anything_else_is_refused_whole(tmp_path: Path, kind: str) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    first = entry(root)
    if kind == "file":
        (root / "notes").touch()
    elif kind == "directory":
        (root / "home").mkdir()
    elif kind == "link":
        (root / "aaaaaaaaaaaaaaaa").symlink_to(outside)
    elif kind == "file in entry":
        (first / "precious").touch()
    elif kind == "link in entry":
        (first / "tensors.bin").unlink()
        (first / "tensors.bin").symlink_to(outside / "precious")
    else:
        (first / "meta.json").unlink()
        (first / "meta.json").mkdir()
    before = everything(root)
    with pytest.raises(UsageError, match="is not a weight cache, nothing was removed"):
        purge.purge(root)
    assert everything(root) == before
    assert (outside / "precious").read_text() == "x"


def test_a_link_or_a_file_is_no_cache(tmp_path: Path) -> None:
    entry(tmp_path / "root")
    (tmp_path / "link").symlink_to(tmp_path / "root")
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="a symbolic link"):
        purge.purge(tmp_path / "link")
    with pytest.raises(UsageError, match="expected a directory"):
        purge.purge(tmp_path / "file")
    assert len(list_cache(tmp_path / "root")) == 1


@pytest.mark.parametrize("content", ["", "[]", '{"model": {"a": 1}}', "[" * 100_000, "\x00"])
def test_what_an_entry_says_is_not_trusted(tmp_path: Path, content: str) -> None:
    path = entry(tmp_path)
    (path / "meta.json").write_text(content)
    assert len(list_cache(tmp_path)) == 1
    assert len(purge.purge(tmp_path).removed) == 1


def test_an_entry_that_is_finished_meanwhile_is_removed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partial = entry(tmp_path, "0123456789abcdef.1.partial", complete=False)
    original = purge._remove

    def race(directory: int, name: str) -> None:
        if partial.exists():
            (partial / "complete").touch()
            partial.rename(tmp_path / "0123456789abcdef")
        original(directory, name)

    monkeypatch.setattr(purge, "_remove", race)
    assert [item.name for item in purge.purge(tmp_path).removed] == ["0123456789abcdef.1.partial", "0123456789abcdef"]
    assert everything(tmp_path) == set()


def test_what_is_to_be_kept_is_kept_though_it_is_finished_meanwhile(tmp_path: Path) -> None:
    entry(tmp_path)
    entry(tmp_path, "fedcba9876543210")
    keep = frozenset({"fedcba9876543210.4711.partial"})
    assert [item.name for item in purge.purge(tmp_path, keep=keep).removed] == ["0123456789abcdef"]
    assert [path.name for path in tmp_path.iterdir()] == ["fedcba9876543210"]


def test_entries_that_come_back_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry(tmp_path)
    monkeypatch.setattr(purge, "_remove", lambda directory, name: None)
    with pytest.raises(UsageError, match="still has entries after 5 rounds"):
        purge.purge(tmp_path)


def test_mapped_memory_stays_readable(tmp_path: Path) -> None:
    path = entry(tmp_path)
    with (path / "tensors.bin").open("rb") as file:
        purge.purge(tmp_path)
        assert os.fstat(file.fileno()).st_nlink == 0
        assert file.read() == bytes(100)
