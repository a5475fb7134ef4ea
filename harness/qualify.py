"""Gathers what a qualification is judged from: what finished runs hold, and runs of its own for what is missing.

results/qualifications/<candidate>-over-<baseline>/
    qualification.json, qualification.html    the verdict
    candidate/, baseline/                     runs of the guarded scenarios
    starts/                                   the matrix of the candidate: a file as in scenarios/expectations, and its runs
    comparison/                               paired blocks of load

Called again, it goes on where it was: whatever is there is not run again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from harness.clock import now_ns
from harness.errors import EnvironmentMissing, HarnessError, UsageError
from harness.judge.blocks import is_comparison, load_declaration
from harness.judge.comparison import judge_run
from harness.judge.expectations import NOTHING_RECORDED, Expectation, expectations_path, load_expectations
from harness.judge.paired import Slower
from harness.judge.qualification import (
    DETECTION,
    LATENCY,
    PARTS,
    RECOVERY,
    SCENARIOS,
    Qualification,
    judge_detection,
    judge_latency,
    judge_recovery,
    judge_scenarios,
)
from harness.judge.together import judge_together
from harness.judge.verdict import Finding, Verdict
from harness.qualify_evidence import (
    Known,
    answer_of,
    build_of,
    each_once,
    guarded,
    merged,
    recovery_times,
    runs_in,
    why_not_about,
)
from harness.qualify_side import Request, recorded_in
from harness.recording import Tell, acceptable_starts, collect, measure_starts, time_left, why_not_acceptable
from harness.report.reports import write_reports
from harness.report.store import RunRecord, load_run
from harness.run import Run
from harness.scenario import Mode, Scenario

__all__ = ["Request", "qualify"]

CANDIDATE, BASELINE, COMPARISON = "candidate", "baseline", "comparison"


def qualify(request: Request, tell: Tell) -> Qualification:
    """Gather, run what is missing where that is allowed and possible, and judge.

    Raises: UsageError when there are no scenarios, or a run that was given is of another engine than the side it is for.
    """
    scenarios = collect(request.scenarios, select=request.select)
    if not scenarios:
        raise UsageError(f'no scenario whose name holds "{request.select}" at {", ".join(map(str, request.scenarios))}')
    return _Gathering(request, scenarios, tell).carry_out()


class _Gathering:
    """One qualification while it is gathered."""

    def __init__(self, request: Request, scenarios: Sequence[Scenario], tell: Tell) -> None:
        self._request = request
        self._scenarios = scenarios
        self._names = tuple(scenario.name for scenario in scenarios)
        self._tell = tell
        self._sides = {CANDIDATE: request.candidate, BASELINE: request.baseline}
        self._labels = {arm: side.label for arm, side in self._sides.items()}
        self._builds: dict[str, str] = {}  # of the runs of each side
        self._asked: dict[str, str] = {}  # the build that a side said it is
        self._sources: dict[str, list[str]] = {part: [] for part in PARTS}
        # Of each part: why there is nothing of a scenario, of an arm, or of the comparison.
        self._why: dict[str, dict[str, str]] = {part: {} for part in PARTS}
        self._notes: list[str] = []

    def carry_out(self) -> Qualification:
        """Gather what the four parts are judged from, and judge them."""
        request, why = self._request, self._why
        is_required = {part: part in request.required for part in PARTS}
        needs_runs = is_required[SCENARIOS] or is_required[RECOVERY]
        new = self._runs(CANDIDATE, request.scenarios_runs, part=SCENARIOS, is_needed=needs_runs)
        old = self._runs(BASELINE, request.baseline_runs, part=RECOVERY, is_needed=is_required[RECOVERY])
        starts = self._starts(new, is_needed=is_required[DETECTION])
        comparison = self._comparison(is_needed=is_required[LATENCY])
        self._sources[SCENARIOS] += [run.name for run in new]
        self._sources[RECOVERY] += [run.name for run in (*old, *new)]
        parts = (
            judge_scenarios(
                self._names,
                guarded(new),
                why[SCENARIOS],
                repeat=request.repeat,
                is_required=is_required[SCENARIOS],
            ),
            judge_detection(
                self._names,
                self._recorded_of_baseline(old),
                starts,
                why[DETECTION],
                starts=request.starts,
                is_required=is_required[DETECTION],
            ),
            judge_recovery(
                recovery_times(old, self._names),
                recovery_times(new, self._names),
                why[RECOVERY],
                is_required=is_required[RECOVERY],
            ),
            judge_latency(comparison, why[LATENCY].get(COMPARISON, ""), is_required=is_required[LATENCY]),
        )
        return Qualification(
            candidate=self._labels[CANDIDATE] or request.candidate.given,
            baseline=self._labels[BASELINE] or request.baseline.given,
            parts=parts,
            sources={part: tuple(dict.fromkeys(names)) for part, names in self._sources.items()},
            notes=tuple(self._notes),
        )

    # --- the guarded scenarios of one side ---

    def _runs(self, arm: str, given: Sequence[Path], *, part: str, is_needed: bool) -> list[RunRecord]:
        """Return the finished runs of a side, after running what is missing in them."""
        place = self._request.out / arm
        named = (*self._sides[arm].runs, *given)
        loaded = [self._loaded(path, arm) for path in each_once((*named, *runs_in(place)))]
        runs = list({run.name: run for run in reversed(loaded)}.values())[::-1]  # a copy is the same run
        due = self._due(runs) if is_needed and not named else []
        if due and self._can_start(arm, part, [scenario.name for scenario in due]):
            self._tell(f"{len(due)} guarded scenarios on the {arm}")
            directory = self._carry_out_scenarios(arm, due, part)
            runs += [] if directory is None else [self._loaded(directory, arm)]
        return runs

    def _due(self, runs: Sequence[RunRecord]) -> list[Scenario]:
        """Return each scenario as often as it has still to be run: one that could not tell is due again."""
        judged = [
            record.name
            for run in runs
            for record in run.scenarios
            if record.mode == Mode.GUARDED and record.verdict is not Verdict.UNKNOWN
        ]
        repeat = self._request.repeat
        return [scenario for scenario in self._scenarios for _ in range(repeat - judged.count(scenario.name))]

    def _carry_out_scenarios(self, arm: str, due: Sequence[Scenario], part: str) -> Path | None:
        side = self._sides[arm]
        settings = replace(side.started_with(), results=self._request.out / arm)
        try:
            with Run(settings, progress=self._tell, expectations=side.expectations, starter=side.starter) as run:
                begun_ns = now_ns()
                for position, scenario in enumerate(due):
                    left = time_left(begun_ns, position, len(due))
                    self._tell(f"scenario {position + 1} of {len(due)}: {scenario.name}{left}")
                    try:
                        run.scenario(scenario, Mode.GUARDED)
                    except HarnessError as error:
                        self._why[part][scenario.name] = str(error)
                        self._tell(f"{scenario.name}: {error}")
        except EnvironmentMissing as error:
            self._note_why(part, arm, [scenario.name for scenario in due], str(error))
            return None
        write_reports(run.directory)
        return run.directory

    # --- the matrix ---

    def _starts(self, runs: Sequence[RunRecord], *, is_needed: bool) -> Mapping[str, Expectation]:
        """Return at which layers the candidate noticed each fault, after making the starts that are missing."""
        request, side = self._request, self._sides[CANDIDATE]
        known: dict[str, Expectation] = dict(side.recorded)
        if side.recorded:
            self._sources[DETECTION].append(f"recorded starts of {side.given}")
        for path in each_once(request.matrix_runs):
            self._sources[DETECTION].append(str(path))
            if path.is_dir():
                known = self._with_starts_of(self._loaded(path, CANDIDATE), known)
            else:
                known = merged(known, recorded_in(path))
                self._name(CANDIDATE, path.stem)
        for run in runs:
            known = self._with_starts_of(run, known)
        label, place = self._labels[CANDIDATE], request.out / "starts"
        if label is not None:
            known = merged(known, load_expectations(place, label))
        lacking = [name for name in self._names if len(known.get(name, NOTHING_RECORDED).layers) < request.starts]
        if request.matrix_runs or not is_needed or not lacking:
            return known
        return self._measured(lacking, known, place) if self._can_start(CANDIDATE, DETECTION, lacking) else known

    def _measured(self, lacking: Sequence[str], known: dict[str, Expectation], place: Path) -> dict[str, Expectation]:
        """Add the starts that are made now."""
        request, side = self._request, self._sides[CANDIDATE]
        try:
            measured = measure_starts(
                request.scenarios,
                replace(side.started_with(), results=place),
                place,
                starts=request.starts,
                select=request.select,
                names=lacking,
                tell=self._tell,
                starter=side.starter,
            )
        except EnvironmentMissing as error:
            self._note_why(DETECTION, CANDIDATE, lacking, str(error))
            return known
        self._name(CANDIDATE, measured.label)
        self._why[DETECTION].update(measured.failed)
        self._sources[DETECTION].append(str(expectations_path(place, measured.label)))
        return merged(known, load_expectations(place, measured.label))

    def _with_starts_of(self, run: RunRecord, known: Mapping[str, Expectation]) -> dict[str, Expectation]:
        """Add what the unguarded scenarios and bare starts of a run saw; one that proves nothing is noted and left out."""
        usable = []
        for record in run.scenarios:
            why = why_not_acceptable(record) if record.mode != Mode.GUARDED else ""
            if why:
                self._why[DETECTION][record.name] = f"its start in {run.name} proves nothing: {why}"
            else:
                usable.append(record)
        added = dict(known)
        for start in acceptable_starts(replace(run, scenarios=tuple(usable))):
            before = added.get(start.scenario, NOTHING_RECORDED)
            added[start.scenario] = before.with_start(layer=start.layer, run=start.run, seen=start.seen)
        return added

    def _recorded_of_baseline(self, runs: Sequence[RunRecord]) -> Mapping[str, Expectation]:
        side, recorded = self._sides[BASELINE], dict(self._sides[BASELINE].recorded)
        if self._labels[BASELINE] is None and side.settings is not None:
            why = self._ask(BASELINE)
            if why:
                self._note(f"the baseline cannot be asked who it is: {why}")
        label = self._labels[BASELINE]
        if label is not None:
            recorded = merged(recorded, load_expectations(side.expectations, label))
        for run in runs:
            recorded = self._with_starts_of(run, recorded)
        return recorded

    # --- latency ---

    def _comparison(self, *, is_needed: bool) -> Finding | None:
        """Return the verdict of a comparison of the two sides, after running one where there is none."""
        path = self._request.comparison or self._finished_comparison()
        if path is None and is_needed:
            path = self._compared()
        if path is None:
            self._why[LATENCY].setdefault(COMPARISON, "none was given or run")
            return None
        unknown = self._why_unknown()
        if unknown:
            self._why[LATENCY][COMPARISON] = f'whether "{path}" is about these two cannot be said: {unknown}'
            return None
        why_not = self._why_not_about(path)
        if why_not and path == self._request.comparison:
            raise UsageError(f'"{path}" does not answer for latency: {why_not}')
        if why_not:
            self._why[LATENCY][COMPARISON] = f'"{path}" does not answer for latency: {why_not}'
            return None
        if not load_declaration(path).fresh:
            self._note(f'"{path}" started each side once: how starts differ is in its answer (harness compare --fresh)')
        self._sources[LATENCY].append(str(path))
        return judge_together([judge_run(path)])[0].finding()

    def _finished_comparison(self) -> Path | None:
        """Return the newest comparison of its own that answers what is asked; an invalid one is run again."""
        for path in reversed(runs_in(self._request.out / COMPARISON)):
            is_answer = answer_of(path) not in ("", Slower.INVALID) and load_declaration(path).fresh
            if is_answer and not self._why_unknown() and not self._why_not_about(path):
                return path
        return None

    def _why_not_about(self, path: Path) -> str:
        """Say why a comparison does not tell whether the candidate is slower than the baseline; empty when it does."""
        if not is_comparison(path):
            raise UsageError(f'"{path}" is not a comparison: harness compare makes one')
        known = {
            arm: Known(
                name=arm,
                label=self._labels[arm],
                builds=frozenset(build for builds in (self._builds, self._asked) if (build := builds.get(arm))),
            )
            for arm in (BASELINE, CANDIDATE)
        }
        declared = load_declaration(path)
        return why_not_about(declared, self._request.profile, baseline=known[BASELINE], candidate=known[CANDIDATE])

    def _compared(self) -> Path | None:
        """Run a comparison, both sides on the undamaged old checkpoint, and return its directory."""
        from harness.compare import Options, compare

        if not all(self._can_start(arm, LATENCY, [COMPARISON]) for arm in (BASELINE, CANDIDATE)):
            return None
        old, new = self._sides[BASELINE], self._sides[CANDIDATE]
        image, python = new.new_side(self._tell)
        if image is None and python is None:
            self._why[LATENCY][COMPARISON] = (
                f"the new side of a comparison is an image or an interpreter, and {new.given} is neither"
            )
            return None
        options = Options(profile=self._request.profile, same=True, fresh=True, new_image=image, new_python=python)
        settings = replace(old.started_with(), results=self._request.out / COMPARISON)
        try:
            directory, _ = compare(settings, options, progress=self._tell, starter=old.starter)
        except HarnessError as error:
            self._why[LATENCY][COMPARISON] = str(error)
            return None
        return directory

    # --- what the parts share ---

    def _can_start(self, arm: str, part: str, names: Sequence[str]) -> bool:
        """Say whether engines of a side can be started for a part; if not, note why its names are missing."""
        why = self._sides[arm].why_not_started
        if not self._request.may_run:
            why = f"no run of the {arm} was given, and nothing may be run"
        elif not why:
            why = self._ask(arm)
        if why:
            self._note_why(part, arm, names, why)
        return not why

    def _ask(self, arm: str) -> str:
        """Ask a side which engine it is; return why it cannot be asked, empty when it said."""
        try:
            identity = self._sides[arm].identity(self._tell)
        except HarnessError as error:  # nothing to start it with, or an image that cannot be built
            return str(error)
        self._name(arm, identity.label)
        self._asked[arm] = identity.build
        return ""

    def _why_unknown(self) -> str:
        """Say why it is not known which engine a side is, after asking it; empty when both are known."""
        for arm, side in self._sides.items():
            why = "" if self._labels[arm] is not None else side.why_not_started or self._ask(arm)
            if why:
                return f"the {arm} cannot be asked who it is: {why}"
        return ""

    def _note_why(self, part: str, arm: str, names: Sequence[str], why: str) -> None:
        for name in names:
            self._why[part].setdefault(name, why)
        self._why[RECOVERY].setdefault(arm, why)

    def _name(self, arm: str, label: str) -> None:
        """Note which engine a side turned out to be.

        Raises: UsageError when it is another one than was asked for, or than other runs of this side say.
        """
        known = self._labels[arm]
        if known is not None and known != label:
            raise UsageError(f'the {arm} "{self._sides[arm].given}" is {known}, and a run of it is on {label}')
        self._labels[arm] = label

    def _loaded(self, path: Path, arm: str) -> RunRecord:
        """Return a run of a side, judged anew.

        Raises: UsageError when it is no run, or of another engine or build than the rest of its side.
        """
        run = load_run(path)
        self._name(arm, run.engine_label)
        build = build_of(path)
        if self._builds.setdefault(arm, build) != build:
            raise UsageError(
                f'"{path}" is of build "{build}", other runs of the {arm} are of "{self._builds[arm]}": give another --out'
            )
        if not run.is_complete:
            self._note(f"run {run.name} of the {arm} did not come to its end")
        if run.engine_kind == "reference":
            self._note("the reference engine is not vLLM: this is no verdict on a vLLM release")
        return run

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)
