"""Did a rollout empty the prefix cache that users' prompts profit from? Read from what the engines say of themselves."""

from __future__ import annotations

from harness.guards.canary import Answer
from harness.judge.claim import Context, Judgement
from harness.judge.reloads import expected_answers
from harness.judge.verdict import Verdict
from harness.observe.history import EventKind, History

QUERIES, HITS = "prefix_cache_queries", "prefix_cache_hits"  # tokens asked for, and found
COLDER = 0.5  # of the old share: half as many hits


def prefix_cache_went_cold(history: History, context: Context, ratio_before_min: float) -> Judgement:
    """Compare the share of hits of the old engine, just before the rollout, with that of the new one's first requests."""
    old, new = _samples(history, Answer.OLD), _samples(history, Answer.NEW)
    started = history.first(EventKind.ROLLOUT_STARTED)
    warm = [sample for sample in old if started is not None and sample[0] < started.at_ns]
    if len(warm) < 2 or not new:
        because = f"the old engine gave {len(warm)} samples of its prefix cache before the rollout, the new one {len(new)} later"
        return Verdict.UNKNOWN, because, ()
    middle = warm[len(warm) // 2 - 1]  # the first half is still cold
    before, first = _ratio(middle[1:], warm[-1][1:]), _ratio((0.0, 0.0), new[0][1:])
    told = (
        f"the old engine found {before:.0%} of the prompt tokens in its prefix cache before the rollout; the first "
        f"{new[0][1]:,.0f} tokens that the new one was asked for were found to {first:.0%}"
    )
    if before < ratio_before_min:
        return Verdict.UNKNOWN, f"the cache was not warm: {told}, expected at least {ratio_before_min:.0%} before", ()
    if first > COLDER * before:
        return Verdict.UNKNOWN, f"the fault did not bite: {told}", ()
    return Verdict.HELD, told, ()


def _samples(history: History, which: Answer) -> list[tuple[int, float, float]]:
    """Return (time, tokens asked for, tokens found) of the engines started for a checkpoint, once there are any."""
    expected = expected_answers(history)
    return [
        (event.at_ns, float(event.data["values"][QUERIES]), float(event.data["values"].get(HITS, 0.0)))
        for event in history.of(EventKind.METRICS)
        if event.data["incarnation"] in expected
        and expected[event.data["incarnation"]].started is which
        and event.data["values"].get(QUERIES)
    ]


def _ratio(earlier: tuple[float, ...], later: tuple[float, ...]) -> float:
    asked, found = later[0] - earlier[0], later[1] - earlier[1]
    return found / asked if asked > 0 else 0.0
