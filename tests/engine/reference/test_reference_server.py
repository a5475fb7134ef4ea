"""The HTTP surface, asked through sockets."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from reference_checkpoints import weights, write_checkpoint
from reference_engines import API_KEY, READY_LIMIT_S, Start, starting

from harness.clock import poll_until
from harness.engine.process_child import ProcessEngine
from harness.guards.canary import complete, prompt_logprobs_of, request_body

PROMPTS = [[5, 6, 7], [9, 8]]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessEngine]:
    directory = tmp_path_factory.mktemp("server")
    with starting(directory) as start:
        engine = start(write_checkpoint(directory / "good", seed=1), dtype="float32", max_model_len=64)
        engine.wait_ready(READY_LIMIT_S)
        yield engine


class Client:
    """One keep-alive connection."""

    def __init__(self, engine: ProcessEngine) -> None:
        port = int(engine.endpoint.rsplit(":", 1)[1])
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)

    def ask(self, method: str, path: str, body: Any = None, key: str | None = API_KEY) -> tuple[int, Any, str]:
        headers = {"Content-Type": "application/json"}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        raw = body if isinstance(body, bytes) or body is None else json.dumps(body)
        self.connection.request(method, path, raw, headers)
        response = self.connection.getresponse()
        text = response.read()
        kind = response.getheader("Content-Type") or ""
        return response.status, json.loads(text) if text and "json" in kind else text.decode(), kind

    def complete(self, **fields: Any) -> tuple[int, Any]:
        status, answer, _ = self.ask("POST", "/v1/completions", {"model": "rollout", **fields})
        return status, answer

    def events(self, **fields: Any) -> list[Any]:
        status, text, kind = self.ask("POST", "/v1/completions", {"model": "rollout", "stream": True, **fields})
        assert status == 200
        assert kind.startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]


@pytest.fixture
def client(engine: ProcessEngine) -> Iterator[Client]:
    client = Client(engine)
    yield client
    client.connection.close()


def test_get_routes(client: Client) -> None:
    assert client.ask("GET", "/health")[0] == 200
    assert client.ask("GET", "/health", key=None)[0] == 200
    assert client.ask("GET", "/version")[1] == {"version": "1.0"}
    status, models, _ = client.ask("GET", "/v1/models")
    assert status == 200
    assert models["data"][0]["id"] == "rollout"
    assert models["data"][0]["max_model_len"] == 64
    assert client.ask("GET", "/nothing")[0] == 404
    assert client.ask("GET", "/v1/completions")[0] == 405
    assert client.ask("POST", "/health", {})[0] == 405


@pytest.mark.parametrize("key", [None, "", "wrong", API_KEY + "x"])
def test_the_api_key_is_needed_below_v1(client: Client, key: str | None) -> None:
    assert client.ask("GET", "/v1/models", key=key)[:2] == (401, {"error": "Unauthorized"})
    assert client.ask("POST", "/v1/completions", {"prompt": [5]}, key=key)[0] == 401
    assert client.ask("GET", "/v1/models")[0] == 200  # the connection is still in step


def test_prompt_logprobs_have_the_layout_of_vllm(client: Client) -> None:
    status, answer = client.complete(prompt=PROMPTS[0], max_tokens=2, prompt_logprobs=2, logprobs=2, temperature=0)
    assert status == 200
    choice = answer["choices"][0]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    for token, position in zip((6, 7), others, strict=True):
        own = position[str(token)]
        assert own["decoded_token"] == f"t{token}"
        assert own["logprob"] < 0
        likely = sorted(position.values(), key=lambda entry: entry["rank"])
        assert [entry["rank"] for entry in likely] == [1, 2, own["rank"]]
        assert likely[0]["logprob"] >= likely[1]["logprob"] >= own["logprob"]
    shown = choice["logprobs"]
    assert [len(values) for values in shown.values()] == [2, 2, 2, 2]
    assert shown["token_logprobs"][0] == max(shown["top_logprobs"][0].values())
    assert choice["text"] == "".join(f" {token}" for token in shown["tokens"])
    assert answer["usage"] == {"prompt_tokens": 3, "total_tokens": 5, "completion_tokens": 2}


def test_the_canary_client_reads_the_answer(engine: ProcessEngine) -> None:
    answer = complete(engine.endpoint, request_body("rollout", PROMPTS), api_key=API_KEY, limit_s=20)
    rows = prompt_logprobs_of(answer, PROMPTS)
    assert [len(row) for row in rows] == [2, 1]


def test_a_text_prompt_equals_its_token_ids(client: Client) -> None:
    _, by_text = client.complete(prompt="t5 t6 t7", max_tokens=4, logprobs=0)
    _, by_ids = client.complete(prompt=[5, 6, 7], max_tokens=4, logprobs=0)
    assert by_text["choices"] == by_ids["choices"]
    _, several = client.complete(prompt=["t5 t6 t7", "t9"], max_tokens=4, logprobs=0)
    assert several["choices"][0] == by_ids["choices"][0]
    assert several["choices"][1]["index"] == 1


def test_a_stream_gives_the_same_tokens_one_event_each(client: Client) -> None:
    _, whole = client.complete(prompt=PROMPTS, max_tokens=5, logprobs=0, ignore_eos=True)
    events = client.events(
        prompt=PROMPTS, max_tokens=5, logprobs=0, ignore_eos=True, stream_options={"include_usage": True}
    )
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"] == []
    assert events[-2]["usage"] == whole["usage"]
    chunks = [event["choices"][0] for event in events[:-2]]
    assert len(chunks) == 10
    for index in (0, 1):
        mine = [chunk for chunk in chunks if chunk["index"] == index]
        assert [chunk["finish_reason"] for chunk in mine] == [None] * 4 + ["length"]
        assert "".join(chunk["text"] for chunk in mine) == whole["choices"][index]["text"]
        offsets = [chunk["logprobs"]["text_offset"][0] for chunk in mine]
        assert offsets == whole["choices"][index]["logprobs"]["text_offset"]


def test_without_the_option_a_stream_has_no_usage(client: Client) -> None:
    events = client.events(prompt=[5], max_tokens=2, ignore_eos=True)
    assert [event if event == "[DONE]" else len(event["choices"]) for event in events] == [1, 1, "[DONE]"]


def test_tokens_can_be_shown_as_ids(client: Client) -> None:
    fields = {"prompt": [5, 6, 7], "max_tokens": 3, "logprobs": 2}
    _, as_text = client.complete(**fields)
    _, as_ids = client.complete(**fields, return_tokens_as_token_ids=True, return_token_ids=True)
    choice = as_ids["choices"][0]
    assert choice["prompt_token_ids"] == [5, 6, 7]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert as_text["choices"][0]["logprobs"]["tokens"] == [f"t{token}" for token in choice["token_ids"]]


def test_the_end_token_ends_an_answer_unless_ignored(tmp_path: Path, start_ready: Start, client: Client) -> None:
    _, answer = client.complete(prompt=[5, 6, 7], max_tokens=3, logprobs=0)
    first = int(answer["choices"][0]["logprobs"]["tokens"][0].removeprefix("t"))
    ending = Client(start_ready(write_checkpoint(tmp_path / "e", seed=1, eos_token_id=[first, 2]), dtype="float32"))
    try:
        _, stopped = ending.complete(prompt=[5, 6, 7], max_tokens=3)
        assert stopped["choices"][0]["finish_reason"] == "stop"
        assert stopped["usage"]["completion_tokens"] == 1
        _, ignored = ending.complete(prompt=[5, 6, 7], max_tokens=3, ignore_eos=True)
        assert ignored["choices"][0]["finish_reason"] == "length"
        assert ignored["usage"]["completion_tokens"] == 3
    finally:
        ending.connection.close()


BAD: dict[str, tuple[int, Any]] = {
    "other model": (404, {"model": "other", "prompt": [5]}),
    "no prompt": (400, {}),
    "empty prompt": (400, {"prompt": []}),
    "empty row": (400, {"prompt": [[5], []]}),
    "mixed row": (400, {"prompt": [5, "a"]}),
    "id beyond the vocabulary": (400, {"prompt": [5, 512]}),
    "negative id": (400, {"prompt": [-1]}),
    "boolean id": (400, {"prompt": [True]}),
    "too long": (400, {"prompt": [5] * 60, "max_tokens": 5}),
    "no tokens": (400, {"prompt": [5], "max_tokens": 0}),
    "tokens as text": (400, {"prompt": [5], "max_tokens": "5"}),
    "too many logprobs": (400, {"prompt": [5], "logprobs": 21}),
    "negative logprobs": (400, {"prompt": [5], "prompt_logprobs": -2}),
    "prompt logprobs in a stream": (400, {"prompt": [5], "prompt_logprobs": 1, "stream": True}),
    "negative temperature": (400, {"prompt": [5], "temperature": -1}),
    "two answers": (400, {"prompt": [5], "n": 2}),
    "stop strings": (400, {"prompt": [5], "stop": ["x"]}),
    "stream as text": (400, {"prompt": [5], "stream": "yes"}),
    "stream as number": (400, {"prompt": [5], "stream": 1}),
    "options as list": (400, {"prompt": [5], "stream": True, "stream_options": [1]}),
}


@pytest.mark.parametrize(("status", "fields"), BAD.values(), ids=BAD.keys())
def test_bad_requests_are_refused_and_the_engine_goes_on(client: Client, status: int, fields: Any) -> None:
    seen, answer, _ = client.ask("POST", "/v1/completions", {"model": "rollout", **fields})
    assert seen == status, answer
    assert answer["error"]["code"] == status
    assert answer["error"]["message"]
    assert client.complete(prompt=[5], max_tokens=1)[0] == 200


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000])
def test_bodies_that_are_no_json_object_are_refused(client: Client, body: bytes) -> None:
    assert client.ask("POST", "/v1/completions", body)[0] == 400
    assert client.ask("GET", "/health")[0] == 200


def test_not_a_number_in_logprobs_is_answered_as_vllm_does(tmp_path: Path, start_ready: Start) -> None:
    tensors = weights(1)
    tensors["model.norm.weight"][3] = float("nan")
    path = write_checkpoint(tmp_path / "nan", tensors=tensors)
    client = Client(start_ready(path, "ignores_nonfinite"))
    try:
        status, answer = client.complete(prompt=[5, 6], max_tokens=2, logprobs=0)
        assert status == 400
        assert "Out of range float values are not JSON compliant" in answer["error"]["message"]
        assert client.complete(prompt=[5, 6], max_tokens=2)[0] == 200
    finally:
        client.connection.close()


def metric(client: Client, name: str) -> float:
    _, text, kind = client.ask("GET", "/metrics")
    assert kind.startswith("text/plain")
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name + "{"))


def test_metrics_count_requests_and_tokens(client: Client) -> None:
    grows = {
        "vllm:prompt_tokens_total": 5,
        "vllm:generation_tokens_total": 8,
        "vllm:request_success_total": 2,
        "vllm:time_to_first_token_seconds_count": 2,
        "vllm:inter_token_latency_seconds_count": 6,
        "vllm:e2e_request_latency_seconds_count": 2,
        "vllm:iteration_tokens_total_sum": 13,
    }
    before = {name: metric(client, name) for name in grows}
    client.complete(prompt=PROMPTS, max_tokens=4, ignore_eos=True)
    poll_until(
        lambda: {name: metric(client, name) - before[name] for name in grows} == grows or None,
        what=f"metrics grown by {grows}",
        limit_s=10,
    )
    assert metric(client, "vllm:num_requests_running") == 0
    assert metric(client, "vllm:num_requests_waiting") == 0
    _, text, _ = client.ask("GET", "/metrics")
    assert 'vllm:request_success_total{engine="0",model_name="rollout",finished_reason="length"}' in text
    assert 'vllm:time_to_first_token_seconds_bucket{engine="0",model_name="rollout",le="+Inf"}' in text


def test_answers_are_bit_equal_under_load(engine: ProcessEngine) -> None:
    body = {**request_body("rollout", [list(range(3, 40)), [7, 7, 7]], max_tokens=12), "logprobs": 2}

    def ask() -> Any:
        return complete(engine.endpoint, body, api_key=API_KEY, limit_s=60)["choices"]

    idle = ask()
    busy: list[Any] = []
    threads = [threading.Thread(target=lambda: busy.extend(ask() for _ in range(5))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(busy) == 30
    assert all(answer == idle for answer in busy)


def test_a_client_that_goes_away_frees_its_place(checkpoint: Path, start_ready: Start) -> None:
    slow = (("ROLLOUT_REFERENCE_STEP_MS", "20"),)
    engine = start_ready(checkpoint, max_model_len=1024, environment=slow)
    leaving, client = Client(engine), Client(engine)
    try:
        body = {"model": "rollout", "prompt": [5], "max_tokens": 1000, "ignore_eos": True, "stream": True}
        headers = {"Authorization": f"Bearer {API_KEY}"}
        leaving.connection.request("POST", "/v1/completions", json.dumps(body), headers)
        assert leaving.connection.getresponse().read1().startswith(b"data: ")
        assert metric(client, "vllm:num_requests_running") == 1
        leaving.connection.close()
        poll_until(
            lambda: metric(client, "vllm:num_requests_running") == 0 or None,
            what="no request runs",
            limit_s=READY_LIMIT_S,
        )
        _, text, _ = client.ask("GET", "/metrics")
        assert 'finished_reason="abort"} 1.0' in text
    finally:
        leaving.connection.close()
        client.connection.close()
