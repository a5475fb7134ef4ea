"""Did B fail where A did not? Some failures must never happen; the others are counted and compared."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from harness.judge.paired import Slower
from harness.observe.history import RequestResult

# One of these is one too many: an answer that is not the model's, or not whole, that looks like success.
NEVER = frozenset(
    {
        RequestResult.WRONG_CONTENT,
        RequestResult.WRONG_MODEL,
        RequestResult.MIXED_VERSION,
        RequestResult.TRUNCATED,
        RequestResult.TRUNCATED_FRAMING,
        RequestResult.TRUNCATED_PROTOCOL,
        RequestResult.INBAND_ERROR,
        RequestResult.MALFORMED,
    }
)
BUDGET = 0.01  # of all requests, that may fail
CONFIDENCE = 0.95

Counts = Mapping[RequestResult, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureVerdict:
    """Whether B fails more than A, or more than it may."""

    answer: Slower
    because: str
    old_failed: int
    old_requests: int
    new_failed: int
    new_requests: int
    p_more: float  # Fisher's exact test, one-sided: B fails no more often than A
    upper_ratio: float  # 95 % upper bound of B's share of failures, by Clopper and Pearson


def judge_failures(old: Counts, new: Counts, *, level: float, budget: float = BUDGET) -> FailureVerdict:
    """Answer `yes` (worse), `no` or `inconclusive` from how many requests ended in each class in A and in B.

    Worse is one failure that must never happen, or more failures than A had by Fisher's exact test at `level`. Not worse
    needs the upper bound of B's share of failures to be within `budget`.
    """
    from scipy.stats import beta, fisher_exact  # type: ignore[import-untyped,unused-ignore]

    old_requests, new_requests = sum(old.values()), sum(new.values())
    old_failed = old_requests - old.get(RequestResult.OK, 0)
    new_failed = new_requests - new.get(RequestResult.OK, 0)
    table = [[new_failed, new_requests - new_failed], [old_failed, old_requests - old_failed]]
    p_more = float(fisher_exact(table, alternative="greater").pvalue)
    upper = 1.0
    if new_failed < new_requests:
        upper = float(beta.ppf(CONFIDENCE, new_failed + 1, new_requests - new_failed))
    never = {result: count for result, count in new.items() if result in NEVER and count}
    shown = f"{new_failed} of {new_requests} requests to B failed{_listed(new)}, {old_failed} of {old_requests} to A"
    if never:
        answer, because = Slower.YES, f"what must never happen did:{_listed(never)} from B; {shown}"
    elif p_more <= level:
        answer, because = Slower.YES, f"{shown}: more, with p = {p_more:.2g} (level {level:g})"
    elif upper <= budget:
        answer, because = Slower.NO, f"{shown}: at most {upper:.2%} with 95 % confidence, budget {budget:.2%}"
    else:
        needed = "" if new_failed else f"; {requests_needed(budget)} requests without a failure would do"
        answer, because = (
            Slower.INCONCLUSIVE,
            f"{shown}: could be up to {upper:.2%} with 95 % confidence, budget {budget:.2%}{needed}",
        )
    return FailureVerdict(
        answer=answer,
        because=because,
        old_failed=old_failed,
        old_requests=old_requests,
        new_failed=new_failed,
        new_requests=new_requests,
        p_more=p_more,
        upper_ratio=upper,
    )


def requests_needed(budget: float) -> int:
    """Return how many requests without a failure bound the share of failures by `budget`, with 95 % confidence."""
    return math.ceil(math.log(1 - CONFIDENCE) / math.log1p(-budget))


def _listed(counts: Counts) -> str:
    seen = ", ".join(f"{n} {result}" for result, n in sorted(counts.items()) if n and result is not RequestResult.OK)
    return f" ({seen})" if seen else ""
