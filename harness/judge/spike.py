"""The spike while a rollout goes on, apart from the speed after it: is its peak beyond what was agreed to bear?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.judge.moments import load_span
from harness.judge.paired import LEVEL_NO, LEVEL_YES, Evidence, Slower, evidence
from harness.judge.records import Records
from harness.judge.windows import SPIKE_FACTOR, Spike, spike
from harness.observe.history import EventKind, History

ROLLOUTS_MIN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SpikeVerdict:
    """Whether the typical peak of a rollout is beyond the budget, and the highest that was seen."""

    answer: Slower
    because: str
    budget: float  # 1.3: a peak of 30 % is borne
    rollouts: int
    highest: float  # the next rollout stays below it with probability n / (n + 1)
    evidence: Evidence | None


def judge_spikes(peaks: Sequence[float], *, budget: float = SPIKE_FACTOR) -> SpikeVerdict:
    """Answer from the peaks of several rollouts, each a multiple of the median before it; one fixed look at all of them.

    A rollout in which most requests failed has an infinite peak: that is beyond any budget.
    """
    n, highest = len(peaks), max(peaks, default=math.nan)
    infinite = sum(math.isinf(peak) for peak in peaks)
    maximum = f"highest {highest:.2f}, which the next one stays below with probability {n / (n + 1):.0%}"
    if infinite:
        because = f"in {infinite} of {n} rollouts most requests failed for 2 s or longer: service was away, not slow"
        answer, found = (Slower.YES if 2 * infinite > n else Slower.INCONCLUSIVE), None
    elif n < ROLLOUTS_MIN:
        because = f"{n} rollouts are there, at least {ROLLOUTS_MIN} are needed" + (f"; {maximum}" if n else "")
        answer, found = Slower.INVALID, None
    else:
        found = evidence(np.log(np.asarray(peaks)).tolist(), budget - 1, alpha_yes=LEVEL_YES)
        answer = Slower.INCONCLUSIVE
        if found.p_slower <= LEVEL_YES:
            answer = Slower.YES
        elif found.p_not_slower <= LEVEL_NO:
            answer = Slower.NO
        because = (
            f"the peak of a rollout is {1 + found.effect:.2f} times the median before it (from {1 + found.low:.2f} to "
            f"{1 + found.high:.2f}, {n} rollouts), budget {budget:g}; {maximum}"
        )
    return SpikeVerdict(answer=answer, because=because, budget=budget, rollouts=n, highest=highest, evidence=found)


def rollout_spike(history: History) -> Spike | None:
    """Return the spike of a scenario's first rollout, up to its remedy or the end of the load; None without a rollout."""
    started = history.first(EventKind.ROLLOUT_STARTED)
    span = load_span(history)
    if started is None or span is None:
        return None
    remedy = history.first(EventKind.REMEDY_STARTED)
    records = Records.of(history.requests).of_users()
    until_ns = span[1] if remedy is None else remedy.at_ns
    return spike(records.between(span[0], started.at_ns), records.between(started.at_ns, until_ns))
