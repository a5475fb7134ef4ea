"""The end of a long log is where an engine says why it died: the page shows it."""

from __future__ import annotations

from harness.report.html import LOG_BYTES_MAX, render

ACCESS = 'INFO:     127.0.0.1:5 - "POST /v1/completions HTTP/1.1" 200 OK\n'
CAUSE = "ERROR 11-30 10:00:00 [core.py:1] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n"


def test_the_cause_at_the_end_of_a_long_log_is_named(unguarded, make_scenario, make_run) -> None:
    record = make_scenario(unguarded())
    lines = 2 * LOG_BYTES_MAX // len(ACCESS) + 7
    (record.directory / "logs").mkdir()
    (record.directory / "logs" / "new-2.log").write_text(ACCESS * lines + CAUSE)
    page = render(make_run(record))
    assert "CUDA out of memory" in page
    assert f"line {lines + 1}," in page, "lines are counted from the beginning of the file"
    assert "were not read" in page
