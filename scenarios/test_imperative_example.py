"""The same harness without a declared scenario: an ordinary test with a running engine and load around it.

Must hold: a truncated shard does not disturb an engine that has loaded it, and a new engine refuses to start on it.
Source: measured on vLLM 0.32.0: weights are copied at load, and "incomplete metadata, file not fully covered" after it.
"""

from __future__ import annotations

import os

import pytest

from harness.errors import EngineNotReady
from harness.guards.canary import largest_difference


def test_a_truncated_shard_is_refused_only_at_the_next_start(rollout_checkpoints, rollout_engine, rollout_load) -> None:
    engine = rollout_engine(rollout_checkpoints.old)
    before = engine.prompt_logprobs()
    load = rollout_load(engine, rate_rps=4.0)

    shard = rollout_checkpoints.old / "model.safetensors"
    os.truncate(shard, shard.stat().st_size // 2)
    during = engine.prompt_logprobs()
    with pytest.raises(EngineNotReady) as refused:
        rollout_engine(rollout_checkpoints.old)
    report = load.stop()

    assert largest_difference(during, before) < 1e-3
    assert refused.value.engine_exit_code not in (None, 0)
    assert refused.value.log_lines, "an engine that refuses says why"
    assert report.recorded == report.planned > 0
    assert {request.result for request in load.requests} == {"ok"}
