"""Signed ranks: exact p-values and intervals for the centre of a symmetric distribution, however heavy its tails are."""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from harness.judge.records import Floats


def walsh_averages(d: Floats) -> Floats:
    """Return the sorted means of all pairs of values, each with itself too; their median is Hodges and Lehmann's estimate."""
    i, j = np.triu_indices(len(d))
    return np.sort((d[i] + d[j]) / 2)


def rank_interval(averages: Floats, n: int, alpha: float) -> tuple[float, float]:
    """Return the exact signed-rank interval that misses the centre on either side with probability `alpha` at most."""
    within = np.flatnonzero(rank_distribution(n) <= alpha)
    if not within.size:
        return -math.inf, math.inf
    cut = int(within[-1])
    return float(averages[cut]), float(averages[len(averages) - 1 - cut])


def rank_p_values(shifted: Floats, n: int) -> tuple[float, float]:
    """Return the exact one-sided p-values of "the centre is at most zero" and "at least zero" from Walsh averages.

    An average that is zero counts against either rejection.
    """
    below_or_at, above_or_at = int((shifted <= 0).sum()), int((shifted >= 0).sum())
    distribution = rank_distribution(n)
    return float(distribution[below_or_at]), float(distribution[above_or_at])


@cache
def rank_distribution(n: int) -> Floats:
    """Return P(W <= w) of the signed-rank statistic of n values, for w from 0 to n (n + 1) / 2."""
    ways = np.ones(1)
    for rank in range(1, n + 1):
        longer = np.zeros(len(ways) + rank)
        longer[: len(ways)] += ways
        longer[rank:] += ways
        ways = longer
    return np.minimum(np.cumsum(ways) / 2.0**n, 1.0)
