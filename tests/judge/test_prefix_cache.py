"""Whether a rollout emptied the prefix cache is read from the engines' own counters."""

from __future__ import annotations

import pytest

from harness.judge import claims
from harness.judge.claim import Context
from harness.judge.prefix_cache import prefix_cache_went_cold
from harness.judge.verdict import Verdict
from harness.observe.history import Event, EventKind, History
from tests.judge.histories import event, history

CONTEXT = Context(scenario="s", engine_label="e")


def sample(at_s: float, incarnation: str, asked: float, found: float) -> Event:
    values = {"prefix_cache_queries": asked, "prefix_cache_hits": found}
    return event(at_s, EventKind.METRICS, incarnation=incarnation, values=values)


def told(*samples: Event) -> History:
    return history(
        event(0.0, EventKind.ENGINE_STARTING, incarnation="old-1", expects="old"),
        event(10.0, EventKind.ROLLOUT_STARTED, how="restart"),
        event(10.5, EventKind.ENGINE_STARTING, incarnation="new-1", expects="new"),
        *samples,
    )


WARM = (
    sample(1, "old-1", 100, 0),
    sample(4, "old-1", 500, 300),
    sample(7, "old-1", 900, 620),
    sample(9, "old-1", 1300, 940),
)


@pytest.mark.parametrize(
    ("samples", "verdict", "said"),
    [
        (
            (*WARM, sample(14, "new-1", 200, 0)),
            Verdict.HELD,
            "found 80% of the prompt tokens in its prefix cache before",
        ),
        ((*WARM, sample(13, "new-1", 0, 0), sample(14, "new-1", 200, 20)), Verdict.HELD, "first 200 tokens"),
        ((*WARM, sample(14, "new-1", 200, 150)), Verdict.UNKNOWN, "the fault did not bite"),
        (
            (sample(1, "old-1", 100, 0), sample(9, "old-1", 1300, 100), sample(14, "new-1", 200, 0)),
            Verdict.UNKNOWN,
            "the cache was not warm",
        ),
        (WARM, Verdict.UNKNOWN, "gave 4 samples of its prefix cache before the rollout, the new one 0 later"),
        ((sample(14, "new-1", 200, 0),), Verdict.UNKNOWN, "gave 0 samples"),
    ],
)
def test_a_cold_cache_is_one_that_finds_less_than_the_warm_one_did(
    samples: tuple[Event, ...], verdict: Verdict, said: str
) -> None:
    seen = prefix_cache_went_cold(told(*samples), CONTEXT, ratio_before_min=0.3)

    assert seen[0] is verdict, seen[1]
    assert said in seen[1]


def test_it_is_a_claim_of_a_scenario() -> None:
    claim = claims.prefix_cache_went_cold(ratio_before_min=0.3)
    findings = {each.claim: each.verdict for each in claims.judge((claim,), told(*WARM), CONTEXT)}

    assert findings[str(claim)] is Verdict.UNKNOWN
