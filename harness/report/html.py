"""Render a run as one HTML page that needs nothing else: no script, no font, no picture file, no network.

Everything that comes from an engine, a checkpoint or a scenario file is escaped on the way out; the page also forbids
scripts and requests by its own content policy, should an escape ever be missed.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from harness.clock import seconds_between
from harness.judge.moments import Layer
from harness.judge.verdict import Finding, Verdict
from harness.observe.history import Event, EventKind, Request
from harness.observe.logs import LogLine, can_be_cause, cause_order, classify
from harness.report.plots import timeline_svg
from harness.report.printable import printable
from harness.report.store import RunRecord, ScenarioRecord
from harness.report.timeline import load_origin_ns

DOTS_MAX_PAGE = 24_000  # about 0.3 MB of dots, shared by all pictures of a page
EVIDENCE_MAX = 12
DECISIVE_MAX = 3  # findings of a scenario that are said beside its verdict
LOG_BYTES_MAX = 1024**2
LOG_FILES_MAX = 12
LOG_LINES_MAX = 8
ENGINE_KINDS = {
    "container": "real vLLM in a container",
    "process": "real vLLM as a child process",
    "reference": "the reference engine, which is not vLLM: nothing here is a verdict on a vLLM release",
}
_LOG_CLASSES_SHOWN = frozenset(
    {"signal", "file", "config", "load", "memory", "engine", "request", "cache", "output", "lora", "live"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Proof:
    """One event or request that a finding rests on."""

    id: str
    at: str
    what: str
    details: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Claim:
    finding: Finding
    proofs: tuple[_Proof, ...]
    more: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Log:
    """What one engine printed that matters."""

    name: str
    href: str
    lines: tuple[LogLine, ...]
    cause: LogLine | None
    note: str


def page_environment() -> Environment:
    """Return what renders the pages: everything is escaped, and a name that is absent is an error."""
    return Environment(
        loader=PackageLoader("harness.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        finalize=lambda value: printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value,
    )


def render(run: RunRecord) -> str:
    """Return the page of a run, complete or cut, to be saved in the run's directory."""
    dots_max = max(200, DOTS_MAX_PAGE // max(1, len(run.scenarios)))
    counts = Counter(record.verdict for record in run.scenarios)
    template = page_environment().get_template("run.html")
    return template.render(
        decisive_max=DECISIVE_MAX,
        layers=[layer for layer in Layer if layer is not Layer.HARMLESS],
        run=run,
        engine_kind=ENGINE_KINDS.get(run.engine_kind, run.engine_kind),
        sentence=", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict),
        overall=_overall(run, counts),
        machine=[(_label(name), _short(value)) for name, value in run.machine.items()],
        groups=_groups(run),
        sections=[_section(index, record, run, dots_max) for index, record in enumerate(run.scenarios)],
    )


def _overall(run: RunRecord, counts: Mapping[Verdict, int]) -> Verdict:
    if counts.get(Verdict.BROKEN):
        return Verdict.BROKEN
    if counts.get(Verdict.UNKNOWN) or not run.scenarios or not run.is_complete:
        return Verdict.UNKNOWN
    return Verdict.HELD


def _groups(run: RunRecord) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return the rows of the verdict table: per scenario its modes, in the order in which they ran."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for index, record in enumerate(run.scenarios):
        row = {
            "anchor": f"s{index}",
            "mode": record.mode,
            "verdict": record.verdict,
            "layer": record.layer.replace("_", " "),
            "detected": _figure("detected_after_s", record.measured.get("detected_after_s")),
            "exposed": _exposure(record.measured),
            "answered": _figure("availability_ratio", record.measured.get("availability_ratio")),
            "recovered": _figure("recovered_after_s", record.measured.get("recovered_after_s")),
        }
        groups.setdefault(record.name, []).append(row)
    return list(groups.items())


def _section(index: int, record: ScenarioRecord, run: RunRecord, dots_max: int) -> dict[str, Any]:
    history = record.history
    about = str(record.declaration.get("about") or "").strip()
    lead, _, rest = about.partition("\n\n")
    phases: dict[str, float] = {}
    for event in history.of(EventKind.PHASE_ENDED):
        phase = str(event.data.get("phase", ""))
        phases[phase] = phases.get(phase, 0.0) + _number(event.data.get("took_s"))
    return {
        "anchor": f"s{index}",
        "record": record,
        "lead": lead,
        "rest": [line for line in rest.splitlines() if line.strip()],
        "faults": [_fault(event) for event in history.of(EventKind.FAULT_INJECTED)],
        "picture": _picture(record, dots_max),
        "is_cut": bool(history.events) and history.first(EventKind.LOAD_ENDED) is None,
        "claims": _claims(record),
        "phases": [(phase, f"{took_s:.2f} s") for phase, took_s in phases.items()],
        "measured": [(_label(name), _figure(name, value)) for name, value in record.measured.items()],
        "notes": [
            f"{event.data.get('observer', 'an observer')} stopped: {event.data.get('because', '')}"
            for event in history.of(EventKind.OBSERVER_FAILED)
        ],
        "logs": _logs(record, run),
        "files": [
            (name, _href(record.directory / name, run.directory))
            for name in ("history.jsonl", "scenario.json", "outcome.json")
            if (record.directory / name).is_file()
        ],
    }


def _picture(record: ScenarioRecord, dots_max: int) -> Markup | None:
    """Draw the timeline; a history that cannot be drawn must not cost the rest of the page."""
    if not record.history.requests and not record.history.events:
        return None
    try:
        return timeline_svg(record, dots_max=dots_max)
    except Exception as error:
        return escape(f"The timeline could not be drawn: {type(error).__name__}: {printable(error, limit=300)}")


def _fault(event: Event) -> dict[str, Any]:
    before, after = _mapping(event.data.get("before")), _mapping(event.data.get("after"))
    return {
        "name": str(event.data.get("fault", "")),
        "id": str(event.data.get("fault_id", "")),
        "proved": event.data.get("proved") is True,
        "because": str(event.data.get("because", "")),
        "states": [
            (str(key), _short(before.get(key, "")), _short(after.get(key, "")), before.get(key) != after.get(key))
            for key in dict.fromkeys((*before, *after))
        ],
    }


def _claims(record: ScenarioRecord) -> list[_Claim]:
    known: dict[str, Event | Request] = {event.id: event for event in record.history.events}
    known.update((request.id, request) for request in record.history.requests)
    origin_ns = load_origin_ns(record.history)
    return [
        _Claim(
            finding=finding,
            proofs=tuple(_proof(item, known.get(item), origin_ns) for item in finding.evidence[:EVIDENCE_MAX]),
            more=max(0, len(finding.evidence) - EVIDENCE_MAX),
        )
        for finding in record.findings
    ]


def _proof(item_id: str, item: Event | Request | None, origin_ns: int) -> _Proof:
    if item is None:
        return _Proof(id=item_id, at="", what="not in the history", details="")
    if isinstance(item, Event):
        details = json.dumps(dict(item.data), default=str, ensure_ascii=False)
        return _Proof(
            id=item_id, at=_at(origin_ns, item.at_ns), what=item.kind.value, details=printable(details, limit=700)
        )
    fields: Mapping[str, Any] = {
        "engine": item.incarnation or "none",
        "result": item.result.value,
        "status": item.status,
        "latency_ms": round(item.latency_s * 1000, 1),
        "answer": item.answer,
        "difference_old": item.difference_old,
        "difference_new": item.difference_new,
        "error": item.error,
    }
    details = ", ".join(f"{name} {value}" for name, value in fields.items() if value not in (None, ""))
    return _Proof(
        id=item_id,
        at=_at(origin_ns, item.planned_ns),
        what=f"{item.kind} request",
        details=printable(details, limit=700),
    )


def _logs(record: ScenarioRecord, run: RunRecord) -> list[_Log]:
    folder = record.directory / "logs"
    starts = [str(event.data.get("incarnation")) for event in record.history.of(EventKind.ENGINE_STARTING)]
    paths = [path for path in folder.glob("*") if path.is_file() and not path.is_symlink()] if folder.is_dir() else []
    paths.sort(key=lambda path: (starts.index(path.stem) if path.stem in starts else len(starts), path.name))
    return [_log(path, run.directory) for path in paths[:LOG_FILES_MAX]]


def _log(path: Path, page_directory: Path) -> _Log:
    href = _href(path, page_directory)
    try:
        lines, note = _known_lines(path)
    except OSError as error:
        return _Log(name=path.name, href=href, lines=(), cause=None, note=f"cannot be read: {error.strerror}")
    cause = min(filter(can_be_cause, lines), key=cause_order, default=None)
    shown = [line for line in lines if line.klass in _LOG_CLASSES_SHOWN][:LOG_LINES_MAX]
    if cause is not None and all(line.number != cause.number for line in shown):
        shown = sorted([cause, *shown[: LOG_LINES_MAX - 1]], key=lambda line: line.number)
    return _Log(name=path.name, href=href, lines=tuple(shown), cause=cause, note=note)


def _known_lines(path: Path) -> tuple[tuple[LogLine, ...], str]:
    """Return the known lines of a log, and what of a long one was not read: its middle.

    An engine says at the beginning why it does not start, and at the end why it died.
    """
    half = LOG_BYTES_MAX // 2
    with path.open("rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes <= LOG_BYTES_MAX:
            return classify(file.read(LOG_BYTES_MAX).decode("utf-8", "replace")), ""
        head = file.read(half)
        above = head.count(b"\n")
        while (left := size_bytes - half - file.tell()) > 0 and (chunk := file.read(min(left, half))):
            above += chunk.count(b"\n")
        tail = file.read(half)
    late = (replace(line, number=line.number + above) for line in classify(tail.decode("utf-8", "replace")))
    note = f"{size_bytes - LOG_BYTES_MAX:,} bytes in its middle were not read"
    return (*classify(head.decode("utf-8", "replace")), *late), note


def _href(path: Path, page_directory: Path) -> str:
    """Return a link that works from the page's own folder, wherever the run was copied to."""
    try:
        return quote(path.relative_to(page_directory).as_posix())
    except ValueError:
        return ""


def _exposure(measured: Mapping[str, Any]) -> str:
    upper = measured.get("exposed_answers_upper", measured.get("exposed_answers"))
    lower = measured.get("exposed_answers_lower", upper)
    if upper is None:
        return "-"
    return f"{upper:,}" if lower == upper else f"{lower:,} to {upper:,}"


def _figure(name: str, value: Any) -> str:
    """Write a measured value with the unit that its name ends in."""
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if name.endswith("_ratio"):
        return f"{100 * value:.4g} %"
    if "_ms" in name:
        return f"{value:,.4g} ms"
    if name.endswith("_s"):
        return f"{value:,.2f} s"
    return f"{value:,}"


def _label(name: str) -> str:
    for unit in ("_s", "_ratio"):
        name = name.removesuffix(unit)
    words = name.replace("_ms", "").replace("_", " ").strip()
    return words.upper() if words in ("cpu", "gpu", "os") else words[:1].upper() + words[1:]


def _at(origin_ns: int, at_ns: int) -> str:
    return f"{seconds_between(origin_ns, at_ns):+.2f} s"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return printable(text, limit=300)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _mapping(value: Any) -> Mapping[Any, Any]:
    return value if isinstance(value, Mapping) else {}
