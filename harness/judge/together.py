"""Comparisons of one night or one release judged together, so that many questions do not make a false alarm likely."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from harness.judge.comparison import Comparison, combined
from harness.judge.multiplicity import holm
from harness.judge.paired import Slower
from harness.judge.profiles import LEVEL_FAMILY


def judge_together(comparisons: Sequence[Comparison]) -> tuple[Comparison, ...]:
    """Judge comparisons of one night or one release together, so that many questions do not make a false alarm likely.

    Of a release, a metric stays slower only when Holm's method over all comparisons and all their metrics agrees. A
    screening that said yes stays so only when the comparison that confirms it says yes as well.
    """
    p_values = {
        f"{number}/{metric.metric}": metric.p_yes
        for number, comparison in enumerate(comparisons)
        if comparison.declaration.profile == "release" and comparison.decision is not None
        for metric in comparison.decision.metrics
    }
    kept = holm(p_values, LEVEL_FAMILY)
    judged = []
    for number, comparison in enumerate(comparisons):
        if comparison.declaration.profile == "release" and comparison.decision is not None:
            comparison = _corrected(comparison, {n.partition("/")[2] for n in kept if n.startswith(f"{number}/")})
        elif comparison.declaration.profile == "screen" and comparison.answer is Slower.YES:
            comparison = _confirmed(comparison, comparisons)
        judged.append(comparison)
    return tuple(judged)


def _corrected(comparison: Comparison, kept: set[str]) -> Comparison:
    decision = comparison.decision
    assert decision is not None
    lost = [name for name in decision.slower if name not in kept]
    if not lost:
        return comparison
    metrics = tuple(
        replace(metric, answer=Slower.INCONCLUSIVE) if metric.metric in lost else metric for metric in decision.metrics
    )
    still = any(metric.answer is Slower.YES for metric in metrics)
    said = f"{', '.join(lost)} is no longer slower beyond doubt when all comparisons are judged together"
    if still:
        decision = replace(decision, metrics=metrics)
    else:
        decision = replace(decision, metrics=metrics, answer=Slower.INCONCLUSIVE, because=said)
    assert comparison.failures is not None
    answer, because = combined(comparison.declaration, decision, comparison.failures)
    return replace(comparison, decision=decision, answer=answer, because=because, notes=(*comparison.notes, said))


def _confirmed(screened: Comparison, comparisons: Sequence[Comparison]) -> Comparison:
    name = screened.declaration.name
    if screened.failures is not None and screened.failures.answer is Slower.YES:
        return screened  # a failure needs no second look
    again = [c for c in comparisons if c.declaration.profile == "confirm" and c.declaration.confirms == name]
    if not again:
        because = f'slower in the screening, not confirmed yet: harness compare --profile confirm --confirms "{name}"'
        return replace(screened, answer=Slower.INCONCLUSIVE, because=f"{because} ({screened.because})")
    other = again[-1]
    both = set(screened.decision.slower if screened.decision else ()) & set(
        other.decision.slower if other.decision else ()
    )
    if other.answer is Slower.YES and both:
        return replace(screened, because=f"slower twice: {', '.join(sorted(both))} ({other.because})")
    answer = Slower.INCONCLUSIVE if other.answer is Slower.YES else other.answer
    return replace(screened, answer=answer, because=f'not confirmed by "{other.declaration.name}": {other.because}')
