"""An engine that is replaced finishes its requests first, also one that does not say how many it has."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from harness import service
from harness.service import Service


@pytest.fixture
def pages() -> Iterator[tuple[str, list[bytes]]]:
    """Give the address of a server and the pages it answers, one after the other, the last for ever."""
    left: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(left.pop(0) if len(left) > 1 else left[0])

        def log_message(self, *arguments: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", left
    server.shutdown()
    server.server_close()
    thread.join(5)


BUSY, IDLE = b"vllm:num_requests_running 1\n", b"vllm:num_requests_running 0\n"
SILENT = b"python_info 1\n"  # statistics are switched off


@pytest.mark.parametrize(
    ("said", "left"),
    [([BUSY, BUSY, IDLE, b"x"], 1), ([SILENT, SILENT, SILENT, IDLE, b"x"], 1), ([IDLE, b"x", b"x"], 2)],
    ids=["busy, then idle", "says nothing at first", "idle"],
)
def test_an_engine_that_does_not_say_how_busy_it_is_is_not_taken_for_idle(
    pages: tuple[str, list[bytes]], said: list[bytes], left: int
) -> None:
    endpoint, answers = pages
    answers += said
    engine: Any = SimpleNamespace(endpoint=endpoint, exit_code=lambda: None)
    ground: Any = SimpleNamespace(api_key="")
    Service(ground)._drain(engine)
    assert len(answers) == left


def test_the_wait_for_it_has_a_limit(pages: tuple[str, list[bytes]], monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint, answers = pages
    answers.append(SILENT)
    monkeypatch.setattr(service, "DRAIN_LIMIT_S", 0.2)
    engine: Any = SimpleNamespace(endpoint=endpoint, exit_code=lambda: None)
    ground: Any = SimpleNamespace(api_key="")
    Service(ground)._drain(engine)
