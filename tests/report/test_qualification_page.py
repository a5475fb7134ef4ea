"""The page of a qualification shows everything that was judged, and nothing that an engine said can leave its place."""

from __future__ import annotations

import json
from pathlib import Path

from harness.judge.qualification import Missing, Part, Qualification
from harness.judge.verdict import Finding, Verdict
from harness.report.qualification_page import write_qualification

HOSTILE = '<script>alert("x")</script>\x1b[31m'


def test_the_page_shows_findings_and_what_is_missing_escaped(tmp_path: Path) -> None:
    found = Finding(claim=f"claim_{HOSTILE}", verdict=Verdict.BROKEN, because=HOSTILE, evidence=(HOSTILE,) * 9)
    parts = (
        Part(name="scenarios", is_required=True, required=2, findings=(found,)),
        Part(name="latency", is_required=False, required=1, missing=(Missing(name="comparison", because=HOSTILE),)),
    )
    qualification = Qualification(
        candidate=HOSTILE, baseline="b", parts=parts, sources={"scenarios": (HOSTILE,), "latency": ()}, notes=(HOSTILE,)
    )
    page = write_qualification(qualification, tmp_path, judged_at="now", commit="c", command=HOSTILE).read_text()
    assert "<script" not in page
    assert "\x1b" not in page
    assert "and 3 more" in page
    assert "Missing: 1 of 1, and not required" in page
    assert "Do the guarded scenarios hold on the candidate?" in page
    for outside in ("src=", 'href="http', "@import", "url("):
        assert outside not in page
    assert json.loads((tmp_path / "qualification.json").read_text())["candidate"] == HOSTILE
    assert sorted(path.name for path in tmp_path.iterdir()) == ["qualification.html", "qualification.json"]
