"""A run, or a comparison, as JUnit XML, for the tools that collect test results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

from harness.judge.moments import load_span
from harness.judge.verdict import Finding, Verdict
from harness.report.printable import printable
from harness.report.store import RunRecord, ScenarioRecord


def write_junit(run: RunRecord, path: Path) -> None:
    """Write one test case per scenario and mode: broken is a failure, unknown is an error, never a pass or a skip.

    A run that did not come to its end has one more, an error: what is missing in it was not judged.
    """
    missing = [] if run.is_complete else [Verdict.UNKNOWN]
    verdicts = [*(record.verdict for record in run.scenarios), *missing]
    suite = _suite(f"rollout on {run.engine_label}", run.started_at, verdicts)
    for record in run.scenarios:
        suite.append(_case(record))
    for verdict in missing:
        case = ElementTree.SubElement(suite, "testcase", classname="the whole run", name="the whole run")
        lost = f"; nothing is known of: {', '.join(run.undeclared)}" if run.undeclared else ""
        said = f"the run did not come to its end, so that what is missing in it was not judged{lost}"
        _problem(case, verdict, message=said, text=said)
    _write(suite, path)


def write_case(
    path: Path, *, suite: str, name: str, started_at: str, finding: Finding, properties: Mapping[str, object]
) -> None:
    """Write one finding as a suite of one test case, by the same rule."""
    written = _suite(suite, started_at, [finding.verdict])
    case = ElementTree.SubElement(written, "testcase", classname=printable(suite), name=printable(name))
    _properties(case, {"verdict": finding.verdict, **properties})
    _problem(case, finding.verdict, message=finding.because, text=f"{finding.verdict}: {name}: {finding.because}")
    _write(written, path)


def _suite(name: str, started_at: str, verdicts: list[Verdict]) -> ElementTree.Element:
    return ElementTree.Element(
        "testsuite",
        name=printable(name),
        timestamp=printable(started_at),
        tests=str(len(verdicts)),
        failures=str(verdicts.count(Verdict.BROKEN)),
        errors=str(verdicts.count(Verdict.UNKNOWN)),
        skipped="0",
    )


def _case(record: ScenarioRecord) -> ElementTree.Element:
    span = load_span(record.history)
    took_s = 0.0 if span is None else (span[1] - span[0]) / 1e9
    case = ElementTree.Element(
        "testcase",
        classname=printable(record.name),
        name=printable(f"{record.name}[{record.mode}]"),
        time=f"{took_s:.3f}",
    )
    _properties(case, {"verdict": record.verdict, "layer": record.layer, **record.measured})
    if record.verdict is not Verdict.HELD:
        found = "\n".join(f"{f.verdict}: {f.claim}: {f.because}" for f in record.findings)
        _problem(case, record.verdict, message=record.sentence(), text=found)
    return case


def _properties(case: ElementTree.Element, values: Mapping[str, object]) -> None:
    properties = ElementTree.SubElement(case, "properties")
    for name, value in values.items():
        if value is None:  # there is no such figure, and "None" is no number
            continue
        ElementTree.SubElement(properties, "property", name=printable(name), value=printable(str(value)))


def _problem(case: ElementTree.Element, verdict: Verdict, *, message: str, text: str) -> None:
    if verdict is Verdict.HELD:
        return
    tag = "failure" if verdict is Verdict.BROKEN else "error"
    problem = ElementTree.SubElement(case, tag, message=printable(message), type=str(verdict))
    problem.text = printable(text)


def _write(suite: ElementTree.Element, path: Path) -> None:
    root = ElementTree.Element("testsuites")
    root.append(suite)
    partial = path.with_suffix(".partial")
    ElementTree.ElementTree(root).write(partial, encoding="utf-8", xml_declaration=True)
    partial.replace(path)
