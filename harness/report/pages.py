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
    if page.is_dir() or not os.access(page.parent, os.W_OK | os.X_OK):
        said = "it is a directory" if page.is_dir() else f'"{page.parent}" cannot be written to'
        raise UsageError(f'the page "{page}" cannot be written: {said}')


def write_page(page: Path, text: str) -> None:
    """Replace a page.

    Raises: HarnessError when it cannot be written; then it is as it was.
    """
    require_place(page)
    partial = page.with_name(f".{page.name}.{os.getpid()}.partial")
    try:
        try:
            partial.write_text(text, encoding="utf-8")
            partial.replace(page)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise HarnessError(
            f'the page "{page}" cannot be written, and is as it was: {error.strerror or error}'
        ) from error
