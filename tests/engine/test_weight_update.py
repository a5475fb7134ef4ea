"""Updates of weights over a transfer engine, on real vLLM: whole ones, and those that lack something.

What comes with vLLM needs CUDA to move tensors, so a transfer engine of our own reads them from files. The rest is vLLM's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from engine_kinds import API_KEY, PROCESS, opened

from harness.checkpoint.manifest import read_shard
from harness.checkpoint.models import tiny_llama
from harness.engine.dev_api import DevApi, Reply, reloadable, updatable
from harness.engine.engine import Engine
from harness.engine.launch import SERVED_MODEL_NAME, Launch
from harness.engine.ready import HEALTHY, probe_health
from harness.guards.canary import LogprobRows, complete, largest_difference, prompt_logprobs_of, request_body

pytestmark = pytest.mark.slow

PROMPTS = [[5, 6, 7, 8, 9, 10], [20, 21, 22, 23]]
LIMIT_S = 60.0
SAME = 1e-3
HALF_OF_FUSED = "model.layers.1.mlp.gate_proj.weight"


@dataclass(frozen=True, slots=True)
class Updated:
    """An engine that takes updates, and the checkpoints."""

    engine: Engine
    old: Path
    new: Path

    @property
    def api(self) -> DevApi:
        return DevApi(url=self.engine.endpoint, limit_s=LIMIT_S)

    def rows(self) -> LogprobRows:
        body = request_body(SERVED_MODEL_NAME, PROMPTS)
        return prompt_logprobs_of(complete(self.engine.endpoint, body, api_key=API_KEY, limit_s=LIMIT_S), PROMPTS)

    def reload(self, path: Path) -> LogprobRows:
        """Serve a checkpoint whole, which was seen to equal a cold start."""
        api = self.api
        require_ok(api.pause(), api.reload_weights(str(path)), api.reset_prefix_cache(), api.resume())
        return self.rows()

    def update(self, version: str, *chunks: list[str]) -> list[Reply]:
        """Update from the new checkpoint, chunk by chunk, and return what was answered."""
        api, file = self.api, f"../{self.new.name}/model.safetensors"  # relative to what is served
        replies = [api.pause(), api.start_weight_update()]
        replies += [api.update_weights(files={file: names}) for names in chunks]
        return [*replies, api.finish_weight_update(version), api.reset_prefix_cache(), api.resume()]


def require_ok(*replies: Reply) -> None:
    for reply in replies:
        assert reply.is_ok, reply


def names_of(path: Path) -> list[str]:
    return [tensor.name for tensor in read_shard(path / "model.safetensors").tensors]


@pytest.fixture(scope="module")
def updated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Updated]:
    place = tmp_path_factory.mktemp("updated")
    old, new = (tiny_llama(seed).build(place / "models") for seed in (1, 2))
    with opened(PROCESS, place) as starter:
        launch = Launch(checkpoint_root=old.parent, checkpoint_name=old.name, max_model_len=256)
        engine = starter.start(updatable(reloadable(launch)), incarnation="old-1")
        engine.wait_ready(PROCESS.ready_limit_s)
        yield Updated(engine, old, new)


def test_a_whole_update_is_a_reload_of_the_same_weights(updated: Updated) -> None:
    new = updated.reload(updated.new)
    old = updated.reload(updated.old)
    names = names_of(updated.new)
    require_ok(updated.api.init_weight_transfer())
    require_ok(*updated.update("2", names[: len(names) // 2], names[len(names) // 2 :]))
    assert updated.api.weight_info().body == {"weight_version": "2"}
    assert largest_difference(updated.rows(), new) < SAME
    assert largest_difference(updated.reload(updated.old), old) < SAME


def test_a_reload_without_a_path_reads_where_the_last_one_did(updated: Updated) -> None:
    """Not where the engine was started: after one reload from elsewhere, the roll-out of the path it serves is lost."""
    new = updated.reload(updated.new)
    api = updated.api
    require_ok(api.pause(), api.reload_weights(), api.reset_prefix_cache(), api.resume())
    assert largest_difference(updated.rows(), new) < SAME
    updated.reload(updated.old)


def test_an_update_of_nothing_says_that_it_succeeded(updated: Updated) -> None:
    old = updated.reload(updated.old)
    require_ok(*updated.update("3"))
    assert updated.api.weight_info().body == {"weight_version": "3"}, "a new version of the same weights"
    assert largest_difference(updated.rows(), old) < SAME


def test_an_update_that_lacks_layers_says_that_it_succeeded(updated: Updated) -> None:
    old, new = updated.reload(updated.old), updated.reload(updated.new)
    updated.reload(updated.old)
    require_ok(*updated.update("4", [name for name in names_of(updated.new) if "layers.1." not in name]))
    assert updated.api.weight_info().body == {"weight_version": "4"}
    served = updated.rows()
    print(f"from the old weights {largest_difference(served, old):.3g}, the new {largest_difference(served, new):.3g}")
    assert min(largest_difference(served, rows) for rows in (old, new)) > SAME, "a mixture, not one of the two"
    assert largest_difference(updated.reload(updated.old), old) < SAME


def test_an_update_that_lacks_half_of_a_fused_tensor_says_that_it_succeeded(updated: Updated) -> None:
    """Memory that nobody wrote is in its place: what is answered may be anything, also right."""
    require_ok(*updated.update("5", [name for name in names_of(updated.new) if name != HALF_OF_FUSED]))
    assert updated.api.weight_info().body == {"weight_version": "5"}
    updated.api.reload_weights(str(updated.old))


def test_steps_out_of_order_are_refused(updated: Updated) -> None:
    old = updated.reload(updated.old)
    api = updated.api
    require_ok(api.pause(), api.start_weight_update())
    assert "already active" in api.start_weight_update().said
    require_ok(api.finish_weight_update())
    assert "without a matching start_weight_update" in api.finish_weight_update().said
    require_ok(api.resume())
    assert largest_difference(updated.rows(), old) < SAME


def test_after_a_chunk_that_was_refused_the_next_request_finds_the_engine_dead(updated: Updated) -> None:
    """Last, since nothing serves afterwards. Health is 200 until then, and nothing is left to call but a restart."""
    api = updated.api
    require_ok(api.pause(), api.start_weight_update())
    refused = api.update_weights(files={"absent.safetensors": names_of(updated.new)})
    assert refused.status == 500, refused
    assert api.finish_weight_update("6").status == 500
    assert api.weight_info().body != {"weight_version": "6"}
    require_ok(api.resume())
    assert probe_health(updated.engine.endpoint, limit_s=LIMIT_S) == HEALTHY
    with pytest.raises((OSError, ValueError)):
        updated.rows()
