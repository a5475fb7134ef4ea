"""What finished runs say about the side of a qualification that they are of."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.judge.blocks import Declaration
from harness.judge.expectations import NOTHING_RECORDED, Expectation
from harness.judge.verdict import Finding, Verdict
from harness.report.store import RunRecord, ScenarioRecord
from harness.scenario import Mode

ALIKE = ("model", "flags", "hardware", "driver", "load")  # in both arms: only the engines may differ


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Which engine a side of a qualification is, as known without the comparison that is to be about it."""

    name: str  # "candidate" or "baseline"
    label: str | None  # None: not known
    builds: frozenset[str] = frozenset()  # empty: not known


def why_not_about(declared: Declaration, profile: str, *, baseline: Known, candidate: Known) -> str:
    """Say why a comparison tells nothing about these two sides, or not what was asked; empty when it does."""
    if declared.profile != profile:
        return f"its profile is {declared.profile}, {profile} is asked for"
    old, new = declared.arm("old").key, declared.arm("new").key
    for side, arm, key in ((baseline, "old", old), (candidate, "new", new)):
        if key["engine"] != side.label:
            said = side.label or "of no known engine"
            return f"its {arm} side is {key['engine']}, the {side.name} is {said}: it says nothing about these two"
        if side.builds and side.builds != {key["build"]}:
            builds = '", "'.join(sorted(side.builds))
            return f'its {arm} side is of build "{key["build"]}", the {side.name} is of "{builds}"'
    differing = [name for name in ALIKE if old[name] != new[name]]
    return f"its two sides differ in {', '.join(differing)}, and not in their engines alone" if differing else ""


def runs_in(place: Path) -> list[Path]:
    """Return the runs in a directory of results, the oldest first."""
    found = place.iterdir() if place.is_dir() else ()
    return sorted(path for path in found if (path / "run.json").is_file() and not path.is_symlink())


def each_once(paths: Iterable[Path]) -> list[Path]:
    """Return the directories without those that another spelling, or a link, has named before."""
    return list({path.resolve(): path for path in reversed(list(paths))}.values())[::-1]


def guarded(runs: Sequence[RunRecord]) -> dict[str, list[Finding]]:
    """Return what each guarded run of each scenario came to."""
    found: dict[str, list[Finding]] = {}
    for run in runs:
        for record in run.scenarios:
            if record.mode == Mode.GUARDED:
                found.setdefault(record.name, []).append(_as_finding(run, record))
    return found


def recovery_times(runs: Sequence[RunRecord], names: Sequence[str]) -> dict[str, list[float]]:
    """Return how long each recovery of these scenarios took, in seconds, by name and mode; one that never came is infinite.

    Only scenarios whose preconditions held count: what was not injected was not recovered from.
    """
    times: dict[str, list[float]] = {}
    for run in runs:
        for record in run.scenarios:
            claimed = [finding for finding in record.findings if finding.claim.startswith("recovered(")]
            failed = any(f.is_precondition and f.verdict is not Verdict.HELD for f in record.findings)
            if record.name not in names or failed or not claimed:
                continue
            took_s = record.measured.get("recovered_after_s")
            if isinstance(took_s, int | float):
                times.setdefault(f"{record.name} [{record.mode}]", []).append(float(took_s))
            elif claimed[0].verdict is Verdict.BROKEN:
                times.setdefault(f"{record.name} [{record.mode}]", []).append(math.inf)
    return times


def _as_finding(run: RunRecord, record: ScenarioRecord) -> Finding:
    """Return what one guarded run came to."""
    decisive = [f for f in record.findings if f.verdict is record.verdict is not Verdict.HELD] or [
        f for f in record.findings if f.verdict is not Verdict.HELD
    ]
    because = "; ".join(f"{f.claim}: {f.because}" for f in decisive[:2]) or f"noticed at {record.layer}"
    return Finding(
        claim=record.name, verdict=record.verdict, because=because, evidence=(f"{run.name}/{record.directory.name}",)
    )


def merged(first: Mapping[str, Expectation], second: Mapping[str, Expectation]) -> dict[str, Expectation]:
    """Return the starts of both; the same run counts once."""
    both = dict(first)
    for name, more in second.items():
        for start in more.starts(name):
            both[name] = both.get(name, NOTHING_RECORDED).with_start(start)
    return both


def build_of(run: Path) -> str:
    """Return which engine build a stored run was made with."""
    return str(json.loads((run / "run.json").read_text(encoding="utf-8")).get("engine_build", ""))


def answer_of(comparison: Path) -> str:
    """Return what a comparison came to; empty while it has come to nothing."""
    path = comparison / "verdict.json"
    return str(json.loads(path.read_text(encoding="utf-8")).get("answer", "")) if path.is_file() else ""
