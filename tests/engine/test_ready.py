from __future__ import annotations

import io
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from harness.clock import now_ns
from harness.engine.ready import copy_log, first_error_lines, probe_health, read_log, scrub, wait_healthy
from harness.errors import EngineNotReady

KEY = "sk-0123456789"


@contextmanager
def server_answering(*statuses: int) -> Iterator[str]:
    """Serve these statuses one after another, the last one forever."""
    left = list(statuses)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status = left.pop(0) if len(left) > 1 else left[0]
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def refusing() -> str:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{closed.getsockname()[1]}"


def wait(endpoint: str, log_path: Path, **changes: object) -> float:
    arguments = {"limit_s": 5.0, "exit_code": lambda: None, "started_ns": now_ns(), "every_s": 0.01, **changes}
    return wait_healthy(incarnation="new-1", endpoint=endpoint, log_path=log_path, **arguments)  # type: ignore[arg-type]


def test_ready_only_after_a_200(tmp_path: Path) -> None:
    with server_answering(503, 503, 200) as endpoint:
        assert wait(endpoint, tmp_path / "log") >= 0
        assert probe_health(endpoint, limit_s=1) == "HTTP 200"


def test_time_counts_from_the_start_of_the_engine(tmp_path: Path) -> None:
    with server_answering(200) as endpoint:
        assert wait(endpoint, tmp_path / "log", started_ns=now_ns() - 7_000_000_000) >= 7


def test_a_server_that_never_says_200_is_named_with_its_last_answer(tmp_path: Path) -> None:
    with server_answering(503) as endpoint, pytest.raises(EngineNotReady) as caught:
        wait(endpoint, tmp_path / "log", limit_s=0.1)
    assert caught.value.last_probe == "HTTP 503"
    assert caught.value.engine_exit_code is None
    assert "limit 0.1 s" in str(caught.value)


def test_an_engine_that_ended_is_noticed_before_the_limit_with_the_end_of_its_log(
    tmp_path: Path, refusing: str
) -> None:
    log = tmp_path / "log"
    codes: list[int | None] = [None, None, 1]

    def exit_code() -> int | None:
        return codes.pop(0) if len(codes) > 1 else codes[0]

    with pytest.raises(EngineNotReady) as caught:
        wait(
            refusing,
            log,
            limit_s=60,
            exit_code=exit_code,
            finish_log=lambda: log.write_text("ValueError: header too large\n"),
        )
    assert caught.value.engine_exit_code == 1
    assert caught.value.waited_s < 30
    assert caught.value.log_lines == ("ValueError: header too large",)
    assert "ConnectionRefusedError" in caught.value.last_probe
    assert str(log) in str(caught.value)


def test_a_frozen_server_does_not_freeze_the_wait(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(EngineNotReady) as caught:
        wait(f"http://127.0.0.1:{silent.getsockname()[1]}", tmp_path / "log", limit_s=0.2)
    assert caught.value.waited_s < 3
    assert "timed out" in caught.value.last_probe


ENGINE_LOG = """\
(APIServer pid=7) INFO 11-30 02:05:35 [api_utils.py:286] non-default args: {'on_error': 'ValueError: x'}
(EngineCore pid=26) ERROR 11-30 02:05:52 [core.py:1100] EngineCore failed to start.
(EngineCore pid=26) ERROR 11-30 02:05:52 [core.py:1100] Traceback (most recent call last):
(EngineCore pid=26) ERROR 11-30 02:05:52 [core.py:1100]   File "/x/weight_utils.py", line 9, in copy
(EngineCore pid=26) ERROR 11-30 02:05:52 [core.py:1100]     raise RuntimeError("inner")
(EngineCore pid=26) ERROR 11-30 02:05:52 [core.py:1100] RuntimeError: size of tensor a (128) must match (256)
(EngineCore pid=26) Process EngineCore:
(EngineCore pid=26) Traceback (most recent call last):
(EngineCore pid=26) RuntimeError: size of tensor a (128) must match (256)
(APIServer pid=7) Traceback (most recent call last):
(APIServer pid=7)   File "/x/core_client.py", line 1, in wait
(APIServer pid=7) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


def test_the_root_cause_comes_first_and_once_and_what_the_parent_says_last() -> None:
    first, *others = first_error_lines(ENGINE_LOG)
    assert first == "RuntimeError: size of tensor a (128) must match (256)"
    assert first not in others
    assert others[-1].startswith("RuntimeError: Engine core initialization failed")


@pytest.mark.parametrize(
    ("log", "first"),
    [
        (
            "usage: vllm serve [model_tag] [options]\nvllm serve: error: argument --dtype: invalid choice: 'fp16'\n",
            "vllm serve: error: argument --dtype: invalid choice: 'fp16'",
        ),
        (
            "(APIServer pid=7) pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
            "(APIServer pid=7)   Value error, no config.json in it [type=value_error]\n",
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig "
            "Value error, no config.json in it [type=value_error]",
        ),
        (
            "ERROR 11-30 02:05:52 [x.py:1] cannot bind\nINFO:     Application shutdown complete.\n",
            "cannot bind",
        ),
        (
            "(Worker pid=4) \x1b[31msafetensors_rust.SafetensorError: bad\x07\x1b[0m\n",
            "safetensors_rust.SafetensorError: bad",
        ),
        ("Fatal Python error: Segmentation fault\n", "Fatal Python error: Segmentation fault"),
    ],
    ids=["option", "validation", "logged only", "control characters", "signal"],
)
def test_other_ways_to_fail(log: str, first: str) -> None:
    assert first_error_lines(log)[0] == first


def test_a_log_without_errors_has_none() -> None:
    log = "(APIServer pid=7) INFO 11-30 02:05:53 [entry.py:136] Supported tasks: ['generate']\nwarnings.warn('Error: x')\n"
    assert first_error_lines(log) == ()


def test_many_and_long_lines_are_cut() -> None:
    lines = first_error_lines("\n".join(f"ValueError: {i} {'x' * 5000}" for i in range(50)))
    assert len(lines) == 5
    assert max(map(len, lines)) <= 400


def test_a_missing_log_is_empty(tmp_path: Path) -> None:
    assert read_log(tmp_path / "absent") == ""


def test_every_secret_is_scrubbed_and_an_empty_one_changes_nothing() -> None:
    assert scrub(b"key sk-1, token t", ["sk-1", "t", ""]) == b"key [scrubbed], [scrubbed]oken [scrubbed]"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_a_secret_cut_by_the_chunks_is_scrubbed(size: int) -> None:
    text = f"first\nAuthorization: Bearer {KEY}\nlast without newline {KEY}".encode()
    sink = io.BytesIO()
    copy_log((text[i : i + size] for i in range(0, len(text), size)), sink, secrets=[KEY])
    assert sink.getvalue() == b"first\nAuthorization: Bearer [scrubbed]\nlast without newline [scrubbed]"


def test_a_secret_across_the_cut_of_an_endless_line_is_scrubbed() -> None:
    half = len(KEY) // 2
    sink = io.BytesIO()
    chunks = [b"x" * (1024 * 1024 + 1) + KEY[:half].encode(), KEY[half:].encode() + b"y" * 10]
    copy_log(chunks, sink, secrets=[KEY])
    assert KEY.encode() not in sink.getvalue()
    assert sink.getvalue().endswith(b"[scrubbed]" + b"y" * 10)


def test_lines_are_written_as_they_come() -> None:
    sink = io.BytesIO()
    seen = []

    def chunks() -> Iterator[bytes]:
        yield b"one\ntw"
        seen.append(sink.getvalue())
        yield b"o\n"

    copy_log(chunks(), sink, secrets=[])
    assert seen == [b"one\n"]
    assert sink.getvalue() == b"one\ntwo\n"
