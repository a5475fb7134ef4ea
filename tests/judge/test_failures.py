"""How many requests it takes to clear a side of failures."""

from __future__ import annotations

import pytest

from harness.judge.failures import judge_failures, requests_needed
from harness.judge.paired import Slower
from harness.observe.history import RequestResult


@pytest.mark.parametrize("budget", [0.1, 0.01, 0.001])
def test_as_many_requests_as_are_named_are_enough_and_one_less_is_not(budget: float) -> None:
    needed = requests_needed(budget)
    enough, short = ({RequestResult.OK: count} for count in (needed, needed - 1))
    assert judge_failures(enough, enough, level=0.001, budget=budget).answer is Slower.NO
    seen = judge_failures(short, short, level=0.001, budget=budget)
    assert seen.answer is Slower.INCONCLUSIVE
    assert seen.because.endswith(f"; {needed} requests without a failure would do")


def test_nothing_is_promised_once_one_has_failed() -> None:
    failed = {RequestResult.OK: 199, RequestResult.REFUSED: 1}
    assert "would do" not in judge_failures(failed, failed, level=0.001).because
