"""The guarded scenarios of one side: from finished runs, and from a run of its own for what is missing in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from harness.clock import now_ns
from harness.errors import EnvironmentMissing, HarnessError
from harness.judge.verdict import Verdict
from harness.qualify.evidence import build_of, each_once, runs_in
from harness.qualify.gathering import Gathering
from harness.qualify.reuse import as_asked
from harness.recording import time_left
from harness.report.reports import write_reports
from harness.report.store import RunRecord
from harness.run import Run
from harness.scenario import Mode, Scenario
from harness.settings import Settings


def guarded_runs(
    gathering: Gathering, arm: str, given: Sequence[Path], *, part: str, is_needed: bool
) -> list[RunRecord]:
    """Return the finished runs of a side, after running what is missing in them."""
    named = (*gathering.sides[arm].runs, *given)
    runs = _loaded(gathering, arm, named)
    due = _due(gathering, runs) if is_needed and not named else []
    if due and gathering.can_start(arm, part, [scenario.name for scenario in due]):
        gathering.builds.pop(arm, None)
        runs = _loaded(gathering, arm, named)  # which build it is now, is known
        due = _due(gathering, runs)
        gathering.tell(f"{len(due)} guarded {'scenario' if len(due) == 1 else 'scenarios'} on the {arm}")
        directory = _carry_out(gathering, arm, due, part)
        runs += [] if directory is None else [gathering.load(directory, arm)]
    return runs


def _loaded(gathering: Gathering, arm: str, named: Sequence[Path]) -> list[RunRecord]:
    """Return the runs of a side that were given, and what earlier calls made here that is about what is asked now."""
    place, settings = gathering.request.out / arm, gathering.sides[arm].settings
    if arm not in gathering.asked and len({build_of(path) for path in runs_in(place)}) > 1:
        gathering.ask(arm)  # one of them is not what it is now
    own = [path for path in runs_in(place) if not gathering.why_of_another(path, arm)]
    loaded = [gathering.load(path, arm) for path in each_once((*named, *own))]
    runs = list({run.name: run for run in reversed(loaded)}.values())[::-1]  # a copy is the same run
    if settings is None:
        return runs
    mine = {path.resolve() for path in own}
    return [_as_asked(gathering, run, settings) if run.directory.resolve() in mine else run for run in runs]


def _as_asked(gathering: Gathering, run: RunRecord, settings: Settings) -> RunRecord:
    """Return a run of an earlier call without what is declared otherwise now, which is noted."""
    kept, changed = as_asked(run, gathering.scenarios, settings)
    if changed:
        gathering.note(f"{', '.join(changed)} of run {run.name} does not count: it was declared otherwise then")
    return kept


def _due(gathering: Gathering, runs: Sequence[RunRecord]) -> list[Scenario]:
    """Return each scenario as often as it has still to be run: one that could not tell is due again."""
    judged = [
        record.name
        for run in runs
        for record in run.scenarios
        if record.mode == Mode.GUARDED and record.verdict is not Verdict.UNKNOWN
    ]
    repeat = gathering.request.repeat
    return [scenario for scenario in gathering.scenarios for _ in range(repeat - judged.count(scenario.name))]


def _carry_out(gathering: Gathering, arm: str, due: Sequence[Scenario], part: str) -> Path | None:
    """Run guarded scenarios and return the directory of the run; None where there can be none."""
    side, tell = gathering.sides[arm], gathering.tell
    settings = replace(side.started_with(), results=gathering.request.out / arm)
    try:
        with Run(settings, progress=tell, expectations=side.expectations, starter=side.starter) as run:
            begun_ns = now_ns()
            for position, scenario in enumerate(due):
                left = time_left(begun_ns, position, len(due))
                tell(f"scenario {position + 1} of {len(due)}: {scenario.name}{left}")
                try:
                    run.scenario(scenario, Mode.GUARDED)
                except HarnessError as error:
                    gathering.why[part][scenario.name] = str(error)
                    tell(f"{scenario.name}: {error}")
    except EnvironmentMissing as error:
        gathering.cannot(arm, part, [scenario.name for scenario in due], str(error))
        return None
    write_reports(run.directory)
    return run.directory
