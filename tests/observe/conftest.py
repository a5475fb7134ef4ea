"""A server with the routes that observers ask."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


class Stand:
    """What the server answers, changeable while it runs, and what it was asked."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.status = 200
        self.metrics: bytes = b"vllm:num_requests_running 1\n"
        self.drip = threading.Event()  # when set: the body comes in pieces and never ends
        self.hold = threading.Event()  # when set: no answer until it is cleared or the server closes
        self.closing = threading.Event()
        self.asked: list[tuple[str, str]] = []


@pytest.fixture
def stand() -> Iterator[Stand]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.asked.append((self.path, self.headers.get("Authorization", "")))
            while seen.hold.is_set() and not seen.closing.wait(0.02):
                pass
            self.send_response(seen.status)
            self.end_headers()
            if self.path == "/metrics":
                self.wfile.write(seen.metrics)
            while seen.drip.is_set() and not seen.closing.wait(0.05):
                self.wfile.write(b"# \n")

        def log_message(self, *arguments: object) -> None: ...

        def handle(self) -> None:
            try:
                super().handle()
            except OSError:
                self.close_connection = True

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    seen = Stand(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield seen
    seen.closing.set()
    server.shutdown()
    server.server_close()
    thread.join(5)
