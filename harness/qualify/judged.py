"""Gathers what a qualification is judged from, and judges it.

results/qualifications/<candidate>-over-<baseline>/
    qualification.json, qualification.html    the verdict
    candidate/, baseline/                     runs of the guarded scenarios
    starts/                                   the matrix of the candidate: a file as in scenarios/expectations, and its runs
    baseline-starts/                          that of the baseline, where it was started for detection too
    comparison/                               paired blocks of load

Called again, it goes on where it was: whatever is there is not run again.
"""

from __future__ import annotations

from harness.errors import UsageError
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
from harness.qualify.comparison import COMPARISON, judged_comparison
from harness.qualify.evidence import guarded, recovery_times, unlike_in
from harness.qualify.gathering import BASELINE, CANDIDATE, Gathering
from harness.qualify.guarded_runs import guarded_runs
from harness.qualify.request import Request
from harness.qualify.starts import starts_of_baseline, starts_of_candidate
from harness.recording import Tell
from harness.scenario import Scenario
from harness.suite import QUALIFICATION, collect_marked


def qualify(request: Request, tell: Tell) -> Qualification:
    """Gather, run what is missing where that is allowed and possible, and judge.

    Required are the scenarios marked `qualification` and those that are selected. One of the first that is not selected is
    judged from what is there and never run: where nothing is, it is missing, and the answer unknown.
    Raises: UsageError when no scenario is selected, or a run that was given is of another engine than the side it is for.
    """
    gathering = _gathering(request, tell)
    names, why = gathering.names, gathering.why
    is_required = {part: part in request.required for part in PARTS}
    needs_runs = is_required[SCENARIOS] or is_required[RECOVERY]
    new = guarded_runs(gathering, CANDIDATE, request.scenarios_runs, part=SCENARIOS, is_needed=needs_runs)
    old = guarded_runs(gathering, BASELINE, request.baseline_runs, part=RECOVERY, is_needed=is_required[RECOVERY])
    starts = starts_of_candidate(gathering, new, is_needed=is_required[DETECTION])
    baseline_starts = starts_of_baseline(gathering, old, is_needed=is_required[DETECTION])
    comparison = judged_comparison(gathering, is_needed=is_required[LATENCY])
    gathering.sources[SCENARIOS] += [run.name for run in new]
    gathering.sources[RECOVERY] += [run.name for run in (*old, *new)]
    unlike = unlike_in((*old, *new)) if old and new else ""
    for arm in (BASELINE, CANDIDATE) if unlike else ():
        why[RECOVERY][arm] = f"recoveries cannot be compared: {unlike}"
    timed = ((), ()) if unlike else (old, new)
    old_times, new_times = (recovery_times(runs, names) for runs in timed)
    for arm, times in ((BASELINE, old_times), (CANDIDATE, new_times)):
        if cut_short := times.note(arm):
            gathering.note(cut_short)
    parts = (
        judge_scenarios(names, guarded(new), why[SCENARIOS], repeat=request.repeat, is_required=is_required[SCENARIOS]),
        judge_detection(
            [name for name in names if name in gathering.noticed],
            baseline_starts,
            starts,
            why[DETECTION],
            starts=request.starts,
            is_required=is_required[DETECTION],
        ),
        judge_recovery(
            old_times.seen,
            new_times.seen,
            why[RECOVERY],
            baseline_beyond=old_times.beyond,
            candidate_beyond=new_times.beyond,
            is_required=is_required[RECOVERY],
        ),
        judge_latency(comparison, why[LATENCY].get(COMPARISON, ""), is_required=is_required[LATENCY]),
    )
    return Qualification(
        candidate=gathering.label(CANDIDATE),
        baseline=gathering.label(BASELINE),
        selection=request.selection,
        builds={arm: sorted(gathering.known(arm).builds) for arm in (CANDIDATE, BASELINE)},
        parts=parts,
        sources={part: tuple(dict.fromkeys(names)) for part, names in gathering.sources.items()},
        notes=tuple(gathering.notes),
    )


def _claims_who_notices(scenario: Scenario) -> bool:
    """Say whether a scenario is about who notices without guards: one about speed or right answers alone is not."""
    return any(claim.name in ("layer_as_expected", "detected_by") for claim in scenario.unguarded)


def _gathering(request: Request, tell: Tell) -> Gathering:
    """Return a gathering of the scenarios that are selected, which also knows those that are required and are not."""
    collected = collect_marked(request.scenarios)
    chosen = [each.scenario for each in collected if request.selects(each)]
    where = ", ".join(map(str, request.scenarios))
    if not chosen:
        raise UsageError(f"no scenario at {where} is selected by {request.selection}; --all takes every one")
    selected = [scenario.name for scenario in chosen]
    required = [each.scenario.name for each in collected if QUALIFICATION in each.markers]
    left_out = [name for name in required if name not in selected]
    noticed = frozenset(each.scenario.name for each in collected if _claims_who_notices(each.scenario))
    gathering = Gathering(
        request=request, scenarios=tuple(chosen), names=(*selected, *left_out), noticed=noticed, tell=tell
    )
    if left_out:
        gathering.note(
            f"{request.selection} leaves out {len(left_out)} of the {len(required)} scenarios that every qualification "
            "requires: without them the answer is no better than unknown"
        )
    for part in (SCENARIOS, DETECTION):
        gathering.lack(part, left_out, f"it is required, and {request.selection} left it out")
    return gathering
