"""A good reload is a cold start on the new checkpoint, on every engine that is there, and a key is not asked for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_kinds import API_KEY, CONTAINER, PROCESS, REFERENCE, EngineKind, opened

from harness.checkpoint.models import tiny_llama
from harness.engine.dev_api import DevApi, reloadable
from harness.engine.engine import Engine
from harness.engine.launch import SERVED_MODEL_NAME, Launch
from harness.guards.canary import LogprobRows, complete, largest_difference, prompt_logprobs_of, request_body
from harness.guards.publish import publish

PROMPTS = [[5, 6, 7, 8, 9, 10], [20, 21, 22, 23]]
KINDS = (
    pytest.param(REFERENCE, id="reference"),
    pytest.param(CONTAINER, id="container", marks=(pytest.mark.docker, pytest.mark.slow)),
    pytest.param(PROCESS, id="process", marks=pytest.mark.slow),
)


def rows(engine: Engine) -> LogprobRows:
    answer = complete(engine.endpoint, request_body(SERVED_MODEL_NAME, PROMPTS), api_key=API_KEY, limit_s=60)
    return prompt_logprobs_of(answer, PROMPTS)


@pytest.mark.parametrize("kind", KINDS)
def test_reload_is_a_cold_start(kind: EngineKind, tmp_path: Path) -> None:
    old, new = (tiny_llama(seed).build(tmp_path / "models") for seed in (1, 2))
    root = tmp_path / "checkpoints"
    root.mkdir()
    publish(old, root, name="live")
    launch = reloadable(Launch(checkpoint_root=root, checkpoint_name="live", max_model_len=64))
    with opened(kind, tmp_path) as starter:
        engine = starter.start(launch, incarnation="old-1")
        engine.wait_ready(kind.ready_limit_s)
        before = rows(engine)
        publish(new, root, name="live")
        assert rows(engine) == before, "a running engine does not notice what is published"
        api = DevApi(url=engine.endpoint, limit_s=60)  # no key
        replies = [api.pause(), api.reload_weights(), api.reset_prefix_cache(), api.resume()]
        assert all(reply.is_ok for reply in replies), replies
        reloaded = rows(engine)
        engine.stop()
        cold = starter.start(launch, incarnation="new-1")
        cold.wait_ready(kind.ready_limit_s)
        assert largest_difference(reloaded, rows(cold)) < 1e-3
        assert largest_difference(reloaded, before) > 1e-2
