"""A page is replaced whole, or it stays as it was."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from harness import cli
from harness.errors import HarnessError, UsageError
from harness.report.pages import require_place, write_page
from tests.suites import write_frozen_suite


def test_a_page_is_written_where_no_directory_is_yet(tmp_path: Path) -> None:
    write_page(tmp_path / "docs" / "page.md", "é")
    write_page(tmp_path / "docs" / "page.md", "new")
    assert (tmp_path / "docs" / "page.md").read_text(encoding="utf-8") == "new"
    assert [each.name for each in (tmp_path / "docs").iterdir()] == ["page.md"]


def test_on_a_full_disk_the_page_before_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("before")

    def full(path: Path, text: str, **_: object) -> None:
        path.write_bytes(text.encode()[:2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(HarnessError, match=r'page\.md" cannot be written, and is as it was: No space left on device'):
        write_page(page, "after")
    assert page.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [page]


def test_what_can_be_no_page_is_a_wrong_call(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="it is a directory"):
        require_place(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be written: File exists"):
        require_place(tmp_path / "file" / "page.md")


def test_matrix_names_a_page_without_a_place_before_any_engine_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    suite = write_frozen_suite(tmp_path)
    (tmp_path / "file").touch()
    asked = ["matrix", str(suite), "--engine", "reference", "--expectations", "into", "--findings", "file/findings.md"]
    assert cli.main(asked) == 3
    assert capsys.readouterr().err == 'harness: the page "file/findings.md" cannot be written: File exists\n'
    assert not (tmp_path / "into").exists()
    assert not (tmp_path / "results").exists()


def test_a_link_to_a_page_stays_one(tmp_path: Path) -> None:
    page, link = tmp_path / "own" / "page.md", tmp_path / "link.md"
    write_page(page, "before")
    link.symlink_to(page)
    write_page(link, "after")
    assert link.is_symlink()
    assert page.read_text(encoding="utf-8") == "after"


def test_a_pipe_is_written_to_and_stays_one(tmp_path: Path) -> None:
    """As /dev/stdout and /dev/null are, of which root would make files."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_page(pipe, "a page")
        assert os.read(reader, 100) == b"a page"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
