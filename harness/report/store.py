"""Runs on disk: declared before, observed while, judged after, so that a crash loses nothing that was seen.

results/<run>/run.json
results/<run>/scenarios/<name>-<mode>/{scenario.json, history.jsonl, outcome.json, logs/}
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from harness.errors import ClaimsBroken, ClaimsUnknown, HarnessError, UsageError
from harness.judge.claim import Claim, Context
from harness.judge.claims import judge
from harness.judge.detection import detection
from harness.judge.expectations import load_expectations
from harness.judge.exposure import exposure
from harness.judge.moments import (
    Layer,
    Window,
    fault_at_ns,
    load_span,
    recovery_at_ns,
    requests_in,
    service_changed,
)
from harness.judge.own_answers import TIMELINE_FINISHED as TIMELINE_FINISHED
from harness.judge.own_answers import ended_early
from harness.judge.verdict import Finding, Verdict, combine
from harness.observe.history import EventKind, History, RequestResult, load_history

LATEST = "latest"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioRecord:
    """One judged scenario in one mode."""

    name: str
    mode: str
    directory: Path
    declaration: Mapping[str, Any]
    history: History
    findings: tuple[Finding, ...]
    verdict: Verdict
    layer: str
    measured: Mapping[str, float | int | str | None]

    @property
    def decisive(self) -> tuple[Finding, ...]:
        """Return the findings that the verdict comes from; none of one that held."""
        if self.verdict is Verdict.BROKEN:
            return tuple(f for f in self.findings if f.verdict is Verdict.BROKEN and not f.is_precondition)
        return tuple(f for f in self.findings if f.verdict is not Verdict.HELD)

    def sentence(self) -> str:
        """Say in a sentence per finding what was claimed, what was seen and where the evidence is."""
        said = [f"{f.claim} is {f.verdict}: {f.because}" for f in self.decisive] or ["nothing was claimed"]
        if self.verdict is Verdict.BROKEN and (early := ended_early(self.history)):
            said.append(early)
        return f'"{self.name}" [{self.mode}] is {self.verdict}: {"; ".join(said)}; evidence: {self.directory / "history.jsonl"}'

    def require_held(self) -> None:
        """Return if every claim holds.

        Raises: ClaimsBroken when one is broken; ClaimsUnknown when the harness could not tell.
        """
        __tracebackhide__ = True
        if self.verdict is Verdict.BROKEN:
            raise ClaimsBroken(self.sentence())
        if self.verdict is Verdict.UNKNOWN:
            raise ClaimsUnknown(self.sentence())


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One run: what was run with what, and every scenario in it."""

    name: str
    directory: Path
    engine_label: str
    engine_kind: str
    seed: int
    command: str
    commit: str
    started_at: str
    machine: Mapping[str, Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    scenarios: tuple[ScenarioRecord, ...] = ()
    is_complete: bool = False  # came to its end, and everything in it was declared
    undeclared: tuple[str, ...] = ()  # directories of scenarios of which nothing can be said


def create_run(results: Path, name: str, fields: Mapping[str, Any]) -> Path:
    """Make `results/<name>` with its run.json and let `results/latest` point to it.

    Raises: UsageError when the directory cannot be written.
    """
    directory = results / name
    try:
        (directory / "scenarios").mkdir(parents=True)
        write_json(directory / "run.json", {**fields, "name": name, "is_complete": False})
        link = results / f".latest-{name}"
        link.symlink_to(name)
        link.replace(results / LATEST)
    except OSError as error:
        raise UsageError(f'results cannot be written to "{directory}": {error.strerror or error}') from error
    return directory


def finish_run(directory: Path) -> None:
    """Note that the run came to its end."""
    fields = json.loads((directory / "run.json").read_text(encoding="utf-8"))
    write_json(directory / "run.json", {**fields, "is_complete": True})


def note_of_machine(directory: Path, name: str, said: str) -> None:
    """Note something about the machine that became known while the run goes on."""
    fields = json.loads((directory / "run.json").read_text(encoding="utf-8"))
    write_json(directory / "run.json", {**fields, "machine": {**fields.get("machine", {}), name: said}})


def declare(
    run_directory: Path, declaration: Mapping[str, Any], mode: str, claims: tuple[Claim, ...], context: Context
) -> Path:
    """Write what a scenario will do and claim, before it runs, and return its directory."""
    base = re.sub(r"[^A-Za-z0-9_.-]", "_", f"{declaration['name']}-{mode}")
    directory = run_directory / "scenarios" / base
    number = 1
    while directory.exists():  # the same scenario twice in one run
        number += 1
        directory = run_directory / "scenarios" / f"{base}-{number}"
    (directory / "logs").mkdir(parents=True)
    write_json(
        directory / "scenario.json",
        {
            "declaration": declaration,
            "mode": mode,
            "claims": [{"name": claim.name, "parameters": dict(claim.parameters)} for claim in claims],
            "context": asdict(context),
        },
    )
    return directory


def judge_scenario(directory: Path, *, expectations: Path | None = None) -> ScenarioRecord:
    """Judge a stored scenario from its declaration and history alone, and write outcome.json.

    With `expectations` the recorded layers are those in that directory now, not those stored when the scenario ran.
    Raises: HarnessError when the directory does not hold a declared scenario and its history.
    """
    try:
        stored = json.loads((directory / "scenario.json").read_text(encoding="utf-8"))
        claims = tuple(Claim(str(entry["name"]), dict(entry["parameters"])) for entry in stored["claims"])
        raw = {**stored["context"], "expected_layers": tuple(Layer(n) for n in stored["context"]["expected_layers"])}
        context = Context(**raw)
        declaration, mode = dict(stored["declaration"]), str(stored["mode"])
        name = str(declaration["name"])
    except (OSError, *MALFORMED) as error:
        raise HarnessError(f'"{directory}" does not hold a declared scenario: {_said(error)}') from error
    if expectations is not None:
        known = load_expectations(expectations, str(context.engine_label)).get(name)
        context = replace(context, expected_layers=() if known is None else known.layers)
    history_path = directory / "history.jsonl"
    try:
        history = load_history(history_path) if history_path.is_file() else History((), ())
        findings = judge(claims, history, context)
        record = ScenarioRecord(
            name=name,
            mode=mode,
            directory=directory,
            declaration=declaration,
            history=history,
            findings=findings,
            verdict=combine(findings),
            layer=str(detection(history).layer),
            measured=measure(history),
        )
    except MALFORMED as error:
        raise HarnessError(f'"{history_path}" is not a history of this harness: {_said(error)}') from error
    write_json(
        directory / "outcome.json",
        {
            "name": record.name,
            "mode": record.mode,
            "verdict": record.verdict,
            "layer": record.layer,
            "detected_because": detection(history).because,
            "measured": record.measured,
            "findings": [asdict(finding) for finding in findings],
        },
    )
    return record


def load_run(directory: Path, *, expectations: Path | None = None) -> RunRecord:
    """Read a stored run and judge every scenario in it anew, as `judge_scenario` does.

    A directory without a declaration is of a scenario that ended before it was written, by a kill or a full disk: such a
    run is not complete. Raises: UsageError when the directory is not a run; HarnessError when a scenario cannot be read.
    """
    try:
        fields = json.loads((directory / "run.json").read_text(encoding="utf-8"))
        stored = {name: fields[name] for name in _RUN_FIELDS}
        for name in ("name", "engine_label"):  # what else is recorded under
            if not isinstance(stored[name], str):
                raise TypeError(f"{name} must be a string, got {str(stored[name])[:80]}")
        inside = sorted((directory / "scenarios").iterdir(), key=lambda f: (f.stat().st_ctime_ns, f.name))
        folders = [each for each in inside if each.is_dir()]
    except (OSError, *MALFORMED) as error:
        raise UsageError(f'"{directory}" is not a run of this harness: {_said(error)}') from error
    if expectations is not None and not expectations.is_dir():
        raise UsageError(f'the expectations "{expectations}" are not a directory')
    declared = [folder for folder in folders if (folder / "scenario.json").is_file()]
    scenarios = tuple(judge_scenario(folder, expectations=expectations) for folder in declared)
    undeclared = tuple(folder.name for folder in folders if folder not in declared)
    stored["is_complete"] = stored["is_complete"] is True and not undeclared
    return RunRecord(directory=directory, scenarios=scenarios, undeclared=undeclared, **stored)


# What reading foreign JSON as ours raises. A run may come from anywhere: it is judged, never trusted.
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


def _said(error: BaseException) -> str:
    if isinstance(error, KeyError):
        return f"{error} is missing"
    return f"{error.strerror}: {error.filename}" if isinstance(error, OSError) and error.strerror else str(error)


_RUN_FIELDS = (
    "name",
    "engine_label",
    "engine_kind",
    "seed",
    "command",
    "commit",
    "started_at",
    "machine",
    "settings",
    "is_complete",
)


def measure(history: History) -> dict[str, float | int | str | None]:
    """Return the figures of one scenario that tables show; None where it did not get that far."""
    start, begun, recovered = fault_at_ns(history), service_changed(history), recovery_at_ns(history)
    seen, exposed = detection(history), exposure(history)
    planned = [r for r in requests_in(history, Window.ALL, canaries=False) if not r.is_ours]
    answered = sum(r.result is RequestResult.OK for r in planned)
    phases = {e.data["phase"]: e.data["took_s"] for e in history.of(EventKind.PHASE_ENDED)}
    return {
        "detected_after_s": None if start is None or seen.at_ns is None else round((seen.at_ns - start) / 1e9, 2),
        "exposed_answers_lower": exposed.lower,
        "exposed_answers_upper": exposed.upper,
        "recovered_after_s": None if begun is None or recovered is None else round((recovered - begun.at_ns) / 1e9, 2),
        "recovery_watched_s": None if begun is None or recovered is not None else _watched_s(history, begun.at_ns),
        "requests": len(planned),
        "availability_ratio": round(answered / len(planned), 4) if planned else None,
        "latency_ms_p50_before": _median_ms(history, Window.BEFORE),
        "latency_ms_p50_after": _median_ms(history, Window.AFTER),
        "engine_starts": len(history.of(EventKind.ENGINE_STARTING)),
        "whole_s": round(sum(e.data["took_s"] for e in history.of(EventKind.PHASE_ENDED)), 2),
        "harness_own_s": round(sum(took for phase, took in phases.items() if phase not in _ENGINE_AND_LOAD), 2),
    }


_ENGINE_AND_LOAD = frozenset({"engine", "golden", "load"})  # phases in which the harness waits for what was planned


def _watched_s(history: History, since_ns: int) -> float:
    """Return for how long a recovery that was not seen was watched for: until the load ended."""
    span = load_span(history)
    return 0.0 if span is None else round(max(0, span[1] - since_ns) / 1e9, 2)


def _median_ms(history: History, window: Window) -> float | None:
    times = sorted(r.latency_s for r in requests_in(history, window, canaries=False) if r.result is RequestResult.OK)
    return round(times[len(times) // 2] * 1000, 1) if times else None


def write_json(path: Path, value: Any) -> None:
    """Write JSON whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(value, indent=1, default=str), encoding="utf-8")
    partial.replace(path)
