"""Weights reloaded in place under a prefix cache that was not reset: short prompts answer rightly, long ones do not.

Real vLLM with its endpoints for development; `harness canary --deep` is what notices.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engine_kinds import API_KEY, PROCESS, opened

from harness.checkpoint.models import tiny_llama
from harness.cli import main
from harness.engine.engine import Engine
from harness.engine.launch import SERVED_MODEL_NAME, Launch
from harness.guards.canary import Golden
from harness.guards.decoded import decode
from harness.guards.engine_api import EngineApi

pytestmark = pytest.mark.slow

LIMIT_S = 60.0
MAX_MODEL_LEN = 512
SEEDS = {"asked": 1, "not asked": 2}  # of long prompts: one that the engine has in its cache, and one that it has not

Canary = Callable[..., int]


def post(engine: Engine, path: str, body: dict[str, object] | None = None) -> bytes:
    """Send a request of the dev mode and return the answer; another status than 2xx raises."""
    request = urllib.request.Request(
        engine.endpoint + path,
        data=json.dumps(body or {}).encode(),
        headers={"Content-Type": "application/json", "Authorization": f"Bearer {API_KEY}"},
    )
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
        content: bytes = answer.read()
    return content


def reload(engine: Engine, checkpoint: Path) -> None:
    post(engine, "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(checkpoint)}})


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("models")
    return tiny_llama(seed=1).build(root), tiny_llama(seed=2).build(root)


@pytest.fixture(scope="module")
def engine_on_old(
    checkpoints: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, dict[str, Path]]]:
    """Give an engine that serves the old checkpoint, and golden files of the new one from a cold start on that."""
    place = tmp_path_factory.mktemp("engines")
    old, new = checkpoints
    goldens = {name: place / f"{seed}.json" for name, seed in SEEDS.items()}
    with opened(PROCESS, place) as starter, pytest.MonkeyPatch.context() as patched:
        patched.setenv("VLLM_API_KEY", API_KEY)

        def started(checkpoint: Path, name: str) -> Engine:
            launch = Launch(
                checkpoint_root=checkpoint.parent,
                checkpoint_name=checkpoint.name,
                max_model_len=MAX_MODEL_LEN,
                extra_arguments=("--enable-prompt-tokens-details",),
                environment=(("VLLM_SERVER_DEV_MODE", "1"),),
            )
            engine = starter.start(launch, incarnation=name)
            engine.wait_ready(PROCESS.ready_limit_s)
            return engine

        cold = started(new, "cold-on-new")
        for name, seed in SEEDS.items():
            call = ["golden", cold.endpoint, "--out", str(goldens[name]), "--checkpoint", str(new), "--deep"]
            assert main([*call, "--seed", str(seed)]) == 0
        cold.stop()
        yield started(old, "on-old"), goldens


def test_stale_kv_is_noticed_by_deep_and_by_nothing_else(
    checkpoints: tuple[Path, Path],
    engine_on_old: tuple[Engine, dict[str, Path]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    old, new = checkpoints
    engine, goldens = engine_on_old

    def canary(which: str, *more: str) -> int:
        return main(["canary", engine.endpoint, "--golden", str(goldens[which]), *more])

    def short() -> list[int]:
        return [canary("asked", "--rotation", str(rotation)) for rotation in range(4)]

    assert canary("asked", "--deep") == 1  # the old checkpoint answers; its long prompt is in the prefix cache now
    assert "it is not the KV cache" in capsys.readouterr().out
    reload(engine, new)
    assert short() == [0, 0, 0, 0]  # prompt logprobs never come from the prefix cache
    capsys.readouterr()
    assert canary("asked", "--deep") == 1
    said = capsys.readouterr().out
    assert "the golden's checkpoint answered" in said
    assert "asked past the prefix cache it is right" in said
    assert "the KV cache is stale, reset it or start anew" in said
    # The limit of it: what was not asked before the reload is not stale, and says nothing about what was.
    assert canary("not asked", "--deep") == 0
    assert canary("asked", "--deep") == 1

    assert json.loads(post(engine, "/reset_prefix_cache")) == {"success": True}
    assert [canary("asked", "--deep"), canary("asked", "--deep", "--all")] == [0, 0]
    assert short() == [0, 0, 0, 0]
    reload(engine, old)
    assert short() == [1, 1, 1, 1]


def test_users_get_stale_answers_to_long_prompts(
    checkpoints: tuple[Path, Path], engine_on_old: tuple[Engine, dict[str, Path]]
) -> None:
    """What `--deep` warns of: the same request, answered otherwise because somebody asked it before the reload."""
    old, new = checkpoints
    engine, goldens = engine_on_old
    known = Golden.load(goldens["not asked"]).deep
    assert known is not None
    api = EngineApi(url=engine.endpoint, api_key=API_KEY, limit_s=LIMIT_S)

    def difference(**more: str) -> float:
        return known.difference(decode(api, SERVED_MODEL_NAME, known.prompt, max_tokens=len(known.tokens), **more))

    reload(engine, old)
    post(engine, "/reset_prefix_cache")
    assert difference() > known.tolerance  # the old weights
    reload(engine, new)
    assert difference() > known.tolerance
    assert difference(cache_salt="of its own") <= known.tolerance
    post(engine, "/reset_prefix_cache")
    assert difference() <= known.tolerance
