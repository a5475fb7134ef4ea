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
# Settings of a run that recoveries take longer or shorter for.
TIMED_BY = ("model", "old", "new", "max_model_len", "engine_arguments", "gpus", "memory_gib", "rate_rps")


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


def unlike_in(runs: Sequence[RunRecord]) -> str:
    """Say what runs, of both sides, differ in that recoveries take longer or shorter for; empty when they are alike.

    What a run does not say is not known to differ.
    """
    for name in TIMED_BY:
        seen = {json.dumps(run.settings[name]) for run in runs if name in run.settings}
        if len(seen) > 1:
            return f"runs of the two sides differ in {name}: {', '.join(sorted(seen))}"
    seen = {str(run.machine["processor"]) for run in runs if run.machine.get("processor")}
    machines = '" and on "'.join(sorted(seen))
    return f'runs of the two sides were made on "{machines}"' if len(seen) > 1 else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryTimes:
    """How long recoveries took, in seconds, by scenario and mode."""

    seen: Mapping[str, Sequence[float]]  # one that never came is infinite
    beyond: Mapping[str, Sequence[float]]  # not watched to their end: longer than this

    def note(self, arm: str) -> str:
        """Say which recoveries of a side were not watched to their end; empty when all were."""
        if not self.beyond:
            return ""
        cases = ", ".join(f"{name}: {_longer_than(watched_s)}" for name, watched_s in sorted(self.beyond.items()))
        count = sum(map(len, self.beyond.values()))
        are = "recovery was" if count == 1 else "recoveries were"
        return (
            f"{count} {are} not watched to the end on the {arm} ({cases}): the answer must be the same "
            "wherever they ended, between that and never"
        )


def recovery_times(runs: Sequence[RunRecord], names: Sequence[str]) -> RecoveryTimes:
    """Return how long each recovery of these scenarios took, by name and mode.

    Only scenarios whose preconditions held count: what was not injected was not recovered from. One of which it is not known
    when it ended counts as longer than it was watched for: left out, it would make its side look faster.
    """
    seen: dict[str, list[float]] = {}
    beyond: dict[str, list[float]] = {}
    for run in runs:
        for record in run.scenarios:
            claimed = [finding for finding in record.findings if finding.claim.startswith("recovered(")]
            failed = any(f.is_precondition and f.verdict is not Verdict.HELD for f in record.findings)
            if record.name not in names or failed or not claimed:
                continue
            name, took_s = f"{record.name} [{record.mode}]", record.measured.get("recovered_after_s")
            if isinstance(took_s, int | float):
                seen.setdefault(name, []).append(float(took_s))
            elif claimed[0].verdict is Verdict.BROKEN:
                seen.setdefault(name, []).append(math.inf)
            else:
                watched_s = record.measured.get("recovery_watched_s")
                beyond.setdefault(name, []).append(float(watched_s) if isinstance(watched_s, int | float) else 0.0)
    return RecoveryTimes(seen=seen, beyond=beyond)


def _longer_than(watched_s: Sequence[float]) -> str:
    return "longer than " + " and ".join(f"{each:g} s" for each in sorted(watched_s))


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
