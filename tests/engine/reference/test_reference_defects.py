"""Every planted defect has its effect, and an engine without it does not show it."""

from __future__ import annotations

import http.client
import json
import signal
from pathlib import Path
from typing import Any

import pytest
from reference_checkpoints import weights, write_checkpoint
from reference_engines import API_KEY, Start

from harness.clock import poll_until
from harness.engine.process_child import ProcessEngine
from harness.engine.ready import probe_health
from harness.errors import EngineNotReady
from harness.guards.canary import complete, largest_difference, prompt_logprobs_of, request_body

PROMPTS = [[5, 6, 7, 8], [100, 200]]


def answer(engine: ProcessEngine, **fields: Any) -> dict[str, Any]:
    body = {**request_body("rollout", PROMPTS), **fields}
    return complete(engine.endpoint, body, api_key=API_KEY, limit_s=20)


def stream(engine: ProcessEngine, *, limit_s: float = 20.0, max_tokens: int = 8) -> bytes:
    """Read a whole stream.

    Raises: OSError and HTTPException as the transport does.
    """
    body = {"model": "rollout", "prompt": [5, 6], "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    port = int(engine.endpoint.rsplit(":", 1)[1])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=limit_s)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Authorization": f"Bearer {API_KEY}"})
        response = connection.getresponse()
        assert response.status == 200
        return response.read()
    finally:
        connection.close()


def data_events(text: bytes) -> list[bytes]:
    return [event.removeprefix(b"data: ") for event in text.split(b"\n\n") if event]


def test_without_defects_a_stream_ends_with_its_mark(checkpoint: Path, start_ready: Start) -> None:
    events = data_events(stream(start_ready(checkpoint)))
    assert len(events) == 9
    assert events[-1] == b"[DONE]"


@pytest.mark.parametrize(
    ("defect", "tensors"),
    [
        ("ignores_missing_tensor", {"drop": "model.layers.1.mlp.down_proj.weight"}),
        ("ignores_shape", {"cut": "model.layers.1.mlp.down_proj.weight"}),
        ("ignores_nonfinite", {"poison": "model.layers.1.mlp.down_proj.weight"}),
        ("lenient_like_vllm", {"drop": "model.layers.1.mlp.down_proj.weight"}),
    ],
)
def test_lenient_loading_serves_what_is_refused_otherwise(
    tmp_path: Path, start_reference: Start, defect: str, tensors: dict[str, str]
) -> None:
    damaged = weights(1)
    for what, name in tensors.items():
        if what == "drop":
            del damaged[name]
        elif what == "cut":
            damaged[name] = damaged[name][:, :-32].copy()
        else:
            damaged[name][0, 0] = float("inf")
    path = write_checkpoint(tmp_path / "damaged", tensors=damaged)
    with pytest.raises(EngineNotReady) as refused:
        start_reference(path).wait_ready(20)
    assert refused.value.engine_exit_code == 1
    engine = start_reference(path, defect)
    engine.wait_ready(20)
    assert complete(engine.endpoint, {"model": "rollout", "prompt": [5], "max_tokens": 2}, api_key=API_KEY, limit_s=20)


def test_lies_on_health(checkpoint: Path, start_ready: Start) -> None:
    engine = start_ready(checkpoint, "lies_on_health")
    with pytest.raises(ValueError, match="HTTP 500"):
        answer(engine)
    assert probe_health(engine.endpoint, limit_s=5) == "HTTP 200"


def test_wrong_answer_is_far_from_the_right_one(checkpoint: Path, start_ready: Start) -> None:
    right, again = (prompt_logprobs_of(answer(start_ready(checkpoint)), PROMPTS) for _ in range(2))
    wrong = prompt_logprobs_of(answer(start_ready(checkpoint, "wrong_answer")), PROMPTS)
    assert largest_difference(right, again) == 0
    assert largest_difference(right, wrong) > 0.1


def test_dies_on_first_request(checkpoint: Path, start_ready: Start) -> None:
    engine = start_ready(checkpoint, "dies_on_first_request")
    with pytest.raises((OSError, ValueError)):
        answer(engine)
    code = poll_until(engine.exit_code, what="exit", limit_s=10)
    assert code == -signal.SIGSEGV
    engine.stop()
    assert "Fatal Python error: Segmentation fault" in engine.log_path.read_text()


def test_hangs_on_request(checkpoint: Path, start_ready: Start) -> None:
    engine = start_ready(checkpoint, "hangs_on_request")
    with pytest.raises(TimeoutError):
        stream(engine, limit_s=0.5)
    assert probe_health(engine.endpoint, limit_s=5) == "HTTP 200"
    assert engine.stop() == 0


@pytest.mark.parametrize(("max_tokens", "sent"), [(8, 2), (1, 1)])
def test_truncates_stream(checkpoint: Path, start_ready: Start, max_tokens: int, sent: int) -> None:
    events = data_events(stream(start_ready(checkpoint, "truncates_stream"), max_tokens=max_tokens))
    assert len(events) == sent
    assert events[-1] != b"[DONE]"


def test_inband_error(checkpoint: Path, start_ready: Start) -> None:
    events = data_events(stream(start_ready(checkpoint, "inband_error")))
    assert json.loads(events[2])["error"]["code"] == 500
    assert events[3:] == [b"[DONE]"]


def test_resets_stream(checkpoint: Path, start_ready: Start) -> None:
    engine = start_ready(checkpoint, "resets_stream")
    with pytest.raises(ConnectionResetError):
        stream(engine)
    assert probe_health(engine.endpoint, limit_s=5) == "HTTP 200"


def test_never_ready(checkpoint: Path, start_reference: Start) -> None:
    engine = start_reference(checkpoint, "never_ready")
    with pytest.raises(EngineNotReady, match="ConnectionRefusedError") as caught:
        engine.wait_ready(1.0)
    assert caught.value.engine_exit_code is None
    assert engine.stop() == 0


def test_ignores_stop(checkpoint: Path, start_ready: Start) -> None:
    assert start_ready(checkpoint).stop() == 0
    assert start_ready(checkpoint, "ignores_stop").stop(grace_s=0.5) == -signal.SIGKILL


def test_hears_stop_late(checkpoint: Path, start_ready: Start) -> None:
    assert start_ready(checkpoint, "hears_stop_late").stop(grace_s=20.0) == 0
    assert start_ready(checkpoint, "hears_stop_late").stop(grace_s=0.1) == -signal.SIGKILL


def test_slower_30_percent(checkpoint: Path, start_ready: Start) -> None:
    def inter_token_ms(*defects: str) -> float:
        engine = start_ready(checkpoint, *defects, environment=(("ROLLOUT_REFERENCE_STEP_MS", "5"),))
        stream(engine, max_tokens=101)
        port = int(engine.endpoint.rsplit(":", 1)[1])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        try:
            connection.request("GET", "/metrics")
            lines = connection.getresponse().read().decode().splitlines()
        finally:
            connection.close()
        total = next(line for line in lines if line.startswith("vllm:inter_token_latency_seconds_sum"))
        return float(total.rsplit(" ", 1)[1]) * 1000 / 100

    # Lower bounds only: a busy machine makes both slower.
    assert inter_token_ms() >= 5.0
    assert inter_token_ms("slower_30_percent") >= 6.5


def test_an_unknown_defect_is_refused_at_start(checkpoint: Path, start_reference: Start) -> None:
    engine = start_reference(checkpoint, "typo")
    with pytest.raises(EngineNotReady, match='unknown defect "typo"') as caught:
        engine.wait_ready(20)
    assert caught.value.engine_exit_code == 2
