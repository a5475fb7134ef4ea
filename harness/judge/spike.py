"""The spike while a rollout goes on, apart from the speed after it: is its peak beyond what was agreed to bear?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.judge.claim import Context, Judgement
from harness.judge.moments import load_span
from harness.judge.paired import Evidence, Slower, evidence
from harness.judge.profiles import LEVEL_NO, LEVEL_YES
from harness.judge.records import Records
from harness.judge.verdict import Verdict
from harness.judge.windows import PEAK_WINDOW_S, SPIKE_FACTOR, Spike, spike
from harness.observe.history import EventKind, History

ROLLOUTS_MIN = 4
NOTHING_TO_COMPARE = "no rollout was started, or there are no answered requests before it or none during it"


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


def spike_at_most(history: History, context: Context, factor: float) -> Judgement:
    """Compare the highest peak of the rollout with what was agreed to bear."""
    seen = rollout_spike(history)
    if seen is None:
        return Verdict.UNKNOWN, NOTHING_TO_COMPARE, ()
    return (
        Verdict.HELD if seen.peak_ratio <= factor else Verdict.BROKEN,
        f"{_told(seen)}, claimed at most {factor:g}",
        (),
    )


def spike_at_least(history: History, context: Context, factor: float) -> Judgement:
    """Look whether the rollout was slow at all: what was not says nothing about what would have happened."""
    seen = rollout_spike(history)
    if seen is None:
        return Verdict.UNKNOWN, NOTHING_TO_COMPARE, ()
    if seen.peak_ratio < factor:
        return Verdict.UNKNOWN, f"the fault did not bite: {_told(seen)}, expected at least {factor:g}", ()
    return Verdict.HELD, f"{_told(seen)}, expected at least {factor:g}", ()


def _told(seen: Spike) -> str:
    peak = (
        f"most requests of some {PEAK_WINDOW_S:g} s failed"
        if math.isinf(seen.peak_ratio)
        else f"the slowest {PEAK_WINDOW_S:g} s of the rollout had {seen.peak_ratio:.2f} times the median first token before it"
    )
    return f"{peak} ({seen.baseline_ms:.0f} ms), {seen.slow_s:.0f} s were slow, {seen.failed} requests failed"
