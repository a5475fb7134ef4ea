"""Reports for programs: SARIF and JUnit as CI reads them, a textfile as node exporter reads it."""

from __future__ import annotations

import json
import os
import re
import threading
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.guards.finding import PreflightFinding, PreflightReport, Severity
from harness.guards.preflight_formats import junit, prometheus, sarif, write_beside

ANY = st.text(st.characters(), max_size=20)
SAMPLE = re.compile(r'([a-z_]+)\{((?:[a-z]+="(?:[^"\\\n]|\\["\\n])*",?)*)\} (-?[0-9.]+)')


def finding(
    severity: Severity = Severity.SILENT, *, where: str = '"model.safetensors", tensor "a.b"', **more: str
) -> PreflightFinding:
    parts = {"id": "D08", "seen": "shape [1]", "expected": "[2]", "remedy": "mend it", "consequence": "vllm cuts it"}
    return PreflightFinding(severity=severity, where=where, **(parts | more))


def report(*findings: PreflightFinding, path: Path = Path("/models/new 1"), **more: Any) -> PreflightReport:
    return PreflightReport(checkpoint=path, engine="vllm 0.32.0", findings=findings, unchecked=("a $ value",), **more)


def check_sarif(text: str) -> dict[str, Any]:
    """Check what the SARIF 2.1.0 schema demands of the parts that are used, and return the only run."""
    log = json.loads(text)
    assert set(log) == {"$schema", "version", "runs"}
    assert log["version"] == "2.1.0"
    (run,) = log["runs"]
    assert set(run) <= {"tool", "results", "invocations", "properties"}
    driver = run["tool"]["driver"]
    assert isinstance(driver["name"], str)
    ids = [rule["id"] for rule in driver["rules"]]
    assert len(set(ids)) == len(ids)
    for rule in driver["rules"]:
        assert set(rule) <= {"id", "name", "shortDescription", "helpUri"}
    for invocation in run["invocations"]:
        assert type(invocation["executionSuccessful"]) is bool
        for notification in invocation["toolExecutionNotifications"]:
            assert notification["level"] in ("none", "note", "warning", "error")
            assert isinstance(notification["message"]["text"], str)
    for result in run["results"]:
        assert set(result) <= {"ruleId", "ruleIndex", "level", "message", "locations", "properties"}
        assert ids[result["ruleIndex"]] == result["ruleId"]
        assert result["level"] in ("none", "note", "warning", "error")
        assert isinstance(result["message"]["text"], str)
        assert result["message"]["text"]
        for location in result["locations"]:
            assert set(location) <= {"physicalLocation", "logicalLocations"}
            assert re.fullmatch(
                r"[A-Za-z0-9._~/%!$&'()*+,;=:@-]*", location["physicalLocation"]["artifactLocation"]["uri"]
            )
            for logical in location["logicalLocations"]:
                assert set(logical) <= {"name", "fullyQualifiedName", "kind"}
    return dict(run)


def test_sarif_says_where_and_how_bad() -> None:
    run = check_sarif(sarif(report(finding(), finding(Severity.RISK, id="C07", where="launch arguments"))))
    first, second = run["results"]
    assert (first["ruleId"], first["level"], second["level"]) == ("D08", "error", "warning")
    uri = first["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert unquote(uri) == "/models/new 1/model.safetensors"
    assert first["locations"][0]["logicalLocations"][0]["name"] == "a.b"
    assert unquote(second["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]) == "/models/new 1"
    assert "vllm cuts it" in first["message"]["text"]
    assert (first["properties"]["fails"], second["properties"]["fails"]) == (True, False)
    assert "not checked: a $ value" in run["invocations"][0]["toolExecutionNotifications"][0]["message"]["text"]


def test_junit_fails_where_the_rollout_should_stop() -> None:
    suite = ElementTree.fromstring(junit(report(finding(), finding(Severity.RISK, id="C07")))).find("testsuite")
    assert suite is not None
    assert (suite.get("tests"), suite.get("failures")) == ("2", "1")
    cases = suite.findall("testcase")
    assert [case.find("failure") is not None for case in cases] == [True, False]
    assert "engine    vllm cuts it" in (cases[0].findtext("failure") or "")
    assert "mend      mend it" in (cases[1].findtext("system-out") or "")
    strict = junit(report(finding(Severity.RISK), fail_on=frozenset({Severity.RISK})))
    assert ElementTree.fromstring(strict).get("failures") == "1"


def test_a_sound_checkpoint_is_one_case_that_passes() -> None:
    (case,) = ElementTree.fromstring(junit(report())).iter("testcase")
    assert list(case) == []
    assert check_sarif(sarif(report()))["results"] == []


def samples(text: str) -> dict[tuple[str, str], float]:
    """Return the samples of an exposition, strictly: every other line is HELP or TYPE."""
    found = {}
    for line in text.removesuffix("\n").split("\n"):
        if not re.fullmatch(r"# (HELP [a-z_]+ [^\n]+|TYPE [a-z_]+ gauge)", line):
            match = SAMPLE.fullmatch(line)
            assert match is not None, line
            found[match[1], match[2]] = float(match[3])
    return found


def test_metrics() -> None:
    metrics = samples(prometheus(report(finding(), finding(), finding(Severity.RISK, id="C07")), now_s=1234.5678))
    place = 'checkpoint="/models/new 1"'
    assert metrics["rollout_preflight_findings", f'{place},id="D08",severity="silent"'] == 2
    assert metrics["rollout_preflight_severity_findings", f'{place},severity="refuses"'] == 0
    assert metrics["rollout_preflight_failing_findings", place] == 2
    assert metrics["rollout_preflight_success", place] == 0
    assert metrics["rollout_preflight_timestamp_seconds", place] == 1234.568
    assert samples(prometheus(report()))["rollout_preflight_success", place] == 1


@given(where=ANY, seen=ANY, tensor=ANY, path=st.text(st.characters(blacklist_characters="\0"), max_size=20))
def test_untrusted_text_breaks_no_format(where: str, seen: str, tensor: str, path: str) -> None:
    made = report(
        finding(where=where, seen=seen, id=seen[:5]), finding(where=f'"{seen}", tensor "{tensor}"'), path=Path(path)
    )
    check_sarif(sarif(made))
    ElementTree.fromstring(junit(made).encode("utf-8"))
    samples(prometheus(made))


def test_files_are_replaced_in_one_step_and_nothing_else_is_left(tmp_path: Path) -> None:
    file = tmp_path / "preflight.prom"
    seen: set[str] = set()
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            seen.add(file.read_text())

    write_beside(file, "a" * 100_000)
    reader = threading.Thread(target=read)
    reader.start()
    try:
        for round_number in range(50):
            write_beside(file, "ab"[round_number % 2] * 100_000)
    finally:
        done.set()
        reader.join()
    assert seen <= {"a" * 100_000, "b" * 100_000}
    assert os.listdir(tmp_path) == ["preflight.prom"]
    mask = os.umask(0)
    os.umask(mask)
    assert file.stat().st_mode & 0o777 == 0o666 & ~mask  # the collector runs as another user


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        write_beside(tmp_path / "absent" / "x.prom", "")
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_beside(tmp_path / "taken", "")
    assert os.listdir(tmp_path) == ["taken"]
