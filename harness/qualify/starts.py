"""At which layers each side notices each fault: recorded starts, and starts of the candidate where they are missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from harness.errors import EnvironmentMissing
from harness.judge.expectations import NOTHING_RECORDED, Expectation, expectations_path, load_expectations
from harness.judge.qualification import DETECTION
from harness.qualify.evidence import each_once, merged
from harness.qualify.gathering import BASELINE, CANDIDATE, Gathering
from harness.qualify.side import recorded_in
from harness.recording import acceptable_starts, measure_starts, why_not_acceptable
from harness.report.store import RunRecord
from harness.scenario import Mode


def starts_of_candidate(
    gathering: Gathering, runs: Sequence[RunRecord], *, is_needed: bool
) -> Mapping[str, Expectation]:
    """Return at which layers the candidate noticed each fault, after making the starts that are missing."""
    request, side, sources = gathering.request, gathering.request.candidate, gathering.sources[DETECTION]
    known: dict[str, Expectation] = dict(side.recorded)
    if side.recorded:
        sources.append(f"recorded starts of {side.given}")
    for path in each_once(request.matrix_runs):
        sources.append(str(path))
        if path.is_dir():
            known = _with_starts_of(gathering, gathering.load(path, CANDIDATE), known)
        else:
            known = merged(known, recorded_in(path))
            gathering.name(CANDIDATE, path.stem)
    for run in runs:
        known = _with_starts_of(gathering, run, known)
    label, place = gathering.labels[CANDIDATE], request.out / "starts"
    if label is not None:
        known = merged(known, load_expectations(place, label))
    names = [scenario.name for scenario in gathering.scenarios if scenario.name in gathering.noticed]
    lacking = [name for name in names if len(known.get(name, NOTHING_RECORDED).layers) < request.starts]
    if request.matrix_runs or not is_needed or not lacking:
        return known
    return _measured(gathering, lacking, known, place) if gathering.can_start(CANDIDATE, DETECTION, lacking) else known


def starts_of_baseline(gathering: Gathering, runs: Sequence[RunRecord]) -> Mapping[str, Expectation]:
    """Return at which layers the baseline was seen to notice each fault; none of its starts are made."""
    side = gathering.request.baseline
    recorded = dict(side.recorded)
    if gathering.labels[BASELINE] is None and side.settings is not None:
        why = gathering.ask(BASELINE)
        if why:
            gathering.note(f"the baseline cannot be asked who it is: {why}")
    label = gathering.labels[BASELINE]
    if label is not None:
        recorded = merged(recorded, load_expectations(side.expectations, label))
    if recorded:
        gathering.sources[DETECTION].append(f"recorded starts of {gathering.label(BASELINE)}")
    for run in runs:
        recorded = _with_starts_of(gathering, run, recorded)
    return recorded


def _measured(
    gathering: Gathering, lacking: Sequence[str], known: dict[str, Expectation], place: Path
) -> dict[str, Expectation]:
    """Add the starts that are made now."""
    request, side = gathering.request, gathering.request.candidate
    try:
        measured = measure_starts(
            request.scenarios,
            replace(side.started_with(), results=place),
            place,
            starts=request.starts,
            select="",
            names=lacking,
            tell=gathering.tell,
            starter=side.starter,
        )
    except EnvironmentMissing as error:
        gathering.cannot(CANDIDATE, DETECTION, lacking, str(error))
        return known
    gathering.name(CANDIDATE, measured.label)
    gathering.why[DETECTION].update(measured.failed)
    gathering.why[DETECTION].update(measured.skipped)
    gathering.sources[DETECTION].append(str(expectations_path(place, measured.label)))
    return merged(known, load_expectations(place, measured.label))


def _with_starts_of(gathering: Gathering, run: RunRecord, known: Mapping[str, Expectation]) -> dict[str, Expectation]:
    """Add what the unguarded scenarios and bare starts of a run saw; one that proves nothing is noted and left out."""
    usable = []
    for record in run.scenarios:
        why = why_not_acceptable(record) if record.mode != Mode.GUARDED else ""
        if why:
            gathering.why[DETECTION][record.name] = f"its start in {run.name} proves nothing: {why}"
        else:
            usable.append(record)
    added = dict(known)
    for start in acceptable_starts(replace(run, scenarios=tuple(usable))):
        before = added.get(start.scenario, NOTHING_RECORDED)
        added[start.scenario] = before.with_start(start)
    return added
