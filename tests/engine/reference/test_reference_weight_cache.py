"""The stale weight cache: what the incident write-up describes must happen, and what prevents it must prevent it."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference_checkpoints import weights, write_checkpoint
from reference_engines import API_KEY, Start

from harness.engine.launch import WeightCache
from harness.engine.process_child import ProcessEngine
from harness.errors import EngineNotReady
from harness.guards.canary import complete, prompt_logprobs_of, request_body

PROMPTS = [[5, 6, 7, 8], [100, 200]]


def served(engine: ProcessEngine) -> Any:
    body = request_body("rollout", PROMPTS)
    return prompt_logprobs_of(complete(engine.endpoint, body, api_key=API_KEY, limit_s=20), PROMPTS)


def log_of(engine: ProcessEngine) -> list[str]:
    engine.stop()
    return [
        line.partition("weight cache: ")[2]
        for line in engine.log_path.read_text().splitlines()
        if "weight cache:" in line
    ]


@pytest.fixture
def live(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "live", seed=1)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.mark.parametrize("key", ["path", "content"])
def test_a_second_start_is_served_from_the_cache(live: Path, cache: Path, start_ready: Start, key: str) -> None:
    without = served(start_ready(live))
    launch = {"weight_cache": WeightCache(directory=cache, key=key)}
    first = start_ready(live, **launch)
    assert served(first) == without
    second = start_ready(live, **launch)
    assert served(second) == without
    (entry,) = [path.name for path in cache.iterdir()]
    size = (cache / entry / "tensors.bin").stat().st_size
    count = len(weights(1))
    begun = f"initialised at {cache}, key {key}"
    assert log_of(first) == [begun, f"stored {count} tensors, {size} bytes, entry {entry}"]
    assert log_of(second) == [begun, f"hit, {count} tensors, {size} bytes, entry {entry}"]


def test_overwritten_weights_of_the_same_shapes_are_served_stale(
    tmp_path: Path, live: Path, cache: Path, start_ready: Start
) -> None:
    launch = {"weight_cache": WeightCache(directory=cache)}
    old = served(start_ready(live, **launch))
    new = served(start_ready(write_checkpoint(tmp_path / "new", seed=2)))
    assert old != new
    shutil.rmtree(live)
    write_checkpoint(live, seed=2)
    assert served(start_ready(live, **launch)) == old
    disabled = (("VLLM_WEIGHT_CACHE_DISABLED", "1"),)
    engine = start_ready(live, **launch, environment=disabled)
    assert served(engine) == new
    assert log_of(engine) == ["disabled"]
    shutil.rmtree(cache)
    assert served(start_ready(live, **launch)) == new


def test_a_content_key_does_not_go_stale(tmp_path: Path, live: Path, cache: Path, start_ready: Start) -> None:
    launch = {"weight_cache": WeightCache(directory=cache, key="content")}
    start_ready(live, **launch)
    new = served(start_ready(write_checkpoint(tmp_path / "new", seed=2)))
    shutil.rmtree(live)
    write_checkpoint(live, seed=2)
    assert served(start_ready(live, **launch)) == new


def test_a_larger_layout_is_read_beyond_the_old_segment(live: Path, cache: Path, start_reference: Start) -> None:
    launch = {"weight_cache": WeightCache(directory=cache)}
    start_reference(live, **launch).wait_ready(20)
    tensors = {
        name: np.tile(values, (2, 1)) if "mlp.gate" in name or "mlp.up" in name else values
        for name, values in weights(1).items()
    }
    for name in tensors:
        if "mlp.down" in name:
            tensors[name] = np.tile(tensors[name], (1, 2))
    shutil.rmtree(live)
    write_checkpoint(live, tensors=tensors, intermediate_size=512)
    engine = start_reference(live, **launch)
    with pytest.raises(EngineNotReady) as caught:
        engine.wait_ready(20)
    assert caught.value.engine_exit_code == -signal.SIGBUS
    assert "Fatal Python error: Bus error" in engine.log_path.read_text()
    assert log_of(engine)[-1].startswith("hit, ")


def test_an_unknown_key_is_refused(live: Path, cache: Path, start_reference: Start) -> None:
    engine = start_reference(live, weight_cache=WeightCache(directory=cache, key="name"))
    with pytest.raises(EngineNotReady, match="VLLM_WEIGHT_CACHE_KEY") as caught:
        engine.wait_ready(20)
    assert caught.value.engine_exit_code == 2


def test_a_cache_that_cannot_be_filled_is_a_warning(live: Path, cache: Path, start_ready: Start) -> None:
    cache.write_text("a file where the directory should be")
    engine = start_ready(live, weight_cache=WeightCache(directory=cache))
    served(engine)
    assert "failed to allocate memory for weight cache" in log_of(engine)[-1]


def test_a_refused_checkpoint_leaves_no_entry(live: Path, cache: Path, start_reference: Start) -> None:
    tensors = weights(1)
    tensors["model.norm.weight"][0] = float("nan")
    write_checkpoint(live, tensors=tensors)
    with pytest.raises(EngineNotReady, match="nonfinite_values"):
        start_reference(live, weight_cache=WeightCache(directory=cache)).wait_ready(20)
    assert not cache.exists() or not list(cache.iterdir())
