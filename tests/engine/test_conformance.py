"""What every engine must do, whichever it is: one suite, run against all that are there."""

from __future__ import annotations

import http.client
import json
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_kinds import ALL, API_KEY, EngineKind, opened

from harness.checkpoint.models import tiny_llama
from harness.clock import poll_until
from harness.engine.engine import Engine, EngineStarter, Inspectable, Killable, Pausable
from harness.engine.launch import SERVED_MODEL_NAME, Launch
from harness.engine.proc import STOPPED, find
from harness.engine.ready import probe_health
from harness.errors import EngineNotReady
from harness.guards.canary import complete, prompt_logprobs_of, request_body

PROMPTS = [[5, 6, 7, 8, 9, 10], [20, 21, 22, 23]]
MAX_MODEL_LEN = 64
LIMIT_S = 60.0

METRICS = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:prompt_tokens_total": "counter",
    "vllm:generation_tokens_total": "counter",
    "vllm:request_success_total": "counter",
    "vllm:iteration_tokens_total": "histogram",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
}


@pytest.fixture(scope="module", params=ALL)
def kind(request: pytest.FixtureRequest) -> EngineKind:
    chosen: EngineKind = request.param
    return chosen


@pytest.fixture(scope="module")
def directory(kind: EngineKind, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(kind.name)
    source = tiny_llama(1).build(made / "models")
    (made / "checkpoints").mkdir()
    shutil.copytree(source, made / "checkpoints" / "good")
    return made


@pytest.fixture(scope="module")
def starter(kind: EngineKind, directory: Path) -> Iterator[EngineStarter]:
    with opened(kind, directory) as starter:
        yield starter


def launch(directory: Path, name: str = "good", dtype: str = "float32") -> Launch:
    return Launch(
        checkpoint_root=directory / "checkpoints", checkpoint_name=name, dtype=dtype, max_model_len=MAX_MODEL_LEN
    )


@pytest.fixture(scope="module")
def engine(kind: EngineKind, starter: EngineStarter, directory: Path) -> Iterator[Engine]:
    """Give one engine that all tests share; the last two end it."""
    engine = starter.start(launch(directory), incarnation="good-1")
    assert engine.endpoint.startswith("http://127.0.0.1:")
    assert engine.exit_code() is None
    assert 0 < engine.wait_ready(kind.ready_limit_s) < kind.ready_limit_s
    yield engine
    engine.stop()


def ask(engine: Engine, method: str, path: str, body: Any = None, *, key: str = API_KEY) -> tuple[int, str, str]:
    """Send one request and return status, body and content type."""
    port = int(engine.endpoint.rsplit(":", 1)[1])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)
    try:
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, response.read().decode(), response.getheader("Content-Type") or ""
    finally:
        connection.close()


def canary(engine: Engine) -> Any:
    answer = complete(engine.endpoint, request_body(SERVED_MODEL_NAME, PROMPTS), api_key=API_KEY, limit_s=LIMIT_S)
    return prompt_logprobs_of(answer, PROMPTS)


def test_identity_says_what_runs(kind: EngineKind, starter: EngineStarter) -> None:
    identity = starter.identity()
    assert identity.kind == kind.name
    assert identity.label == f"{identity.name}-{identity.version}"
    assert all((identity.name, identity.version, identity.build, identity.hardware))
    assert (identity.name == "reference") is (kind.name == "reference")


def test_engine_has_every_optional_power(engine: Engine) -> None:
    assert isinstance(engine, Engine)
    assert isinstance(engine, Killable)
    assert isinstance(engine, Pausable)
    assert engine.incarnation == "good-1"


def test_processes_are_numbered_as_this_machine_numbers_them(engine: Engine) -> None:
    assert isinstance(engine, Inspectable)
    assert isinstance(engine, Pausable)
    everything, [server], core = engine.processes("all"), engine.processes("server"), engine.processes("core")
    [worker] = engine.processes("worker")
    assert {server, *core} <= {*everything}
    assert worker in core
    computing = [found for pid in core if (found := find(pid)) is not None]
    assert len(computing) == len(core) > 0
    assert all(process.is_running() for process in computing)
    engine.pause()
    try:
        poll_until(
            lambda: True if computing[0].state() == STOPPED else None, what="the core is frozen", limit_s=LIMIT_S
        )
    finally:
        engine.resume()
    assert find(server) is not None


def test_health_models_version(engine: Engine) -> None:
    assert probe_health(engine.endpoint, limit_s=LIMIT_S) == "HTTP 200"
    status, text, _ = ask(engine, "GET", "/v1/models")
    assert status == 200
    (model,) = json.loads(text)["data"]
    assert (model["id"], model["max_model_len"]) == (SERVED_MODEL_NAME, MAX_MODEL_LEN)
    status, text, _ = ask(engine, "GET", "/version")
    assert status == 200
    assert json.loads(text)["version"]


def test_api_key_is_needed(engine: Engine) -> None:
    assert ask(engine, "GET", "/v1/models", key="wrong")[0] == 401
    assert ask(engine, "POST", "/v1/completions", {"prompt": [5]}, key="wrong")[0] == 401


def test_prompt_logprobs_repeat_exactly(engine: Engine) -> None:
    rows = canary(engine)
    assert [len(row) for row in rows] == [5, 3]
    assert all(value < 0 for row in rows for value in row)
    assert canary(engine) == rows


def completion(engine: Engine, **fields: Any) -> tuple[int, Any]:
    status, text, _ = ask(engine, "POST", "/v1/completions", {"model": SERVED_MODEL_NAME, "temperature": 0, **fields})
    return status, json.loads(text)


def test_answer_has_text_logprobs_and_usage(engine: Engine) -> None:
    status, answer = completion(engine, prompt=PROMPTS[0], max_tokens=5, logprobs=2, ignore_eos=True)
    assert status == 200
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["text"]
    shown = choice["logprobs"]
    assert len(shown["tokens"]) == len(shown["token_logprobs"]) == len(shown["top_logprobs"]) == 5
    for own, top in zip(shown["token_logprobs"], shown["top_logprobs"], strict=True):
        assert own == max(top.values())
    assert answer["usage"]["prompt_tokens"] == len(PROMPTS[0])
    assert answer["usage"]["completion_tokens"] == 5


def test_stream_is_one_event_per_token_then_usage_then_the_mark(engine: Engine) -> None:
    fields = {"prompt": PROMPTS[0], "max_tokens": 5, "ignore_eos": True, "temperature": 0}
    _, whole = completion(engine, **fields)
    body = {"model": SERVED_MODEL_NAME, "stream": True, "stream_options": {"include_usage": True}, **fields}
    status, text, content_type = ask(engine, "POST", "/v1/completions", body)
    assert status == 200
    assert content_type.startswith("text/event-stream")
    *events, mark = (event.removeprefix("data: ") for event in text.split("\n\n") if event)
    assert mark == "[DONE]"
    *chunks, usage = (json.loads(event) for event in events)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 5
    assert len(chunks) == 5
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 4 + ["length"]


@pytest.mark.parametrize(
    ("status", "fields"),
    [
        (404, {"model": "other", "prompt": [5]}),
        (400, {"prompt": [5] * MAX_MODEL_LEN, "max_tokens": 1}),
        (400, {"prompt": [5], "max_tokens": 10 * MAX_MODEL_LEN}),
        (400, {"prompt": [5, 512]}),
        (400, {"prompt": []}),
        (400, {"prompt": [5], "max_tokens": 0}),
        (400, {"prompt": [5], "prompt_logprobs": 1, "stream": True}),
    ],
    ids=[
        "other-model",
        "prompt-too-long",
        "answer-too-long",
        "token-beyond",
        "no-prompt",
        "no-tokens",
        "stream-of-prompt",
    ],
)
def test_bad_requests_are_refused(engine: Engine, status: int, fields: dict[str, Any]) -> None:
    seen, answer = completion(engine, **fields)
    assert seen == status, answer
    assert answer["error"]["message"]
    assert completion(engine, prompt=[5], max_tokens=1)[0] == 200


def test_metrics_have_the_names_that_the_harness_reads(engine: Engine) -> None:
    def count(text: str) -> float:
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in text.splitlines()
            if line.startswith("vllm:generation_tokens_total{") and f'model_name="{SERVED_MODEL_NAME}"' in line
        )

    status, before, _ = ask(engine, "GET", "/metrics")
    assert status == 200
    kinds = dict(line.split()[2:4] for line in before.splitlines() if line.startswith("# TYPE "))
    assert {name: kinds.get(name) for name in METRICS} == METRICS
    completion(engine, prompt=[5], max_tokens=7, ignore_eos=True)
    poll_until(
        lambda: True if count(ask(engine, "GET", "/metrics")[1]) == count(before) + 7 else None,
        what="7 more generated tokens",
        limit_s=30,
    )


def test_paused_engine_answers_after_it_is_resumed(engine: Engine) -> None:
    assert isinstance(engine, Pausable)
    right = canary(engine)
    seen: list[Any] = []
    asking = threading.Thread(target=lambda: seen.append(canary(engine)))
    engine.pause()
    try:
        asking.start()
        asking.join(0.5)
        assert asking.is_alive()
        assert seen == []
    finally:
        engine.resume()
    asking.join(LIMIT_S)
    assert seen == [right]


def test_cut_checkpoint_is_refused_with_its_reason(kind: EngineKind, starter: EngineStarter, directory: Path) -> None:
    damaged = directory / "checkpoints" / "cut"
    shutil.copytree(directory / "checkpoints" / "good", damaged)
    (shard,) = damaged.glob("*.safetensors")
    shard.chmod(0o644)
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size // 2)
    engine = starter.start(launch(directory, "cut"), incarnation="cut-1")
    with pytest.raises(EngineNotReady) as caught:
        engine.wait_ready(kind.ready_limit_s)
    assert caught.value.engine_exit_code == 1
    assert caught.value.log_lines
    assert caught.value.log_path == engine.log_path
    assert caught.value.waited_s < kind.ready_limit_s
    assert engine.stop() == 1


def test_misspelt_dtype_ends_with_exit_code_2(kind: EngineKind, starter: EngineStarter, directory: Path) -> None:
    engine = starter.start(launch(directory, dtype="fp16"), incarnation="fp16-1")
    with pytest.raises(EngineNotReady) as caught:
        engine.wait_ready(kind.ready_limit_s)
    assert caught.value.engine_exit_code == 2
    assert any("fp16" in line for line in caught.value.log_lines)


def test_killed_server_is_gone(engine: Engine) -> None:
    assert isinstance(engine, Killable)
    assert engine.kill("server", signal.SIGKILL) > 0
    assert poll_until(engine.exit_code, what="the killed server ends", limit_s=30) == -signal.SIGKILL
    with pytest.raises(EngineNotReady):
        engine.wait_ready(10)
    assert probe_health(engine.endpoint, limit_s=5) != "HTTP 200"


def test_stopped_engine_keeps_its_log_without_the_key(engine: Engine) -> None:
    assert engine.stop() == engine.stop() == engine.exit_code()
    log = engine.log_path.read_text()
    assert log
    assert API_KEY not in log
