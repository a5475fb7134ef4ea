"""Generated pages of text: written whole or not at all, and never only after hours found to have no place."""

from __future__ import annotations

import os
from pathlib import Path

from harness.errors import HarnessError, UsageError


def require_place(page: Path) -> None:
    """Make the directory of a page that will be written.

    Raises: UsageError when none can be made there, or the page is a directory.
    """
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f'the page "{page}" cannot be written: {error.strerror or error}') from error
    place = _where(page).parent
    if page.is_dir() or not (_is_no_file(page) or os.access(place, os.W_OK | os.X_OK)):
        said = "it is a directory" if page.is_dir() else f'"{place}" cannot be written to'
        raise UsageError(f'the page "{page}" cannot be written: {said}')


def write_page(page: Path, text: str) -> None:
    """Replace a page.

    Raises: HarnessError when it cannot be written; then it is as it was.
    """
    require_place(page)
    whole = _where(page)
    partial = whole.with_name(f".{whole.name}.{os.getpid()}.partial")
    try:
        if _is_no_file(page):
            page.write_text(text, encoding="utf-8")
            return
        try:
            partial.write_text(text, encoding="utf-8")
            partial.replace(whole)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise HarnessError(
            f'the page "{page}" cannot be written, and is as it was: {error.strerror or error}'
        ) from error


def _where(page: Path) -> Path:
    """Return what a link leads to: that is replaced, and the link stays."""
    return Path(os.path.realpath(page))


def _is_no_file(page: Path) -> bool:
    """Say whether it is a device or a pipe, such as /dev/stdout: nothing is to take its name."""
    return page.exists() and not page.is_file()
