"""A run as JUnit XML, for the tools that collect test results."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from harness.judge.moments import load_span
from harness.judge.verdict import Verdict
from harness.report.printable import printable
from harness.report.store import RunRecord, ScenarioRecord


def write_junit(run: RunRecord, path: Path) -> None:
    """Write one test case per scenario and mode: broken is a failure, unknown is an error, never a pass or a skip."""
    suite = ElementTree.Element(
        "testsuite",
        name=f"rollout on {run.engine_label}",
        timestamp=run.started_at,
        tests=str(len(run.scenarios)),
        failures=str(sum(record.verdict is Verdict.BROKEN for record in run.scenarios)),
        errors=str(sum(record.verdict is Verdict.UNKNOWN for record in run.scenarios)),
        skipped="0",
    )
    for record in run.scenarios:
        suite.append(_case(record))
    root = ElementTree.Element("testsuites")
    root.append(suite)
    partial = path.with_suffix(".partial")
    ElementTree.ElementTree(root).write(partial, encoding="utf-8", xml_declaration=True)
    partial.replace(path)


def _case(record: ScenarioRecord) -> ElementTree.Element:
    span = load_span(record.history)
    took_s = 0.0 if span is None else (span[1] - span[0]) / 1e9
    case = ElementTree.Element(
        "testcase",
        classname=printable(record.name),
        name=printable(f"{record.name}[{record.mode}]"),
        time=f"{took_s:.3f}",
    )
    properties = ElementTree.SubElement(case, "properties")
    for name, value in {"verdict": record.verdict, "layer": record.layer, **record.measured}.items():
        ElementTree.SubElement(properties, "property", name=name, value=printable(str(value)))
    if record.verdict is not Verdict.HELD:
        tag = "failure" if record.verdict is Verdict.BROKEN else "error"
        problem = ElementTree.SubElement(case, tag, message=printable(record.sentence()), type=str(record.verdict))
        problem.text = printable("\n".join(f"{f.verdict}: {f.claim}: {f.because}" for f in record.findings))
    return case
