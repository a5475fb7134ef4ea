"""Users and canaries meet a failing engine at the same time: which of them is a moment earlier is chance, not a layer."""

from __future__ import annotations

import pytest

from harness.judge import claims
from harness.judge.claim import Context
from harness.judge.detection import detection
from harness.judge.moments import Layer
from harness.judge.verdict import Verdict
from harness.observe.history import History, Request
from tests.judge.histories import before, canary, ended, history, load, remedy, rollout

CONTEXT = Context(scenario="s", engine_label="reference-1", expected_layers=(Layer.CANARY,) * 3)
ANSWERED = [load(6.2, "new-1", took_s=0.05), canary(6.3, "new-1", "new", took_s=0.05)]


def failing(*failed: Request) -> History:
    return history(*before(), *rollout(), *ANSWERED, *failed, *remedy(12.0, ready_s=13.0), *ended())


@pytest.mark.parametrize("first_s", [6.9, 7.1], ids=["canary first", "client first"])
def test_a_canary_that_notices_together_with_a_client_counts(first_s: float) -> None:
    seen = failing(load(7.0, "new-1", result="http_5xx"), canary(first_s, "new-1", None, result="http_5xx"))
    assert detection(seen).layer is Layer.CANARY
    claim = claims.layer_as_expected()
    found = next(finding for finding in claims.judge((claim,), seen, CONTEXT) if finding.claim == str(claim))
    assert found.verdict is Verdict.HELD, found.because


def test_a_canary_that_notices_much_later_than_a_client_does_not() -> None:
    seen = failing(load(7.0, "new-1", result="http_5xx"), canary(10.5, "new-1", None, result="http_5xx"))
    assert detection(seen).layer is Layer.CLIENT
