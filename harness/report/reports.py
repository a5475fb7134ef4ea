"""Everything that is made from a stored run: outcomes, JUnit XML and the page."""

from __future__ import annotations

from pathlib import Path

from harness.report.html import render
from harness.report.junit import write_junit
from harness.report.store import RunRecord, load_run


def write_reports(directory: Path) -> RunRecord:
    """Judge a stored run anew and write outcome.json, junit.xml and report.html.

    Raises: UsageError when the directory is not a run.
    """
    run = load_run(directory)
    write_junit(run, directory / "junit.xml")
    partial = directory / ".report.partial"
    partial.write_text(render(run), encoding="utf-8")
    partial.replace(directory / "report.html")
    return run
