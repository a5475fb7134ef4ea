"""Does a candidate recover more slowly than its baseline? An exact rank test, a margin, and *unknown* where there is too little.

Recoveries of different scenarios are not alike, so they are only ranked within their own scenario and mode; the test is then
exact over all of them together. With a single scenario it is the test of Mann and Whitney.

A recovery that was not watched to its end is longer than the watch, by nobody knows how much. To leave it out would leave out
the slow ones. So the answer must be the same wherever between the end of the watch and never it came, or it is none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from harness.judge.verdict import Verdict

RECOVERIES_MIN = 5  # per arm; below it no order of the times is improbable enough
MARGIN = 0.25  # up to 25 % longer is not called a regression
LEVEL_SLOWER = 0.01
LEVEL_NOT_SLOWER = 0.05
SHORTEST_S = 1e-3  # what is shorter was not measured

Stratum = tuple[Sequence[float], Sequence[float]]  # recoveries of the baseline and of the candidate, in seconds
Recoveries = Mapping[str, Sequence[float]]  # in seconds, by scenario and mode
NONE: Recoveries = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryFinding:
    """The answer for one scenario, or for all of them together. A recovery that never came is infinitely long."""

    name: str
    verdict: Verdict
    because: str
    baseline: int  # recoveries
    candidate: int
    ratio: float | None = None  # how many times as long the candidate takes; None: nothing to compare
    p_slower: float | None = None  # of the hypothesis that it takes no longer
    p_not_slower: float | None = None  # of the hypothesis that it takes longer by the margin
    may_be_broken: bool = False  # by recoveries that were not watched to their end


def judge_recoveries(
    baseline: Recoveries,
    candidate: Recoveries,
    *,
    baseline_beyond: Recoveries = NONE,
    candidate_beyond: Recoveries = NONE,
) -> tuple[RecoveryFinding, ...]:
    """Answer for all scenarios that both arms recovered in together, then for each with enough recoveries of its own.

    The mappings give the recoveries in seconds; those `beyond` were watched for so long and had not ended. One scenario alone
    can break the verdict; that it has too few recoveries of its own says nothing, so only such answers are returned as are
    one, or as could be broken by what was not watched to its end.
    """
    old, new = _all(baseline, baseline_beyond), _all(candidate, candidate_beyond)
    shared = sorted(name for name in old.keys() & new.keys() if old[name] and new[name])
    never_old, never_new = _never(baseline_beyond), _never(candidate_beyond)
    # Every recovery that was not watched to its end, where it speaks most against the candidate, and most for it.
    against = {name: (old[name], _all(candidate, never_new)[name]) for name in shared}
    in_favour = {name: (_all(baseline, never_old)[name], new[name]) for name in shared}
    counts = {name: (len(baseline_beyond.get(name, ())), len(candidate_beyond.get(name, ()))) for name in shared}

    def judged(name: str, scenarios: Sequence[str]) -> RecoveryFinding:
        worst = _judge(name, [against[each] for each in scenarios])
        best = _judge(name, [in_favour[each] for each in scenarios])
        return _whatever_came(
            worst, best, sum(counts[each][0] for each in scenarios), sum(counts[each][1] for each in scenarios)
        )

    together = judged("all scenarios together", shared)
    alone = [judged(name, [name]) for name in shared] if len(shared) > 1 else []
    return (together, *(each for each in alone if each.verdict is not Verdict.UNKNOWN or each.may_be_broken))


def _all(seen: Recoveries, beyond: Recoveries) -> dict[str, tuple[float, ...]]:
    return {name: (*seen.get(name, ()), *beyond.get(name, ())) for name in {**seen, **beyond}}


def _never(beyond: Recoveries) -> dict[str, tuple[float, ...]]:
    return {name: (math.inf,) * len(watched_s) for name, watched_s in beyond.items()}


def _whatever_came(worst: RecoveryFinding, best: RecoveryFinding, old: int, new: int) -> RecoveryFinding:
    """Return the answer that holds wherever the recoveries ended that were not watched to their end, or none."""
    if not old + new:
        return worst
    unseen = f"{old} of the baseline and {new} of the candidate were not watched to their end"
    if worst.verdict is best.verdict:
        weaker = best if worst.verdict is Verdict.BROKEN else worst
        return replace(weaker, because=f"{weaker.because}; {unseen}: the answer is the same wherever they ended")
    return replace(
        worst,
        verdict=Verdict.UNKNOWN,
        because=f"{unseen}, and that could turn the answer: {best.verdict} where it speaks for the candidate "
        f"({best.because}), {worst.verdict} where it speaks against it ({worst.because})",
        may_be_broken=worst.verdict is Verdict.BROKEN,
    )


def _judge(name: str, strata: Sequence[Stratum]) -> RecoveryFinding:
    counts = sum(len(old) for old, _ in strata), sum(len(new) for _, new in strata)
    if min(counts) < RECOVERIES_MIN:
        because = (
            f"{counts[0]} recoveries of the baseline and {counts[1]} of the candidate in the same scenarios, "
            f"at least {RECOVERIES_MIN} of each are needed"
        )
        return RecoveryFinding(
            name=name, verdict=Verdict.UNKNOWN, because=because, baseline=counts[0], candidate=counts[1]
        )
    ratio = typical_ratio(strata)
    p_slower = rank_p_value(strata)
    faster = [([time / (1 + MARGIN) for time in new], old) for old, new in strata]
    p_not_slower = rank_p_value(faster)
    seen = f"{ratio:.2f} times as long ({counts[0]} and {counts[1]} recoveries"
    if p_slower <= LEVEL_SLOWER and ratio > 1 + MARGIN:
        verdict = Verdict.BROKEN
        because = f"{seen}, p = {p_slower:.2g}): more than {MARGIN:.0%} longer"
    elif p_not_slower <= LEVEL_NOT_SLOWER:  # then most pairs are within the margin, and so is the ratio
        verdict = Verdict.HELD
        because = f"{seen}, p = {p_not_slower:.2g}): not more than {MARGIN:.0%} longer"
    else:
        verdict = Verdict.UNKNOWN
        because = (
            f"{seen}): neither more than {MARGIN:.0%} longer (p = {p_slower:.2g}, {LEVEL_SLOWER:g} is needed) nor not "
            f"(p = {p_not_slower:.2g}, {LEVEL_NOT_SLOWER:g} is needed); more recoveries would tell"
        )
    return RecoveryFinding(
        name=name,
        verdict=verdict,
        because=because,
        baseline=counts[0],
        candidate=counts[1],
        ratio=ratio,
        p_slower=p_slower,
        p_not_slower=p_not_slower,
    )


def typical_ratio(strata: Sequence[Stratum]) -> float:
    """Return the median of new over old over all pairs within a scenario: Hodges and Lehmann's estimate, as a ratio."""
    return median(_ratio(before, after) for old, new in strata for before in old for after in new)


def _ratio(before: float, after: float) -> float:
    if math.isinf(before):
        return 1.0 if math.isinf(after) else 0.0
    return max(after, SHORTEST_S) / max(before, SHORTEST_S)


def rank_p_value(strata: Sequence[Stratum]) -> float:
    """Return the exact one-sided p-value of "the second of each stratum are not longer": equal values share their rank.

    Source: the permutation distribution of the rank sum, counted over every way to tell the two apart within each stratum;
    for one stratum that of H. B. Mann and D. R. Whitney (1947), for several that of P. van Elteren (1960) with equal weights.
    """
    observed = 0
    ways: dict[int, int] = {0: 1}  # by twice the rank sum, so that shared ranks stay whole
    for old, new in strata:
        ranks = _twice_the_ranks([*old, *new])
        observed += sum(ranks[len(old) :])
        ways = _convolved(ways, _sums(ranks, len(new)))
    return sum(count for total, count in ways.items() if total >= observed) / sum(ways.values())


def _twice_the_ranks(values: Sequence[float]) -> list[int]:
    below = {value: sum(other < value for other in values) for value in set(values)}
    return [2 * below[value] + 1 + values.count(value) for value in values]


def _sums(ranks: Sequence[int], size: int) -> dict[int, int]:
    """Return in how many ways `size` of the ranks have each sum."""
    chosen: list[dict[int, int]] = [{0: 1}, *({} for _ in range(size))]
    for rank in ranks:
        for number in range(size, 0, -1):
            for total, count in chosen[number - 1].items():
                chosen[number][total + rank] = chosen[number].get(total + rank, 0) + count
    return chosen[size]


def _convolved(first: Mapping[int, int], second: Mapping[int, int]) -> dict[int, int]:
    both: dict[int, int] = {}
    for total, count in first.items():
        for more, times in second.items():
            both[total + more] = both.get(total + more, 0) + count * times
    return both
