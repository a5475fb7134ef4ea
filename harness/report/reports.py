"""Everything that is made from a stored run: outcomes, JUnit XML and the page."""

from __future__ import annotations

from pathlib import Path

from harness.errors import HarnessError
from harness.report.html import render
from harness.report.junit import write_junit
from harness.report.store import MALFORMED, RunRecord, load_run


def write_reports(directory: Path, *, expectations: Path | None = None) -> RunRecord:
    """Judge a stored run anew, as `load_run` does, and write outcome.json, junit.xml and report.html.

    Raises: UsageError when the directory is not a run; HarnessError when what is stored cannot be shown.
    """
    run = load_run(directory, expectations=expectations)
    try:
        write_junit(run, directory / "junit.xml")
        page = render(run)
    except MALFORMED as error:
        raise HarnessError(f'the run in "{directory}" cannot be shown: {type(error).__name__}: {error}') from error
    partial = directory / ".report.partial"
    partial.write_text(page, encoding="utf-8")
    partial.replace(directory / "report.html")
    return run
