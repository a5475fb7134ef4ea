"""A qualification on disk: what was found as JSON, and as one page that needs nothing else."""

from __future__ import annotations

import os
from pathlib import Path

from harness.judge.qualification import Qualification
from harness.report.html import page_environment
from harness.report.store import write_json

VERDICT = "qualification.json"


def write_qualification(
    qualification: Qualification, directory: Path, *, judged_at: str, commit: str, command: str
) -> Path:
    """Write qualification.json and qualification.html into a directory, whole or not at all, and return the page."""
    directory.mkdir(parents=True, exist_ok=True)
    made_with = {"judged_at": judged_at, "commit": commit, "command": command}
    write_json(directory / VERDICT, {**qualification.as_json(), **made_with})
    page = page_environment().get_template("qualification.html").render(q=qualification, **made_with)
    partial = directory / f".qualification.{os.getpid()}.partial"
    try:
        partial.write_text(page, encoding="utf-8")
        partial.replace(directory / "qualification.html")
    finally:
        partial.unlink(missing_ok=True)
    return directory / "qualification.html"
