"""Other weights while the reference engine runs: all or none, and each planted defect is seen."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from reference_checkpoints import weights, write_checkpoint
from reference_engines import API_KEY, Start

from harness.clock import poll_until
from harness.engine.dev_api import DevApi, reloadable
from harness.engine.launch import Launch
from harness.engine.process_child import ProcessEngine
from harness.engine.reference.version import STEP_MS_VARIABLE
from harness.guards.canary import LogprobRows, complete, largest_difference, prompt_logprobs_of, request_body
from harness.guards.decoded import Steps, decode
from harness.under_way import UnderWay

PROMPTS = [[5, 6, 7, 8], [100, 200]]
LONG = tuple(range(3, 60))
DOWN = "model.layers.1.mlp.down_proj.weight"
# An answer that surely takes longer than a reload: a second and a half.
TOKENS, STEP_MS = 150, 10.0


@dataclass(frozen=True, slots=True)
class Live:
    """A running engine, its development endpoints, and another checkpoint for it."""

    engine: ProcessEngine
    api: DevApi
    new: Path

    def rows(self) -> LogprobRows:
        body = request_body("rollout", PROMPTS)
        return prompt_logprobs_of(complete(self.engine.endpoint, body, api_key=API_KEY, limit_s=20), PROMPTS)

    def long(self, **more: str) -> Steps:
        return decode(self.api, "rollout", LONG, max_tokens=3, **more)


@pytest.fixture
def live(checkpoint: Path, tmp_path: Path, start_ready: Start) -> Callable[..., Live]:
    def start(*defects: str, is_dev: bool = True, step_ms: float = 0) -> Live:
        wanted = reloadable(Launch(checkpoint_root=tmp_path, checkpoint_name="good"))
        environment = (*(wanted.environment if is_dev else ()), (STEP_MS_VARIABLE, f"{step_ms:g}"))
        engine = start_ready(
            checkpoint, *defects, extra_arguments=wanted.extra_arguments, environment=environment, max_model_len=256
        )
        api = DevApi(url=engine.endpoint, api_key=API_KEY, limit_s=20)
        return Live(engine, api, write_checkpoint(tmp_path / "new", seed=2))

    return start


def cold(start_ready: Start, path: Path) -> LogprobRows:
    engine = start_ready(path)
    body = request_body("rollout", PROMPTS)
    return prompt_logprobs_of(complete(engine.endpoint, body, api_key=API_KEY, limit_s=20), PROMPTS)


def test_endpoints_are_there_in_development_mode_alone(live: Callable[..., Live]) -> None:
    closed = live(is_dev=False).api
    replies = [closed.reload_weights(), closed.pause(), closed.checksums(), closed.weight_info()]
    assert [reply.status for reply in replies] == [404] * 4
    assert not replies[0].is_ok


def test_reload_equals_a_cold_start_and_is_asked_without_a_key_as_in_vllm(
    live: Callable[..., Live], start_ready: Start
) -> None:
    running = live()
    before, digests = running.rows(), running.api.checksums().body["checksums"]
    without_key = DevApi(url=running.engine.endpoint, limit_s=20)
    reply = without_key.reload_weights(str(running.new))
    assert reply.is_ok, reply
    assert largest_difference(running.rows(), before) > 0.01
    assert running.rows() == cold(start_ready, running.new)
    now = running.api.checksums().body["checksums"]
    assert now.keys() == digests.keys()
    assert all(now[name] != digests[name] for name in now)


@pytest.mark.parametrize("damage", ["missing", "shape", "absent"])
def test_refused_reload_leaves_the_old_weights(live: Callable[..., Live], tmp_path: Path, damage: str) -> None:
    running = live()
    before, digests = running.rows(), running.api.checksums().body
    damaged = tmp_path / "damaged"
    if damage == "missing":
        write_checkpoint(damaged, tensors={n: v for n, v in weights(2).items() if n != DOWN})
    elif damage == "shape":
        write_checkpoint(damaged, seed=2, num_hidden_layers=1, tensors=weights(2, layers=1))
    reply = running.api.reload_weights(str(damaged))
    assert reply.status == 500
    assert reply.said
    assert running.rows() == before
    assert running.api.checksums().body == digests


def test_prefixes_of_the_old_weights_are_not_used_after_a_reload(live: Callable[..., Live]) -> None:
    running = live()
    first, again = running.long(), running.long()
    assert again.tokens == first.tokens
    assert running.api.reload_weights(str(running.new)).is_ok
    warm, past_the_cache = running.long(), running.long(cache_salt="other")
    assert warm.tokens == past_the_cache.tokens
    assert warm.logprobs == pytest.approx(past_the_cache.logprobs, abs=1e-4)


def test_defect_keeps_prefix_cache_until_it_is_reset(live: Callable[..., Live]) -> None:
    running = live("keeps_prefix_cache")
    running.long()
    assert running.api.reload_weights(str(running.new)).is_ok
    stale, right = running.long(), running.long(cache_salt="other")
    assert stale.logprobs != pytest.approx(right.logprobs, abs=1e-2)
    assert running.api.reset_prefix_cache().is_ok
    assert running.long().logprobs == pytest.approx(right.logprobs, abs=1e-4)


def test_defect_reload_ignores_missing_tensor(live: Callable[..., Live], tmp_path: Path, start_ready: Start) -> None:
    running = live("reload_ignores_missing_tensor")
    mixed = {name: values for name, values in weights(2).items() if name != DOWN}
    damaged = write_checkpoint(tmp_path / "damaged", tensors=mixed)
    assert running.api.reload_weights(str(damaged)).is_ok
    mixture = write_checkpoint(tmp_path / "mixture", tensors={**mixed, DOWN: weights(1)[DOWN]})
    assert running.rows() == cold(start_ready, mixture)


def test_defect_dies_after_failed_reload(live: Callable[..., Live], tmp_path: Path) -> None:
    running = live("dies_after_failed_reload")
    assert running.api.reload_weights(str(tmp_path / "nowhere")).status == 500
    assert running.engine.exit_code() is None
    with pytest.raises(OSError, match=r".*"):
        running.rows()
    poll_until(running.engine.exit_code, what="end of the engine", limit_s=10)


def test_defect_checksums_of_nothing(live: Callable[..., Live]) -> None:
    digests = live("checksums_of_nothing").api.checksums().body["checksums"]
    assert set(digests.values()) == {hashlib.sha256(b"").hexdigest()}


def test_reload_under_requests_is_refused_until_they_have_ended(live: Callable[..., Live]) -> None:
    running = live(step_ms=STEP_MS)
    under_way = UnderWay(running.api, "rollout", [(5, 6), (7, 8)], max_tokens=TOKENS)
    assert running.api.reload_weights(str(running.new)).status == 409
    assert not running.api.reset_prefix_cache().is_ok
    assert running.api.pause().is_ok
    assert running.api.reload_weights(str(running.new)).is_ok
    waiting: list[LogprobRows] = []
    asker = threading.Thread(target=lambda: waiting.append(running.rows()), daemon=True)
    asker.start()
    assert running.api.resume().is_ok
    asker.join(20)
    assert waiting, "a request that came while it was paused is answered"
    seen = under_way.witness(0, call_ns=0, after_ns=0)
    assert seen.failed == 0


def test_defect_reloads_under_requests_mixes_their_answers(live: Callable[..., Live]) -> None:
    running = live("reloads_under_requests", step_ms=STEP_MS)
    whole = decode(running.api, "rollout", (5, 6), max_tokens=TOKENS)
    under_way = UnderWay(running.api, "rollout", [(5, 6)], max_tokens=TOKENS)
    assert running.api.reload_weights(str(running.new)).is_ok
    stream = under_way._streams[0]
    assert stream.thread is not None
    stream.thread.join(20)
    assert len(stream.tokens) == TOKENS
    assert stream.tokens[0] == whole.tokens[0]
    assert tuple(stream.tokens) != whole.tokens
    assert tuple(stream.tokens) != decode(running.api, "rollout", (5, 6), max_tokens=TOKENS).tokens


def test_what_is_not_known_is_refused(live: Callable[..., Live]) -> None:
    api = live().api
    assert api.call("POST", "/collective_rpc", {"method": "reset_weights"}).status == 400
    assert api.call("POST", "/pause?mode=often").status == 400
    assert api.start_weight_update().status == 500
    assert api.sleep().status == 500
    assert api.weight_info().body == {"weight_version": "default"}
    checksums = api.checksums().body["checksums"]
    compared = api.call("POST", "/weight_checker", {"action": "compare", "baseline": checksums})
    assert compared.body == {"match": True, "mismatches": []}
    other = api.call("POST", "/weight_checker", {"action": "compare", "baseline": {**checksums, DOWN: "0"}})
    assert other.body == {"match": False, "mismatches": [DOWN]}
