"""Is the candidate slower? A finished comparison that is about these two sides, or one of its own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from harness.errors import HarnessError, UsageError
from harness.judge.blocks import MALFORMED, is_comparison, load_declaration
from harness.judge.comparison import judge_run
from harness.judge.paired import Slower
from harness.judge.qualification import LATENCY
from harness.judge.together import judge_together
from harness.judge.verdict import Finding
from harness.qualify.evidence import answer_of, runs_in, why_not_about
from harness.qualify.gathering import BASELINE, CANDIDATE, Gathering

COMPARISON = "comparison"
NOT_COMPARED = ("new", "patience")  # both sides serve the old checkpoint


def judged_comparison(gathering: Gathering, *, is_needed: bool) -> Finding | None:
    """Return the verdict of a comparison of the two sides, after running one where there is none.

    Raises: UsageError when the one that was given is none, or is not about these two.
    """
    given, why = gathering.request.comparison, gathering.why[LATENCY]
    path = given or _finished(gathering)
    if path is None and is_needed:
        path = _run(gathering)
    if path is None:
        gathering.lack(LATENCY, [COMPARISON], "none was given or run")
        return None
    unknown = gathering.why_unknown()
    if unknown:
        why[COMPARISON] = f'whether "{path}" is about these two cannot be said: {unknown}'
        return None
    why_not = _why_not_about(gathering, path)
    if why_not and path == given:
        raise UsageError(f'"{path}" does not answer for latency: {why_not}')
    if why_not:
        why[COMPARISON] = f'"{path}" does not answer for latency: {why_not}'
        return None
    if not load_declaration(path).fresh:
        gathering.note(f'"{path}" started each side once: how starts differ is in its answer (harness compare --fresh)')
    gathering.sources[LATENCY].append(str(path))
    return judge_together([judge_run(path)])[0].finding()


def _finished(gathering: Gathering) -> Path | None:
    """Return the newest comparison of its own that answers what is asked; an invalid one is run again."""
    for path in reversed(runs_in(gathering.request.out / COMPARISON)):
        is_answer = answer_of(path) not in ("", Slower.INVALID) and load_declaration(path).fresh
        if not is_answer or gathering.why_unknown():
            continue
        if gathering.why_of_another(path, BASELINE, gathering.request.for_comparison, ignored=NOT_COMPARED):
            continue
        if _serves_another_model(path, gathering.request.compare_model):
            gathering.note(
                f'"{path}" is of an earlier call and does not count: it served another model than is asked for'
            )
            continue
        if not _why_not_about(gathering, path):
            return path
    return None


def _serves_another_model(path: Path, model: str | None) -> bool:
    """Say whether a comparison of an earlier call is not known to be of the model that is asked for, if one is.

    A side that is only recorded has no settings by which it could be told.
    """
    if model is None:
        return False
    try:
        return bool(json.loads((path / "run.json").read_text(encoding="utf-8"))["settings"]["model"] != model)
    except (OSError, *MALFORMED):
        return True


def _why_not_about(gathering: Gathering, path: Path) -> str:
    """Say why a comparison does not tell whether the candidate is slower than the baseline; empty when it does.

    Raises: UsageError when it is no comparison.
    """
    if not is_comparison(path):
        raise UsageError(f'"{path}" is not a comparison: harness compare makes one')
    return why_not_about(
        load_declaration(path),
        gathering.request.profile,
        baseline=gathering.known(BASELINE),
        candidate=gathering.known(CANDIDATE),
    )


def _run(gathering: Gathering) -> Path | None:
    """Run a comparison, both sides on the undamaged old checkpoint, and return its directory; None where there is none."""
    from harness.compare import Options, compare

    if not all(gathering.can_start(arm, LATENCY, [COMPARISON]) for arm in (BASELINE, CANDIDATE)):
        return None
    request, why, tell = gathering.request, gathering.why[LATENCY], gathering.tell
    image, python = request.candidate.new_side(tell)
    if image is None and python is None:
        given = request.candidate.given
        why[COMPARISON] = f"the new side of a comparison is an image or an interpreter, and {given} is neither"
        return None
    options = Options(profile=request.profile, same=True, fresh=True, new_image=image, new_python=python)
    settings = replace(request.for_comparison(request.baseline.started_with()), results=request.out / COMPARISON)
    try:
        directory, _ = compare(settings, options, progress=tell, starter=request.baseline.starter)
    except HarnessError as error:
        why[COMPARISON] = str(error)
        return None
    return directory
