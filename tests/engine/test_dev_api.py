"""What a call to a development endpoint comes to is a reply, whatever happens."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from harness.engine.dev_api import DEV_MODE, DevApi, reloadable
from harness.engine.engine import Reloadable
from harness.engine.launch import Launch


class Answering(BaseHTTPRequestHandler):
    """Answers what the test says, and remembers what was asked."""

    asked: ClassVar[list[tuple[str, str, Any]]] = []
    answer: ClassVar[tuple[int, bytes]] = (200, b"")

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.asked.append((self.command, self.path, json.loads(raw) if raw else None))
        status, body = self.answer
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def api() -> Iterator[DevApi]:
    Answering.asked.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield DevApi(url=f"http://127.0.0.1:{server.server_port}", api_key="secret-key", limit_s=5)
        server.shutdown()
        thread.join(5)


def test_calls_are_what_vllm_takes(api: DevApi) -> None:
    assert isinstance(api, Reloadable)
    Answering.answer = (200, b'{"results":[null]}')
    api.reload_weights()
    api.reload_weights("/checkpoints/b")
    api.pause()
    api.finish_weight_update("7")
    api.checksums()
    assert Answering.asked == [
        ("POST", "/collective_rpc", {"method": "reload_weights"}),
        ("POST", "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": "/checkpoints/b"}}),
        ("POST", "/pause?mode=wait&clear_cache=false", None),
        ("POST", "/finish_weight_update", {"weight_version": "7"}),
        ("POST", "/weight_checker", {"action": "checksum"}),
    ]


def test_refusal_is_a_reply_without_the_key(api: DevApi) -> None:
    Answering.answer = (500, b'{"error": {"message": "secret-key of \\n no use"}}')
    reply = api.reload_weights()
    assert (reply.status, reply.is_ok, reply.call) == (500, False, "reload_weights")
    assert "secret-key" not in reply.said
    assert "***" in reply.said
    assert reply.as_json()["status"] == 500


def test_words_of_a_worker_are_unwrapped(api: DevApi) -> None:
    wrapped = (
        "Call failed: Worker failed with error 'no tensor 'x'', please check the stack trace above for the root cause"
    )
    Answering.answer = (500, json.dumps({"error": {"message": wrapped}}).encode())
    assert api.reload_weights().said == "no tensor 'x'"


def test_success_that_is_denied_in_the_body_is_none(api: DevApi) -> None:
    Answering.answer = (200, b'{"success": false}')
    assert not api.reset_prefix_cache().is_ok
    Answering.answer = (200, b"")
    assert api.reset_prefix_cache().is_ok
    Answering.answer = (200, b"[1, 2]")
    assert api.weight_info().body == {}


def test_no_answer_is_a_reply_with_status_zero() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        reply = DevApi(url=f"http://127.0.0.1:{held.getsockname()[1]}", limit_s=5).pause()
    assert reply.status == 0
    assert "ConnectionRefusedError" in reply.said
    assert not reply.is_ok


def test_only_a_reloadable_launch_has_development_endpoints(tmp_path: Any) -> None:
    launch = Launch(checkpoint_root=tmp_path, checkpoint_name="live", extra_arguments=("--no-enable-prefix-caching",))
    opened = reloadable(launch)
    assert DEV_MODE in opened.environment
    assert DEV_MODE not in launch.environment
    assert opened.extra_arguments == launch.extra_arguments  # what was asked for stays
    assert (
        "--enable-prefix-caching"
        in reloadable(Launch(checkpoint_root=tmp_path, checkpoint_name="live")).extra_arguments
    )
