"""What is removed is what was looked at, and never what a link leads to."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from harness.errors import HarnessError
from harness.guards import removal
from harness.guards.holders import FileKey, key_of
from harness.guards.removal import remove


def key(path: Path) -> FileKey:
    return key_of(path.lstat())


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    path = tmp_path / "outside"
    (path / "inner").mkdir(parents=True)
    (path / "precious").write_text("precious")
    (path / "inner" / "precious").write_text("precious")
    return path


@pytest.fixture
def tree(tmp_path: Path, outside: Path) -> Path:
    """A directory with everything that may lead out of it."""
    path = tmp_path / "parent" / "tree"
    (path / "a" / "b").mkdir(parents=True)
    (path / "a" / "file").touch()
    (path / "a" / "to directory").symlink_to(outside)
    (path / "to file").symlink_to(outside / "precious")
    (path / "dangling").symlink_to("nowhere")
    os.mkfifo(path / "fifo")
    return path


def require_untouched(outside: Path) -> None:
    assert sorted(str(path.relative_to(outside)) for path in outside.rglob("*")) == [
        "inner",
        "inner/precious",
        "precious",
    ]
    assert (outside / "precious").read_text() == "precious"


def test_a_directory_goes_with_its_links_but_not_what_they_lead_to(tree: Path, outside: Path) -> None:
    remove(tree, key(tree))
    assert list(tree.parent.iterdir()) == []
    require_untouched(outside)


def test_a_file_a_link_and_what_has_gone_by_itself(tmp_path: Path, outside: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.touch()
    link.symlink_to(outside)
    for path in (file, link):
        seen = key(path)
        remove(path, seen)
        assert not os.path.lexists(path)
        remove(path, seen)
    require_untouched(outside)


@pytest.mark.parametrize("put", ["link", "directory", "file"])
def test_something_else_put_in_its_place_is_left(tree: Path, outside: Path, put: str) -> None:
    seen = key(tree)
    tree.rename(tree.with_name("moved"))
    if put == "link":
        tree.symlink_to(outside)
    elif put == "directory":
        outside.rename(tree)
        tree.rename(outside)
        tree.mkdir()
    else:
        tree.touch()
    with pytest.raises(HarnessError, match="something else was put there"):
        remove(tree, seen)
    assert os.path.lexists(tree)
    require_untouched(outside)


def test_a_link_put_above_it_ends_the_walk(tree: Path, outside: Path) -> None:
    """The parent is replaced by a link to a directory that holds one of the same name."""
    seen = key(tree)
    (outside / "inner").rename(outside / "tree")
    tree.parent.rename(tree.parent.with_name("moved"))
    tree.parent.symlink_to(outside)
    with pytest.raises(HarnessError, match=r"cannot be removed: (Not a directory|Too many levels)"):
        remove(tree, seen)
    (outside / "tree").rename(outside / "inner")
    require_untouched(outside)


@pytest.mark.parametrize("when", ["before it is opened", "while it is emptied"])
def test_a_race_for_a_directory_inside_is_lost_by_the_link(
    tree: Path, outside: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """An inner directory becomes a link to another place at the worst moment."""
    swapped = False
    real_open, real_unlink = os.open, os.unlink

    def swap() -> None:
        nonlocal swapped
        if not swapped:
            swapped = True
            (tree / "a").rename(tree / "was a")
            (tree / "a").symlink_to(outside)

    def opening(path: Any, *arguments: Any, **options: Any) -> int:
        if when == "before it is opened" and path == "a":
            swap()
        return real_open(path, *arguments, **options)

    def unlinking(path: Any, **options: Any) -> None:
        if when == "while it is emptied":
            swap()
        real_unlink(path, **options)

    monkeypatch.setattr(os, "open", opening)
    monkeypatch.setattr(os, "unlink", unlinking)
    with pytest.raises(HarnessError, match="cannot be removed"):
        remove(tree, key(tree))
    assert swapped
    require_untouched(outside)


def test_a_directory_swapped_at_the_last_moment_is_left(
    tree: Path, outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def opening(path: Any, *arguments: Any, **options: Any) -> int:
        if path == "tree":
            tree.rename(tree.with_name("moved"))
            outside.rename(tree)
        return real(path, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", opening)
        with pytest.raises(HarnessError, match="something else was put there"):
            remove(tree, key(tree))
    require_untouched(tree)


def test_a_file_system_mounted_inside_is_left(tree: Path) -> None:
    inner = tree / "a" / "b"
    try:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "tmpfs", str(inner)], capture_output=True, timeout=60, check=False
        )
    except OSError as error:
        pytest.skip(f"no file system can be mounted here: {error}")
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.decode().strip()}")
    try:
        (inner / "precious").touch()
        with pytest.raises(HarnessError, match="another file system is mounted inside"):
            remove(tree, key(tree))
        assert (inner / "precious").exists()
    finally:
        subprocess.run(["umount", str(inner)], timeout=60, check=True)


def test_what_the_system_refuses_is_said(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Any, **options: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(removal.os, "unlink", refuse)
    with pytest.raises(HarnessError, match="cannot be removed: Operation not permitted"):
        remove(tree, key(tree))
