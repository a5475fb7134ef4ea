"""Records at which layer an engine release notices each fault: from stored runs, or by bare starts without load."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.clock import now_ns, seconds_between
from harness.engine.engine import EngineIdentity, EngineStarter
from harness.errors import EnvironmentMissing, HarnessError, UsageError
from harness.judge.detection import detection
from harness.judge.expectations import (
    NOTHING_RECORDED,
    Start,
    change,
    load_expectations,
    record_starts,
    why_uncertain,
)
from harness.judge.findings import as_findings
from harness.judge.matrix import Release, as_markdown, left_out, load_releases
from harness.judge.reproduce import MAKERS, Declared
from harness.judge.starts import NOTHING_SPENT, Cost, start_of
from harness.judge.verdict import Verdict
from harness.observe.history import load_history
from harness.report.pages import write_page
from harness.report.store import RunRecord, ScenarioRecord, load_run
from harness.requirements import require_for_faults
from harness.run import Run
from harness.scenario import Scenario
from harness.settings import Settings
from harness.suite import collect, collect_by_file

Tell = Callable[[str], None]
REPLACES = ("model", "old", "new", "engine_arguments")  # settings that replace what scenarios declare
START_MODE = "start-"  # how a start without load is stored: "start-1"


def accept_runs(
    runs: Sequence[Path],
    into: Path,
    tell: Tell,
    *,
    reason: str,
    select: str = "",
    label: str | None = None,
    dry_run: bool = False,
) -> int:
    """Record what the unguarded scenarios of stored runs saw, with why it is accepted; return how many starts are new.

    What would change is told first. Either everything that `select` names is recorded, or nothing is.
    Raises: UsageError without a reason, for a run that is not complete, not of the engine `label` or of another one than
    the others, or of other checkpoints or launch lines than scenarios declare, or a scenario in it that proves nothing.
    """
    if not reason.strip():
        raise UsageError("accepting needs a reason: why is this how the release behaves? Nothing was recorded")
    starts: list[Start] = []
    for directory in runs:
        run = load_run(directory)
        label = run.engine_label if label is None else label
        if run.engine_label != label:
            raise UsageError(f'"{directory}" is a run on {run.engine_label}, expected {label}: nothing was recorded')
        if not run.is_complete:
            raise UsageError(f'"{directory}" did not come to its end: nothing was recorded')
        if replaced := [name for name in REPLACES if run.settings.get(name)]:
            raise UsageError(
                f'"{directory}" was run with {", ".join(replaced)}, not as scenarios are declared: nothing was recorded'
            )
        starts += acceptable_starts(run, select=select)
    if label is None or not starts:
        raise UsageError("no unguarded scenario with proved faults is in these runs: nothing was recorded")
    known, new = dict(load_expectations(into, label)), 0
    for start in starts:
        tell(f"{label}: {change(start, known)}")
        before = known.get(start.scenario, NOTHING_RECORDED)
        after = before.with_start(start, reason=reason)
        known[start.scenario] = after
        new += len(after.runs) - len(before.runs)
    if new and not dry_run:
        record_starts(into, label, starts, reason=reason.strip())
    return new


def acceptable_starts(run: RunRecord, *, select: str = "") -> list[Start]:
    """Return what each unguarded scenario of a run saw, and each start without load.

    Raises: UsageError naming a scenario that proves nothing: a fault or precondition not proved, or a doubtful sign.
    """
    starts = []
    for record in run.scenarios:
        if select not in record.name or not (record.mode == "unguarded" or record.mode.startswith(START_MODE)):
            continue
        place = record.directory.name
        why = why_not_acceptable(record)
        if why:
            raise UsageError(f'"{place}" of "{run.name}" cannot be accepted: {why}: nothing was recorded')
        # The place tells starts of one scenario in one run apart; a lone unguarded run has always gone by the run's name.
        name = run.name if place == f"{record.name}-unguarded" else f"{run.name}/{place}"
        starts.append(start_of(record.name, name, record.history))
    return starts


def why_not_acceptable(record: ScenarioRecord) -> str:
    """Return why a scenario's layer proves nothing about its engine; empty when it does."""
    # A start without load cannot say how the service was before the fault: its faults and its signs are what counts.
    needed = [
        finding
        for finding in record.findings
        if finding.is_precondition and (record.mode == "unguarded" or finding.claim.startswith("faults_proved("))
    ]
    failed = [finding for finding in needed if finding.verdict is not Verdict.HELD]
    if failed or not needed:
        return failed[0].because if failed else "nothing was claimed of it"
    seen = detection(record.history)
    return f"{seen.because}; but {seen.doubt}" if seen.doubt else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a round of starts came to."""

    label: str  # of the engine
    made: int
    failed: tuple[tuple[str, str], ...]  # scenario, and why nothing is recorded of one start of it
    skipped: tuple[tuple[str, str], ...] = ()  # scenario, and what is missing here for a start of it
    there: int = 0  # starts of these scenarios that were recorded before
    cost: Cost = NOTHING_SPENT

    @property
    def is_nothing(self) -> bool:
        """Say whether nothing is known of these scenarios, before and after."""
        return not self.made and not self.there

    def summary(self) -> str:
        """Say how many starts were made, and what they took."""
        told = f"{self.made} starts recorded, {len(self.failed)} failed, {len(self.skipped)} skipped"
        return f"{told}; {self.cost.sentence()}" if self.made else told

    def sentences(self) -> tuple[str, ...]:
        """Return a sentence per start of which nothing is recorded."""
        return tuple(f"{scenario}: {because}" for scenario, because in self.failed)


def measure_starts(
    paths: Sequence[Path],
    settings: Settings,
    into: Path,
    *,
    starts: int,
    select: str,
    tell: Tell,
    names: Sequence[str] | None = None,
    starter: EngineStarter | None = None,
) -> Measured:
    """Start an engine on every faulty checkpoint until `starts` starts of each are recorded in `into`.

    Starts that are recorded there already are not made again, so an interrupted round goes on where it was. Engines come
    from `starter`, or from what the settings name.
    Raises: UsageError when there are no scenarios at the paths.
    """
    scenarios = [each for each in collect(paths, select=select) if names is None or each.name in names]
    if not scenarios:
        raise UsageError(f'no scenario whose name holds "{select}" at {", ".join(str(path) for path in paths)}')
    made, failed, skipped = 0, [], []
    with Run(settings, progress=tell, expectations=into, starter=starter) as run:
        label = run.identity.label
        known = load_expectations(into, label)
        if known and (why := why_uncertain(label)):
            tell(f"{why}, and are not made again")
        due = [
            (scenario, number)
            for scenario in scenarios
            for number in range(1, starts + 1 - len(known.get(scenario.name, NOTHING_RECORDED).layers))
        ]
        begun_ns, costs = now_ns(), []
        for position, (scenario, number) in enumerate(due):
            tell(f"start {position + 1} of {len(due)}: {scenario.name}{time_left(begun_ns, position, len(due))}")
            start_ns = now_ns()
            try:
                seen, place = run.start_only(scenario, number)
            except EnvironmentMissing as missing:  # no start was made, and none can be made here
                tell(f"{scenario.name}: skipped: {missing}")
                skipped.append((scenario.name, str(missing)))
                continue
            except HarnessError as error:
                failed.append((scenario.name, str(error)))
                continue
            name = f"{run.directory.name}/{place.name}"
            history = load_history(place / "history.jsonl")
            costs.append(Cost.of(history, took_s=seconds_between(start_ns, now_ns())))
            start = start_of(scenario.name, name, history, seen=seen)
            record_starts(into, label, [start])
            tell(f"{scenario.name}: {seen.layer}{start.figures()}: {seen.because}")
            made += 1
        cost = replace(Cost.sum_of(costs), golden_starts=run.golden_starts)
    there = sum(len(known.get(scenario.name, NOTHING_RECORDED).layers) for scenario in scenarios)
    return Measured(label=label, made=made, failed=tuple(failed), skipped=tuple(skipped), there=there, cost=cost)


def time_left(begun_ns: int, done: int, count: int) -> str:
    """Say how long the rest will take if it goes on as it went; nothing before there is anything to go by."""
    if not done:
        return ""
    left_s = seconds_between(begun_ns, now_ns()) / done * (count - done)
    return f" (about {left_s / 60:.0f} min left)" if left_s >= 90 else f" (about {left_s:.0f} s left)"


def write_matrix(paths: Sequence[Path], expectations: Path, engine: str, page: Path, findings: Path) -> int:
    """Write which release of an engine notices which fault, and what to tell its maintainers; return how many are shown.

    Raises: HarnessError when nothing was recorded of this engine, or a page cannot be written; UsageError when there are no scenarios at the paths.
    """
    by_file = collect_by_file(paths)
    families = {
        re.sub(r"^test_|_on_restart$", "", file.stem): [scenario.name for scenario in scenarios]
        for file, scenarios in by_file.items()
    }
    if not families:
        raise UsageError(f"no scenarios at {', '.join(str(path) for path in paths)}")
    releases = load_releases(expectations, engine)
    every = [scenario for scenarios in by_file.values() for scenario in scenarios]
    shown = as_markdown(
        releases, families, lacking=_lacking(every, releases[-1]), left_out=left_out(expectations, engine)
    )
    write_page(page, shown)
    declared = {
        scenario.name: declared_of(scenario, file) for file, scenarios in by_file.items() for scenario in scenarios
    }
    write_page(findings, as_findings(releases, declared))
    return len(releases)


def _lacking(scenarios: Sequence[Scenario], release: Release) -> dict[str, str]:
    """Return the scenarios that cannot strike a release in a container on this machine, with the resource that is missing."""
    kind = "reference" if release.name == "reference" else "container"
    identity = EngineIdentity(kind=kind, name=release.name, version=release.version, build="", hardware="")
    lacking = {}
    for scenario in scenarios:
        try:
            require_for_faults(scenario, identity)
        except EnvironmentMissing as missing:
            lacking[scenario.name] = missing.resource
    return lacking


def declared_of(scenario: Scenario, file: Path) -> Declared:
    """Return what it takes to do by hand what a scenario does."""
    made = rf"({'|'.join(MAKERS)})-llama-seed\d+-[0-9a-f]+"
    kinds = [known[1] if (known := re.fullmatch(made, each.name)) else "" for each in (scenario.old, scenario.new)]
    return Declared(
        name=scenario.name,
        file=str(file),
        faults=tuple((fault.name, dict(fault.parameters())) for fault in scenario.faults),
        how=str(scenario.rollout.how),
        kind=kinds[1] or "tiny",
        old=dict(scenario.old.parameters) if kinds[0] and kinds[0] == (kinds[1] or "tiny") else {},
        new=dict(scenario.new.parameters) if kinds[1] else {},
    )
