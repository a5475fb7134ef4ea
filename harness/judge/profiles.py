"""How much slower matters, when is looked, and with which probabilities of a wrong answer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from harness.errors import UsageError

LEVEL_YES = 0.01
LEVEL_NO = 0.05
LEVEL_FAMILY = 0.05  # of a release: over all its comparisons and their metrics
POWER = 0.95  # with which what is called detectable is found


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A margin, the looks, and the error probabilities at each look.

    Those of `yes` sum to the whole level, which holds however the looks depend on one another. Those of `no` are nominal:
    later looks contain the pairs of earlier ones, so together they come to less than 5 %, although their sum is more.
    Source: group sequential boundaries, by the joint distribution of normal sums at the looks.
    """

    name: str
    margin: float  # 0.05: up to 5 % slower is not called slower
    effect: float  # 0.10: what it is made to find
    looks: tuple[int, ...]  # pairs
    alpha_yes: tuple[float, ...]
    alpha_no: tuple[float, ...]
    blocks_per_arm: int = 1  # in each pair, on one server of each side
    fresh: bool = False  # starts engines anew in every pair unless it is told otherwise
    starts_per_arm: int = 2  # in each pair, with fresh starts
    blocks_per_start: int = 1
    level_no: float = LEVEL_NO  # how probable `no` is at most when the truth is beyond the margin

    @property
    def level_yes(self) -> float:
        """Return how probable `yes` is at most when the truth is within the margin."""
        return sum(self.alpha_yes)

    def alpha_at(self, pairs: int) -> float:
        """Return what `yes` may err by at the last look that so many pairs reach, or at the first."""
        reached = sum(look <= pairs for look in self.looks)
        return self.alpha_yes[max(reached, 1) - 1]

    def spread_to_find(self, effect: float, metrics: int) -> float:
        """Return the pair spread up to which `effect` is found at the last look, with 95 % probability; 0: never."""
        quantiles = t_quantile(1 - self.alpha_yes[-1] / metrics, self.looks[-1] - 1) + self._power_quantile(1)
        return max(0.0, math.log1p(effect) - math.log1p(self.margin)) * math.sqrt(self.looks[-1]) / quantiles

    def spread_to_clear(self, metrics: int) -> float:
        """Return the pair spread up to which all of so many unchanged metrics are cleared, with 95 % probability."""
        quantiles = t_quantile(1 - self.alpha_no[-1], self.looks[-1] - 1) + self._power_quantile(metrics)
        return math.log1p(self.margin) * math.sqrt(self.looks[-1]) / quantiles

    def _power_quantile(self, metrics: int) -> float:
        return t_quantile(1 - (1 - POWER) / metrics, self.looks[-1] - 1)


_YES, _NO = (0.002, 0.003, 0.005), (0.01, 0.015, 0.03)
PROFILES = {
    profile.name: profile
    for profile in (
        Profile(name="nightly", margin=0.05, effect=0.10, looks=(4, 8, 16), alpha_yes=_YES, alpha_no=_NO),
        Profile(
            name="release",
            margin=0.02,
            effect=0.05,
            looks=(6, 12, 24),
            alpha_yes=_YES,
            alpha_no=_NO,
            blocks_per_arm=2,
            fresh=True,
            blocks_per_start=3,
        ),
        Profile(
            name="incident", margin=0.15, effect=0.30, looks=(4, 8), alpha_yes=(0.004, 0.006), alpha_no=(0.02, 0.035)
        ),
        # The two halves of a night of many comparisons: nothing is called slower that is not slower twice.
        Profile(name="screen", margin=0.05, effect=0.10, looks=(8,), alpha_yes=(0.02,), alpha_no=(0.05,)),
        Profile(name="confirm", margin=0.05, effect=0.10, looks=(16,), alpha_yes=(0.02,), alpha_no=(0.05,)),
    )
}


def profile_named(name: str) -> Profile:
    """Return a profile.

    Raises: UsageError naming those that exist.
    """
    if name not in PROFILES:
        raise UsageError(f'profile "{name}" is unknown; profiles: {", ".join(PROFILES)}')
    return PROFILES[name]


@cache
def t_quantile(probability: float, freedom: int) -> float:
    """Return a quantile of Student's t."""
    from scipy.special import stdtrit  # type: ignore[import-untyped,unused-ignore]

    return float(stdtrit(freedom, probability))
