"""At which layers each side notices each fault: recorded starts, and starts of the candidate where they are missing."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from harness.clock import wall_time
from harness.errors import EnvironmentMissing, HarnessError
from harness.judge.expectations import (
    NOTHING_RECORDED,
    Expectation,
    expectations_path,
    load_expectations,
    record_starts,
    why_uncertain,
)
from harness.judge.qualification import DETECTION, STARTS_MIN
from harness.qualify.evidence import each_once, merged
from harness.qualify.gathering import BASELINE, CANDIDATE, Gathering
from harness.qualify.reuse import as_declared
from harness.qualify.side import recorded_in
from harness.recording import Measured, acceptable_starts, measure_starts, why_not_acceptable
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
    lacking = _lacking(gathering, merged(known, _own_starts(gathering, CANDIDATE)), request.starts)
    may_start = not request.matrix_runs and is_needed and lacking
    if may_start and gathering.can_start(CANDIDATE, DETECTION, lacking):
        # Which build it is now, is known: what was made here of another one is lacking too.
        lacking = _lacking(gathering, merged(known, _own_starts(gathering, CANDIDATE)), request.starts)
        try:
            measured = _measure(gathering, CANDIDATE, lacking, request.starts)
        except EnvironmentMissing as error:
            gathering.cannot(CANDIDATE, DETECTION, lacking, str(error))
        else:
            gathering.why[DETECTION].update(measured.failed)
            gathering.why[DETECTION].update(measured.skipped)
    return _with_own_starts(gathering, CANDIDATE, known)


def starts_of_baseline(
    gathering: Gathering, runs: Sequence[RunRecord], *, is_needed: bool
) -> Mapping[str, Expectation]:
    """Return at which layers the baseline was seen to notice each fault; its starts are made only where that was asked for."""
    side = gathering.request.baseline
    recorded = dict(side.recorded)
    if gathering.labels[BASELINE] is None:
        why = gathering.ask(BASELINE)
        if why:
            gathering.note(f"the baseline cannot be asked who it is: {why}")
    label = gathering.labels[BASELINE]
    if label is not None and (accepted := load_expectations(side.expectations, label)):
        recorded = merged(recorded, accepted)
        if why := why_uncertain(label):
            gathering.note(why)
    if recorded:
        gathering.sources[DETECTION].append(f"recorded starts of {gathering.label(BASELINE)}")
    for run in runs:
        recorded = _with_starts_of(gathering, run, recorded)
    if _may_start_baseline(gathering, recorded, is_needed=is_needed):
        lacking = _lacking(gathering, merged(recorded, _own_starts(gathering, BASELINE)), STARTS_MIN)
        gathering.tell(f"the baseline is started on {len(lacking)} faults")
        try:
            measured = _measure(gathering, BASELINE, lacking, STARTS_MIN)
        except HarnessError as error:
            gathering.note(f"the baseline cannot be started for detection: {error}")
        else:
            for name, because in (*measured.failed, *measured.skipped):
                gathering.note(f"a start of the baseline on {name} is not recorded: {because}")
    return _with_own_starts(gathering, BASELINE, recorded)


def _may_start_baseline(gathering: Gathering, recorded: Mapping[str, Expectation], *, is_needed: bool) -> bool:
    """Say whether the baseline lacks starts and can be started, and note what keeps it from that.

    It has said then which build it is, so that starts of another one that were made here do not count.
    """
    side = gathering.request.baseline
    lacking = _lacking(gathering, merged(recorded, _own_starts(gathering, BASELINE)), STARTS_MIN)
    if not is_needed or not lacking:
        return False
    if why := side.why_not_started or ("" if gathering.request.may_run else "nothing may be run"):
        if gathering.request.start_baseline:
            gathering.note(f"--start-baseline makes no start: {why}")
        return False
    if not gathering.request.start_baseline:
        gathering.note(
            f"fewer than {STARTS_MIN} starts of the baseline are recorded of {len(lacking)} of the scenarios: "
            "--start-baseline makes them here"
        )
        return False
    if BASELINE not in gathering.asked and (why := gathering.ask(BASELINE)):
        gathering.note(f"the baseline cannot be started for detection: {why}")
        return False
    return True


def _lacking(gathering: Gathering, known: Mapping[str, Expectation], starts: int) -> list[str]:
    """Return the scenarios that may be run and have fewer starts than that."""
    names = [scenario.name for scenario in gathering.scenarios if scenario.name in gathering.noticed]
    return [name for name in names if len(known.get(name, NOTHING_RECORDED).layers) < starts]


def _place(gathering: Gathering, arm: str) -> Path:
    """Return where starts of a side that are made here are kept: apart, since both may go by the same label."""
    return gathering.request.out / ("starts" if arm == CANDIDATE else "baseline-starts")


def _with_own_starts(gathering: Gathering, arm: str, known: Mapping[str, Expectation]) -> dict[str, Expectation]:
    """Add the starts that were made here, now or by an earlier call."""
    made = _own_starts(gathering, arm)
    if made and (label := gathering.labels[arm]) is not None:
        gathering.sources[DETECTION].append(str(expectations_path(_place(gathering, arm), label)))
    return merged(known, made)


def _own_starts(gathering: Gathering, arm: str) -> dict[str, Expectation]:
    """Return the starts that were made here and are about what is asked now."""
    label, place = gathering.labels[arm], _place(gathering, arm)
    made = {} if label is None else load_expectations(place, label)
    kept: dict[str, Expectation] = {}
    for name, expectation in made.items():
        for start in expectation.starts(name):
            run = place / start.run.partition("/")[0]
            if not run.is_dir() or not gathering.why_of_another(run, arm, as_declared):
                kept[name] = kept.get(name, NOTHING_RECORDED).with_start(start)
    return kept


def _set_aside(gathering: Gathering, arm: str) -> None:
    """Put away the file of starts that were made here where some of them are not about what is asked now."""
    label, place = gathering.labels[arm], _place(gathering, arm)
    made, kept = {} if label is None else load_expectations(place, label), _own_starts(gathering, arm)
    if label is None or {name: each.runs for name, each in kept.items()} == {n: each.runs for n, each in made.items()}:
        return
    file = expectations_path(place, label)
    shutil.copy2(file, file.with_name(f"{file.name}.{wall_time().replace(':', '')}"))
    with tempfile.TemporaryDirectory(dir=place) as scratch:  # the file is there at any time, whole
        written = expectations_path(Path(scratch), label)
        written.touch()
        record_starts(Path(scratch), label, [start for name, each in kept.items() for start in each.starts(name)])
        written.replace(file)


def _measure(gathering: Gathering, arm: str, lacking: Sequence[str], starts: int) -> Measured:
    """Make the starts that are missing, on what scenarios declare: recorded starts are of nothing else.

    Raises: EnvironmentMissing when no engine of this side can be started here.
    """
    request, side, place = gathering.request, gathering.sides[arm], _place(gathering, arm)
    settings = side.started_with()
    if settings.replaced:
        gathering.note(
            f"detection is of checkpoints and launch lines as scenarios declare them, as recorded starts are: "
            f"{', '.join(settings.replaced)} say nothing about it"
        )
    _set_aside(gathering, arm)
    measured = measure_starts(
        request.scenarios,
        replace(as_declared(settings), results=place),
        place,
        starts=starts,
        select="",
        names=lacking,
        tell=gathering.tell,
        starter=side.starter,
    )
    gathering.name(arm, measured.label)
    return measured


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
