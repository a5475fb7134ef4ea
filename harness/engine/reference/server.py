"""The HTTP surface: completions, models, health, metrics and version, as vLLM answers them."""

from __future__ import annotations

import hmac
import signal
import socket
import struct
import threading
import time
import uuid
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Empty
from typing import Any

from harness.engine.reference import dev_routes
from harness.engine.reference.completions import (
    AnswerText,
    CompletionRequest,
    Refused,
    error_body,
    parse_request,
    prompt_logprobs,
    to_json,
)
from harness.engine.reference.defects import PlantedDefect
from harness.engine.reference.live import LiveModel
from harness.engine.reference.loading import Loaded
from harness.engine.reference.metrics import Metrics
from harness.engine.reference.scheduler import Failure, Generation, Scheduler, Step
from harness.engine.reference.version import REFERENCE_VERSION
from harness.engine.reference.weight_update import WeightUpdate

_BODY_LIMIT_BYTES = 16 * 1024 * 1024
_STEP_LIMIT_S = 600.0
_DAMAGED_AFTER_TOKENS = 2  # where streams with a planted defect break, shorter ones at their end


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What every connection shares."""

    loaded: Loaded
    scheduler: Scheduler
    metrics: Metrics
    model_name: str
    model_root: str
    max_model_len: int
    api_key: str | None
    defects: frozenset[PlantedDefect]
    live: LiveModel | None = None  # in development mode alone
    update: WeightUpdate | None = None  # with a transfer engine alone


class ReferenceServer(ThreadingHTTPServer):
    """Serves on a socket that is already bound; it begins to listen when the model is loaded."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 1024

    def __init__(self, bound: socket.socket, service: Service) -> None:
        address = bound.getsockname()
        handler = _LocalHandler if bound.family == socket.AF_UNIX else _Handler
        super().__init__(address, handler, bind_and_activate=False)
        self.socket.close()
        self.socket = bound
        self.server_address = address
        self.server_name, self.server_port = "localhost", address[1] if isinstance(address, tuple) else 0
        self.service = service
        self.server_activate()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing when a client goes away; anything else is worth a traceback."""
        import sys

        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 64 * 1024
    timeout = 600
    server: ReferenceServer

    def do_GET(self) -> None:
        self._discard_body()
        path = self.path.split("?", 1)[0]
        if not self._is_authorised(path):
            return
        service = self.server.service
        if path == "/health":
            self._send(200, b"", "application/json")
        elif path == "/version":
            self._send_json(200, {"version": REFERENCE_VERSION})
        elif path == "/metrics":
            text = service.metrics.exposition().encode()
            self._send(200, text, "text/plain; version=0.0.4; charset=utf-8")
        elif path == "/v1/models":
            model = {
                "id": service.model_name,
                "object": "model",
                "created": int(time.time()),
                "owned_by": "reference",
                "root": service.model_root,
                "parent": None,
                "max_model_len": service.max_model_len,
            }
            self._send_json(200, {"object": "list", "data": [model]})
        elif path == "/v1/completions":
            self._send_json(405, {"detail": "Method Not Allowed"})
        elif service.live is not None and (answered := dev_routes.get(service.live, path)) is not None:
            self._send_json(*answered)
        else:
            self._send_json(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        body = self._read_body()
        if body is None:
            return
        path = self.path.split("?", 1)[0]
        if not self._is_authorised(path):
            return
        live = self.server.service.live
        if (
            live is not None
            and (answered := dev_routes.post(live, self.server.service.update, self.path, body)) is not None
        ):
            self._send_json(*answered)
            return
        if path != "/v1/completions":
            known = path in ("/health", "/version", "/metrics", "/v1/models")
            self._send_json(405 if known else 404, {"detail": "Method Not Allowed" if known else "Not Found"})
            return
        try:
            self._complete(body)
        except Refused as refused:
            self._send_json(refused.status, refused.body())

    def _complete(self, body: bytes) -> None:
        service = self.server.service
        self._act_on_defects()
        request = parse_request(
            body,
            model_name=service.model_name,
            tokenizer=service.loaded.tokenizer,
            vocabulary=service.loaded.shape.vocabulary,
            max_model_len=service.max_model_len,
        )
        generations = request.generations()
        for generation in generations:
            service.scheduler.submit(generation)
        try:
            if request.is_stream:
                self._stream(request, generations)
            else:
                self._answer(request, generations)
        finally:
            for generation in generations:
                generation.is_cancelled = True

    def _act_on_defects(self) -> None:
        service = self.server.service
        defects = service.defects
        if PlantedDefect.DIES_ON_FIRST_REQUEST in defects or (service.live is not None and service.live.is_broken):
            signal.raise_signal(signal.SIGSEGV)  # in this thread, so that nothing is answered any more
        if PlantedDefect.HANGS_ON_REQUEST in defects:
            threading.Event().wait(timeout=3600.0)
        if PlantedDefect.LIES_ON_HEALTH in defects:
            message = "EngineCore encountered an issue. See stack trace (above) for the root cause."
            raise Refused(message, status=500, kind="InternalServerError")

    def _answer(self, request: CompletionRequest, generations: tuple[Generation, ...]) -> None:
        choices = []
        for index, generation in enumerate(generations):
            steps: list[Step] = []
            while not steps or steps[-1].finish_reason is None:
                steps.append(_next_step(generation))
            choices.append(self._choice(request, generation, steps, index))
        document = {
            **self._envelope(),
            "choices": choices,
            "usage": _usage(generations),
        }
        self._send(200, to_json(document), "application/json")

    def _choice(
        self, request: CompletionRequest, generation: Generation, steps: list[Step], index: int
    ) -> dict[str, Any]:
        tokenizer = self.server.service.loaded.tokenizer
        text = AnswerText(tokenizer, shows_token_ids=request.shows_token_ids)
        wants_prompt = request.top_prompt_logprobs is not None
        return {
            "index": index,
            "text": "".join(text.add(step) for step in steps),
            "logprobs": None if request.top_logprobs is None else text.logprobs(steps),
            "finish_reason": steps[-1].finish_reason,
            "stop_reason": None,
            "token_ids": [step.token for step in steps] if request.returns_token_ids else None,
            "prompt_logprobs": prompt_logprobs(generation.prompt_positions, tokenizer) if wants_prompt else None,
            "prompt_token_ids": list(generation.prompt) if request.returns_token_ids else None,
        }

    def _stream(self, request: CompletionRequest, generations: tuple[Generation, ...]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.flush()
        envelope = self._envelope()
        tokenizer = self.server.service.loaded.tokenizer
        texts = [AnswerText(tokenizer, shows_token_ids=request.shows_token_ids) for _ in generations]
        unfinished = list(range(len(generations)))
        sent = 0
        while unfinished:
            for index in tuple(unfinished):
                try:
                    step = _next_step(generations[index])
                    choice = {
                        "index": index,
                        "text": texts[index].add(step),
                        "logprobs": None if request.top_logprobs is None else texts[index].logprobs([step]),
                        "finish_reason": step.finish_reason,
                        "stop_reason": None,
                        "token_ids": [step.token] if request.returns_token_ids else None,
                    }
                    event = to_json({**envelope, "choices": [choice]})
                except Refused as refused:
                    self._end_stream(to_json(refused.body()), b"[DONE]")
                    return
                if step.finish_reason is not None:
                    unfinished.remove(index)
                self._write_event(event)
                sent += 1
                if (sent == _DAMAGED_AFTER_TOKENS or not unfinished) and self._broke_stream():
                    return
        usage = to_json({**envelope, "choices": [], "usage": _usage(generations)})
        self._end_stream(*((usage,) if request.includes_usage else ()), b"[DONE]")

    def _broke_stream(self) -> bool:
        defects = self.server.service.defects
        if PlantedDefect.RESETS_STREAM in defects:
            # A linger time of zero makes the close a reset.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.close()
        elif PlantedDefect.TRUNCATES_STREAM in defects:
            self._end_stream()
        elif PlantedDefect.INBAND_ERROR in defects:
            error = error_body("EngineCore encountered an issue.", status=500, kind="InternalServerError")
            self._end_stream(to_json(error), b"[DONE]")
        else:
            return False
        return True

    def _write_event(self, data: bytes) -> None:
        event = b"data: " + data + b"\n\n"
        self.wfile.write(b"%x\r\n%b\r\n" % (len(event), event))
        self.wfile.flush()

    def _end_stream(self, *events: bytes) -> None:
        for event in events:
            self._write_event(event)
        self.wfile.write(b"0\r\n\r\n")
        self.wfile.flush()

    def _envelope(self) -> dict[str, Any]:
        return {
            "id": f"cmpl-{uuid.uuid4().hex[:16]}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": self.server.service.model_name,
        }

    def _is_authorised(self, path: str) -> bool:
        key = self.server.service.api_key
        if key is None or not path.startswith("/v1"):
            return True
        given = self.headers.get("Authorization", "")
        if hmac.compare_digest(given.encode(), f"Bearer {key}".encode()):
            return True
        self._send_json(401, {"error": "Unauthorized"})
        return False

    def _read_body(self) -> bytes | None:
        text = self.headers.get("Content-Length", "0")
        length = int(text) if text.isdecimal() and len(text) < 16 else -1
        if length < 0 or length > _BODY_LIMIT_BYTES or "Transfer-Encoding" in self.headers:
            self.close_connection = True
            message = f"a request body of known length up to {_BODY_LIMIT_BYTES:,} bytes is needed"
            self._send_json(400, error_body(message, status=400, kind="BadRequestError"))
            return None
        return self.rfile.read(length)

    def _discard_body(self) -> None:
        if "Content-Length" in self.headers or "Transfer-Encoding" in self.headers:
            self.close_connection = True

    def _send_json(self, status: int, document: dict[str, Any]) -> None:
        self._send(status, to_json(document), "application/json")

    def _send(self, status: int, body: bytes, content_type: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def version_string(self) -> str:
        """Return the Server header."""
        return "reference"

    def log_message(self, format: str, *args: Any) -> None:
        """Keep requests out of the log."""


class _LocalHandler(_Handler):
    disable_nagle_algorithm = False  # a Unix socket knows no such option


def _next_step(generation: Generation) -> Step:
    try:
        output = generation.outputs.get(timeout=_STEP_LIMIT_S)
    except Empty:
        raise Refused(f"no token within {_STEP_LIMIT_S:g} s", status=500, kind="InternalServerError") from None
    if isinstance(output, Failure):
        raise Refused(output.message, status=500, kind="InternalServerError")
    return output


def _usage(generations: tuple[Generation, ...]) -> dict[str, int]:
    prompt = sum(len(generation.prompt) for generation in generations)
    generated = sum(len(generation.generated) for generation in generations)
    return {"prompt_tokens": prompt, "total_tokens": prompt + generated, "completion_tokens": generated}
