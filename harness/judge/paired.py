"""Is B slower than A by more than a margin? Paired blocks, a few planned looks, and three honest answers.

The unit is the block, never the request: requests of one block share an engine start, a temperature and their
neighbours, so a thousand of them say much less than a thousand independent ones would.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from harness.judge.multiplicity import holm
from harness.judge.profiles import LEVEL_FAMILY, POWER, Profile, t_quantile
from harness.judge.ranks import rank_interval, rank_p_values, walsh_averages

RANKS_FROM = 12  # pairs; below it the signed ranks are too coarse for the levels that are spent
INTERVAL = 0.95


class Slower(StrEnum):
    """The four answers to "is it slower?"."""

    YES = "yes"
    NO = "no"
    INCONCLUSIVE = "inconclusive"
    INVALID = "invalid"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What the pairs say about one metric, whatever the answer. Effects are relative: 0.3 is 30 % slower."""

    pairs: int
    effect: float
    low: float  # two-sided 95 % interval
    high: float
    pair_sd: float  # of the differences of logarithms
    detectable: float  # the smallest effect that would be found with 95 % probability by so many pairs; may be infinite
    pairs_needed: (
        int | None
    )  # for an answer, where there is none yet; None: the effect lies on the margin, or is unknown
    p_slower: float  # of the hypothesis that it is at most the margin slower
    p_not_slower: float  # of the hypothesis that it is at least the margin slower
    method: str  # "t", "signed ranks", or "none" when a quantile is infinite

    @property
    def is_improvement(self) -> bool:
        """Say whether B is faster, beyond doubt."""
        return self.high < 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricVerdict:
    """The answer for one metric, and what it stands on."""

    metric: str
    answer: Slower
    evidence: Evidence
    p_yes: float  # over all looks so far


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The answer for all metrics together: slower when one is, not slower when none is."""

    answer: Slower
    because: str
    pairs: int  # at the look that decided, or the last one
    metrics: tuple[MetricVerdict, ...]

    @property
    def slower(self) -> tuple[str, ...]:
        """Return the metrics that are slower."""
        return tuple(metric.metric for metric in self.metrics if metric.answer is Slower.YES)


def decide(differences: Mapping[str, Sequence[float]], profile: Profile, *, family: int = 1) -> Decision:
    """Answer from the differences ln T(B) - ln T(A) of each metric, one per pair, in the order they were measured.

    At each look, `yes` needs Holm's correction over the metrics, and over `family` comparisons of a release with as many
    metrics each; `no` needs every metric to be not slower. The first look that decides stands, whatever came after.
    """
    if not differences:
        raise ValueError("no metric to decide by")
    count = min(len(values) for values in differences.values())
    reached = [look for look in profile.looks if look <= count]
    if not reached:
        because = f"{count} pairs are there, the first look is at {profile.looks[0]}"
        return Decision(answer=Slower.INVALID, because=because, pairs=count, metrics=())
    p_yes = dict.fromkeys(differences, 1.0)
    p_no = dict.fromkeys(differences, 1.0)
    for number, look in enumerate(reached):
        alpha_yes, alpha_no = profile.alpha_yes[number], profile.alpha_no[number]
        seen = {
            name: evidence(values[:look], profile.margin, alpha_yes=alpha_yes / len(differences))
            for name, values in differences.items()
        }
        for name, found in seen.items():
            # A level spent in parts, as one p-value: it is below the whole level when a part is below its own.
            p_yes[name] = min(p_yes[name], found.p_slower * profile.level_yes / alpha_yes)
            p_no[name] = min(p_no[name], found.p_not_slower * profile.level_no / alpha_no)
        slower = holm(p_yes, profile.level_yes)
        if family > 1:
            slower &= holm(p_yes, LEVEL_FAMILY, hypotheses=family * len(p_yes))
        not_slower = {name for name, p in p_no.items() if p <= profile.level_no}
        if slower or len(not_slower) == len(differences) or look == reached[-1]:
            return _decision(seen, slower, not_slower, p_yes, profile=profile, look=look)
    raise AssertionError("unreachable: the last reached look returns")


def _decision(
    seen: Mapping[str, Evidence],
    slower: set[str],
    not_slower: set[str],
    p_yes: Mapping[str, float],
    *,
    profile: Profile,
    look: int,
) -> Decision:
    def answer(name: str) -> Slower:
        if name in slower:
            return Slower.YES
        return Slower.NO if name in not_slower else Slower.INCONCLUSIVE

    metrics = tuple(
        MetricVerdict(metric=name, answer=answer(name), evidence=found, p_yes=p_yes[name])
        for name, found in seen.items()
    )
    margin = f"{profile.margin:.0%}"
    if slower:
        whole, because = (
            Slower.YES,
            f"more than {margin} slower: {', '.join(m.metric for m in metrics if m.metric in slower)}",
        )
    elif len(not_slower) == len(metrics):
        whole, because = Slower.NO, f"not more than {margin} slower in any of {', '.join(seen)}"
    else:
        open_ = [metric for metric in metrics if metric.answer is Slower.INCONCLUSIVE]
        whole, because = Slower.INCONCLUSIVE, "; ".join(_open(metric) for metric in open_)
    return Decision(answer=whole, because=f"{because} ({look} pairs)", pairs=look, metrics=metrics)


def _open(metric: MetricVerdict) -> str:
    found = metric.evidence
    if found.method == "none":
        return f"{metric.metric} is infinite in some blocks, where too many requests failed"
    needed = "" if found.pairs_needed is None else f", about {found.pairs_needed} pairs would be needed"
    return f"{metric.metric} {found.effect:+.1%} (from {found.low:+.1%} to {found.high:+.1%}){needed}"


def evidence(differences: Sequence[float], margin: float, *, alpha_yes: float) -> Evidence:
    """Return what these pairs say: Student's t below 12 pairs, signed ranks from there on."""
    from scipy.special import stdtr  # type: ignore[import-untyped,unused-ignore]

    d, m = np.asarray(differences, float), math.log1p(margin)
    n = len(d)
    if n < 2 or not np.isfinite(d).all():
        return Evidence(
            pairs=n,
            effect=math.nan,
            low=-1.0,
            high=math.inf,
            pair_sd=math.nan,
            detectable=math.inf,
            pairs_needed=None,
            p_slower=1.0,
            p_not_slower=1.0,
            method="none",
        )
    mean, sd = float(d.mean()), float(d.std(ddof=1))
    scale = sd / math.sqrt(n)
    q_yes, q_power = t_quantile(1 - alpha_yes, n - 1), t_quantile(POWER, n - 1)
    if n < RANKS_FROM:
        centre, half = mean, t_quantile((1 + INTERVAL) / 2, n - 1) * scale
        low, high = mean - half, mean + half
        statistic = _ratio(mean - m, scale)
        p_slower, p_not_slower = float(stdtr(n - 1, -statistic)), float(stdtr(n - 1, statistic))
    else:
        averages = walsh_averages(d)
        centre = float(np.median(averages))
        low, high = rank_interval(averages, n, (1 - INTERVAL) / 2)
        p_slower, p_not_slower = rank_p_values(averages - m, n)
    return Evidence(
        pairs=n,
        effect=math.expm1(centre),
        low=math.expm1(low),
        high=math.expm1(high),
        pair_sd=sd,
        detectable=math.expm1(m + (q_yes + q_power) * scale),
        pairs_needed=_pairs_needed(centre - m, sd, q_yes),
        p_slower=p_slower,
        p_not_slower=p_not_slower,
        method="t" if n < RANKS_FROM else "signed ranks",
    )


def _pairs_needed(distance: float, sd: float, q_yes: float) -> int | None:
    if distance == 0:
        return None
    return max(2, math.ceil(((q_yes + 1.64) * sd / abs(distance)) ** 2))


def _ratio(distance: float, scale: float) -> float:
    if scale > 0:
        return distance / scale
    return math.copysign(math.inf, distance) if distance else 0.0
