"""A completions server on raw sockets that can end a request in every way a real one can, and knows when it sent what.

Every token's text is its own send time, so a client's stamps can be compared with the truth. Connections are kept alive
unless the client says `Connection: close` or the fault ends them.
Run it on its own with `python stub.py --pace-s 0.02`: it prints its endpoint, serves until its input ends, and then
prints one line per request: its prompt, when it was read and when each token was sent.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import struct
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Any

FOREVER_S = 3600.0
HEADER = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
BARE_HEADER = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


@dataclass
class Served:
    """One request as the stub saw it."""

    number: int
    body: dict[str, Any]
    authorization: str
    read_ns: int
    connection: int = 0  # which connection it came on, counted from zero
    fault: str = "ok"
    sent_ns: list[int] = field(default_factory=list)  # one per token

    @property
    def is_canary(self) -> bool:
        return "prompt_logprobs" in self.body


def logprob(token: int, shift: float = 0.0) -> float:
    """Return the made-up logprob of a prompt token."""
    return -1.0 - token / 1000 + shift


class Stub:
    """Serves until closed; `script` names the fault of each request (see `_play`).

    The first token comes `first_s` after the request, each further one `pace_s` after the one before.
    """

    def __init__(
        self, script: Callable[[Served], str] = lambda _: "ok", *, pace_s: float = 0.0, first_s: float = 0.0
    ) -> None:
        self.served: list[Served] = []
        self.connections = 0
        self.closed = 0  # connections that the stub ended
        self._script = script
        self._pace_s = pace_s
        self._first_s = first_s
        self._frozen_ns = (0, 0)
        self._loop = asyncio.new_event_loop()
        self._listener = socket.socket()
        self._listener.setblocking(False)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(512)
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._accept(),), daemon=True)
        self._end = asyncio.Event()
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Stub:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(10)
        self._loop.close()

    def freeze(self, start_ns: int, end_ns: int) -> None:
        """Neither accept nor send anything between these times."""
        self._frozen_ns = (start_ns, end_ns)

    async def _accept(self) -> None:
        end = asyncio.ensure_future(self._end.wait())
        while not end.done():
            accept = asyncio.ensure_future(self._loop.sock_accept(self._listener))
            await asyncio.wait({accept, end}, return_when=asyncio.FIRST_COMPLETED)
            if accept.done():
                connection = accept.result()[0]
                task = self._loop.create_task(self._serve(connection))
                # A task that is cancelled before it begins closes nothing.
                task.add_done_callback(lambda _, connection=connection: connection.close())
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            else:
                accept.cancel()
        self._listener.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        number, self.connections = self.connections, self.connections + 1
        with connection:
            data = b""
            try:
                while True:
                    while b"\r\n\r\n" not in data:
                        data += await self._receive(connection)
                    head, _, data = data.partition(b"\r\n\r\n")
                    first, *lines = head.decode().split("\r\n")
                    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
                    length = int(headers.get("content-length", 0))
                    while len(data) < length:
                        data += await self._receive(connection)
                    content, data = data[:length], data[length:]
                    wire = _Wire(self, connection)
                    if first.startswith("POST"):
                        authorization = headers.get("authorization", "")
                        served = Served(len(self.served), json.loads(content), authorization, monotonic_ns(), number)
                        self.served.append(served)
                        served.fault = self._script(served)
                        await self._play(wire, served)
                    else:
                        await self._tell(wire, first.split(" ")[1])
                    if wire.must_close or headers.get("connection", "").lower() == "close":
                        connection.close()
                        self.closed += 1
                        return
            except (ConnectionError, EOFError):
                return

    async def _tell(self, wire: _Wire, path: str) -> None:
        """Answer what benchmark tools ask before they begin."""
        known = {"/health": {}, "/v1/models": {"object": "list", "data": [{"id": "m", "object": "model"}]}}
        await wire.answer(
            json.dumps(known.get(path, {})).encode(), status="200 OK" if path in known else "404 Not Found"
        )

    async def _receive(self, connection: socket.socket) -> bytes:
        data = await self._loop.sock_recv(connection, 65536)
        if not data:
            raise EOFError
        return data

    async def thaw(self) -> None:
        """Wait while frozen."""
        start_ns, end_ns = self._frozen_ns
        if start_ns <= monotonic_ns() < end_ns:
            await asyncio.sleep((end_ns - monotonic_ns()) / 1e9)

    async def _play(self, wire: _Wire, served: Served) -> None:
        fault = served.fault
        if fault == "reset":
            return wire.reset()
        if fault == "close":
            wire.must_close = True
            return None
        if fault == "silence":
            await asyncio.sleep(FOREVER_S)
        if fault.startswith("http_"):
            key = served.authorization.removeprefix("Bearer ")
            text = json.dumps({"error": {"message": f"status {fault} for key {key}", "padding": "x" * 2000}}).encode()
            return await wire.answer(text, status=f"{fault.split('_')[1]} No", cut=50 if fault.endswith("_cut") else 0)
        if fault == "redirect":
            return await wire.send(b"HTTP/1.1 307 Elsewhere\r\nLocation: /v2\r\nContent-Length: 0\r\n\r\n")
        if fault == "bad_http":
            wire.must_close = True
            return await wire.send(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")
        if fault in ("header_cut", "header_reset"):
            wire.must_close = True
            await wire.send(HEADER[:30])
            return await wire.reset_later() if fault == "header_reset" else None
        if served.is_canary:
            return await self._answer_canary(wire, served)
        if fault == "json_error":
            return await wire.answer(b'{"error": {"message": "not today", "code": 500}}')
        if fault == "html":
            return await wire.answer(b"<p>.", content_type="text/html")
        if fault in ("until_close", "until_close_cut"):
            wire.must_close, wire.is_chunked = True, False
            await wire.send(BARE_HEADER)
        else:
            await wire.send(HEADER)
        if fault == "header_then_reset":
            return await wire.reset_later()
        return await self._stream(wire, served)

    async def _stream(self, wire: _Wire, served: Served) -> None:
        fault, asked = served.fault, int(served.body.get("max_tokens", 16))
        wire.is_dripping, wire.must_close = fault == "drip", wire.must_close or fault == "ok_then_close"
        if fault in ("header_then_silence", "pings"):
            while True:  # a ping is no token
                await asyncio.sleep(0.02 if fault == "pings" else FOREVER_S)
                await wire.chunk(b": ping\n\n")
        if fault == "ping_first":
            await wire.chunk(b": ping\r\n\r\nevent: completion\r\nid: 1\r\n")
        if fault != "nameless":
            wire.identity = {"id": f"cmpl-{served.number}", "model": served.body["model"], "system_fingerprint": "fp-1"}
        if fault == "wrong_model":
            wire.identity["model"] = "another"
        tokens = {"too_few": asked - 1, "too_many": asked + 1}.get(fault, asked)
        step = 4 if fault == "coalesced" else 1
        if self._first_s:
            await asyncio.sleep(self._first_s)
        for number in range(0, tokens, step):
            if number == asked // 2 and await self._break(wire, fault):
                return
            if number and self._pace_s:
                await asyncio.sleep(self._pace_s)
            await self.thaw()
            served.sent_ns.append(monotonic_ns())
            choice = {"index": 0, "text": f"{served.sent_ns[-1]} ", "finish_reason": None}
            if fault in ("ids", "ids_lost", "ids_only"):
                choice["token_ids"] = [] if fault == "ids_lost" and number == 1 else [number]
            if fault in ("empty", "ids_only"):
                choice["text"] = ""
            await wire.event(choices=[choice])
        while fault == "endless":
            await asyncio.sleep(0.02)
            await wire.event(choices=[{"index": 0, "text": "more ", "finish_reason": None}])
        if fault != "no_finish":
            await wire.event(choices=[{"index": 0, "text": "", "finish_reason": "length"}])
        if fault != "no_usage":
            await wire.event(choices=[], usage={"prompt_tokens": 1, "completion_tokens": tokens})
        if fault in ("no_done", "until_close_cut"):
            return await wire.end()
        if fault == "done_cut":
            await wire.chunk(b"data: [DO")
            return await wire.end()
        if fault == "silent_done":
            await asyncio.sleep(FOREVER_S)
        await wire.chunk(b"data: [DONE]\n\n")
        if fault != "held_open":
            return await wire.end()
        return await asyncio.sleep(FOREVER_S)

    async def _break(self, wire: _Wire, fault: str) -> bool:
        """Play what happens in mid-stream and say whether it was the end."""
        messages = {
            "inband_error": b'data: {"error": {"message": "EngineDeadError", "code": 500}}\n\ndata: [DONE]\n\n',
            "old_inband_error": b'data: {"object": "error", "message": "died"}\n\ndata: [DONE]\n\n',
            "abort": b'data: {"choices": [{"index": 0, "text": "", "finish_reason": "abort"}]}\n\ndata: [DONE]\n\n',
            "bad_json": b'data: {"choices": [{"index": 0, "te\n\n',
            "not_an_object": b"data: [1, 2]\n\n",
            "no_choices": b'data: {"object": "text_completion"}\n\n',
            "bad_utf8": b'data: {"choices": [{"index": 0, "text": "\xff\xfe"}]}\n\n',
            "bad_sse": b"<html>502 Bad Gateway</html>\n\n",
        }
        changes = {"mixed_model": "model", "mixed_id": "id", "mixed_fingerprint": "system_fingerprint"}
        if fault in changes:
            wire.identity[changes[fault]] = "another"
            return False
        if fault in messages:
            await wire.chunk(messages[fault])
            await wire.end()
        elif fault == "reset_mid_stream":
            await wire.reset_later()
        elif fault == "cut_chunk":
            wire.must_close = True
            await wire.send(b"40\r\ndata: {")
        elif fault == "cut_between_chunks":
            wire.must_close = True
        elif fault == "bad_chunk":
            wire.must_close = True
            await wire.send(b"zz\r\ndata: {}\n\n\r\n")
        elif fault == "stall":
            await asyncio.sleep(FOREVER_S)
        else:
            return False
        return True

    async def _answer_canary(self, wire: _Wire, served: Served) -> None:
        choices = []
        for index, prompt in enumerate(served.body["prompt"]):
            rows = [None, *({str(token): {"logprob": logprob(token)}} for token in prompt[1:])]
            choices.append({"index": index, "text": "x", "finish_reason": "length", "prompt_logprobs": rows})
        message: dict[str, Any] = {
            "id": f"cmpl-{served.number}",
            "model": "another" if served.fault == "wrong_model" else served.body["model"],
            "choices": choices,
            "usage": {"completion_tokens": len(choices)},
        }
        if served.fault == "no_logprobs":
            for choice in choices:
                choice["prompt_logprobs"] = None
        elif served.fault == "abort":
            choices[0]["finish_reason"] = "abort"
        elif served.fault == "json_error":
            message = {"error": {"message": "not today"}}
        elif served.fault == "reversed":
            choices.reverse()
        text = json.dumps(message).encode()[: -7 if served.fault == "bad_json" else None]
        await self.thaw()
        served.sent_ns.append(monotonic_ns())
        if served.fault in ("header_then_silence", "body_stall"):
            part = text[: 0 if served.fault == "header_then_silence" else None]
            await wire.answer(part, cut=10)
            await asyncio.sleep(FOREVER_S)
        await wire.answer(text, cut=10 if served.fault == "body_cut" else 0)


class _Wire:
    def __init__(self, stub: Stub, connection: socket.socket) -> None:
        self._stub = stub
        self._connection = connection
        self.identity: dict[str, Any] = {}
        self.is_dripping = False
        self.is_chunked = True
        self.must_close = False

    async def send(self, data: bytes) -> None:
        await self._stub.thaw()
        loop = asyncio.get_running_loop()
        if self.is_dripping:
            for position in range(len(data)):
                await loop.sock_sendall(self._connection, data[position : position + 1])
                await asyncio.sleep(0)
        else:
            await loop.sock_sendall(self._connection, data)

    async def answer(
        self, content: bytes, *, status: str = "200 OK", content_type: str = "application/json", cut: int = 0
    ) -> None:
        """Send an answer that comes in one piece; its header promises `cut` bytes more than come."""
        self.must_close = cut > 0
        head = f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(content) + cut}\r\n\r\n"
        await self.send(head.encode() + content)

    async def chunk(self, data: bytes) -> None:
        await self.send(b"%x\r\n%b\r\n" % (len(data), data) if self.is_chunked else data)

    async def event(self, **message: Any) -> None:
        await self.chunk(
            b"data: " + json.dumps({"object": "text_completion", **self.identity, **message}).encode() + b"\n\n"
        )

    async def end(self) -> None:
        if self.is_chunked:
            await self.send(b"0\r\n\r\n")

    def reset(self) -> None:
        self.must_close = True
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._connection.close()

    async def reset_later(self) -> None:
        await asyncio.sleep(0.05)  # an RST throws away what the peer has not read yet
        self.reset()


def main() -> None:
    """Serve until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pace-s", type=float, default=0.0)
    parser.add_argument("--first-s", type=float, default=0.0)
    parser.add_argument("--faults", default="ok", help="what happens to the requests, comma-separated, taken in turn")
    parser.add_argument("--freeze-at-request", type=int, default=0, help="the freeze begins when this one comes")
    parser.add_argument("--freeze-s", type=float, default=0.0)
    options = parser.parse_args()
    faults = options.faults.split(",")

    def script(served: Served) -> str:
        if served.number == options.freeze_at_request and options.freeze_s:
            stub.freeze(served.read_ns, served.read_ns + round(options.freeze_s * 1e9))
        return str(faults[served.number % len(faults)])

    with Stub(script, pace_s=options.pace_s, first_s=options.first_s) as stub:
        print(stub.endpoint, flush=True)
        sys.stdin.read()
        for one in stub.served:
            line = {"prompt": one.body.get("prompt"), "read_ns": one.read_ns, "sent_ns": one.sent_ns}
            print(json.dumps({**line, "connection": one.connection, "fault": one.fault}))


if __name__ == "__main__":
    main()
