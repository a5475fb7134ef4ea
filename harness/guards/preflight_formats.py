"""Write what pre-flight found for programs: SARIF and JUnit for CI, a textfile for Prometheus."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree

from harness.guards.finding import PreflightFinding, PreflightReport, Severity, printable

SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
LEVELS = {Severity.REFUSES: "error", Severity.SILENT: "error", Severity.RISK: "warning"}
TITLES = {
    Severity.REFUSES: "the engine does not start",
    Severity.SILENT: "the engine starts and serves wrong answers",
    Severity.RISK: "may be meant so",
}
FILE = re.compile(r'^"([^"]+)"')
TENSOR = re.compile(r'tensor "([^"]+)"')


def sarif(report: PreflightReport) -> str:
    """Return the report as SARIF 2.1.0, one result a finding, with the file and the tensor it is about."""
    ids = sorted({finding.id for finding in report.findings})
    rules = [{"id": fault_id, "name": f"Fault{fault_id}", "helpUri": _help(fault_id)} for fault_id in ids]
    driver = {"name": "harness preflight", "rules": rules}
    run = {
        "tool": {"driver": driver},
        "results": [_result(finding, ids, report) for finding in report.findings],
        "invocations": [
            {
                "executionSuccessful": True,
                "toolExecutionNotifications": [
                    {"level": "note", "message": {"text": printable(f"not checked: {what}")}}
                    for what in report.unchecked
                ],
            }
        ],
        "properties": {"checkpoint": printable(str(report.checkpoint)), "engine": report.engine},
    }
    return json.dumps({"$schema": SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1) + "\n"


def _help(fault_id: str) -> str:
    return f"docs/fault-ids.md#{fault_id.lower()}"


def _result(finding: PreflightFinding, ids: list[str], report: PreflightReport) -> dict[str, Any]:
    file, tensor = FILE.match(finding.where), TENSOR.search(finding.where)
    location: dict[str, Any] = {
        "logicalLocations": [{"fullyQualifiedName": printable(finding.where), "kind": "member" if tensor else "module"}]
    }
    if tensor:
        location["logicalLocations"][0]["name"] = printable(tensor[1])
    path = Path(str(report.checkpoint), file[1]) if file else report.checkpoint
    location["physicalLocation"] = {"artifactLocation": {"uri": _uri(path)}}
    text = f"{finding.seen}; expected {finding.expected}. {finding.consequence}. Mend: {finding.remedy}"
    return {
        "ruleId": finding.id,
        "ruleIndex": ids.index(finding.id),
        "level": LEVELS[finding.severity],
        "message": {"text": printable(text)},
        "locations": [location],
        "properties": {"severity": str(finding.severity), "fails": finding in report.failing},
    }


def _uri(path: Path) -> str:
    try:
        raw = os.fsencode(path)
    except UnicodeEncodeError:  # a name from a JSON file, which no file can have
        raw = str(path).encode("utf-8", "replace")
    return quote(raw, safe="/")


def junit(report: PreflightReport) -> str:
    """Return the report as JUnit: one test case a finding, failed where it should stop the rollout."""
    failing = report.failing
    cases = max(len(report.findings), 1)
    suite = ElementTree.Element(
        "testsuite", name="harness preflight", tests=str(cases), failures=str(len(failing)), errors="0", skipped="0"
    )
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in (("checkpoint", str(report.checkpoint)), ("engine", report.engine)):
        ElementTree.SubElement(properties, "property", name=name, value=printable(value))
    place = printable(str(report.checkpoint))
    for finding in report.findings:
        name = printable(f"{finding.id} {finding.where}: {finding.seen}")
        case = ElementTree.SubElement(suite, "testcase", classname=place, name=name, time="0")
        if finding in failing:
            kind = {"type": str(finding.severity), "message": printable(finding.seen)}
            ElementTree.SubElement(case, "failure", kind).text = finding.as_text()
        else:
            ElementTree.SubElement(case, "system-out").text = finding.as_text()
    if not report.findings:
        ElementTree.SubElement(suite, "testcase", classname=place, name="nothing found", time="0")
    if report.unchecked:
        lines = "\n".join(printable(f"not checked: {what}") for what in report.unchecked)
        ElementTree.SubElement(suite, "system-out").text = lines
    root = ElementTree.Element("testsuites", tests=str(cases), failures=str(len(failing)), errors="0")
    root.append(suite)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def prometheus(report: PreflightReport, *, now_s: float | None = None) -> str:
    """Return the report for node exporter's textfile collector; the time is a value of its own, as it demands."""
    counts: dict[tuple[str, str], int] = {}
    for finding in report.findings:
        key = (finding.id, str(finding.severity))
        counts[key] = counts.get(key, 0) + 1
    checkpoint = f'checkpoint="{_label(str(report.checkpoint))}"'
    found = [
        (f'{checkpoint},id="{_label(fault_id)}",severity="{severity}"', count)
        for (fault_id, severity), count in sorted(counts.items())
    ]
    by_severity = [
        (f'{checkpoint},severity="{severity}"', sum(finding.severity is severity for finding in report.findings))
        for severity in Severity
    ]
    lines: list[str] = []
    for name, text, values in (
        ("rollout_preflight_findings", "Findings of the last pre-flight, by fault id.", found),
        ("rollout_preflight_severity_findings", "Findings of the last pre-flight, by severity.", by_severity),
        (
            "rollout_preflight_failing_findings",
            "Findings that should stop a rollout.",
            [(checkpoint, len(report.failing))],
        ),
        ("rollout_preflight_unchecked", "Things that could not be looked at.", [(checkpoint, len(report.unchecked))]),
        (
            "rollout_preflight_success",
            "1 when the last pre-flight ran to its end and nothing stops the rollout.",
            [(checkpoint, int(not report.failing))],
        ),
        (
            "rollout_preflight_timestamp_seconds",
            "When the last pre-flight ended.",
            [(checkpoint, round(time.time() if now_s is None else now_s, 3))],
        ),
    ):
        lines += [f"# HELP {name} {text}", f"# TYPE {name} gauge"]
        lines += [f"{name}{{{labels}}} {value}" for labels, value in values]
    return "\n".join(lines) + "\n"


def _label(text: str) -> str:
    """Escape a label value as the exposition format wants it; what is not printable is spelled out before."""
    return printable(text).replace("\\", "\\\\").replace('"', '\\"')


def write_beside(path: Path, text: str) -> None:
    """Write a file by rename, so that a reader sees the old or the new one, whole.

    Raises: OSError when the directory cannot be written.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # the collector reads *.prom only
    try:
        scratch.write_text(text, encoding="utf-8")
        os.replace(scratch, path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


FORMATS: dict[str, Callable[[PreflightReport], str]] = {"sarif": sarif, "junit": junit, "textfile": prometheus}
