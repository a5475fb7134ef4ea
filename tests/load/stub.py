"""A completions server on raw sockets that can end a request in every way a real one can, and knows when it sent what.

Every token's text is its own send time, so a client's stamps can be compared with the truth.
Run it on its own with `python stub.py --pace-s 0.02`: it prints its endpoint, serves until its input ends, and then
prints one line per request: its prompt and when each token was sent.
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


@dataclass
class Served:
    """One request as the stub saw it."""

    number: int
    body: dict[str, Any]
    authorization: str
    read_ns: int
    fault: str = "ok"
    sent_ns: list[int] = field(default_factory=list)  # one per token

    @property
    def is_canary(self) -> bool:
        return "prompt_logprobs" in self.body


def logprob(token: int, shift: float = 0.0) -> float:
    """Return the made-up logprob of a prompt token."""
    return -1.0 - token / 1000 + shift


class Stub:
    """Serves until closed; `script` names the fault of each request (see `_play`)."""

    def __init__(self, script: Callable[[Served], str] = lambda _: "ok", *, pace_s: float = 0.0) -> None:
        self.served: list[Served] = []
        self._script = script
        self._pace_s = pace_s
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
        with connection:
            data = b""
            try:
                while b"\r\n\r\n" not in data:
                    data += await self._receive(connection)
                head, _, body = data.partition(b"\r\n\r\n")
                lines = head.decode().split("\r\n")[1:]
                headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
                while len(body) < int(headers["content-length"]):
                    body += await self._receive(connection)
                served = Served(len(self.served), json.loads(body), headers.get("authorization", ""), monotonic_ns())
                self.served.append(served)
                served.fault = self._script(served)
                await self._play(_Wire(self, connection), served)
            except (ConnectionError, EOFError):
                return

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
            return None
        if fault == "silence":
            await asyncio.sleep(FOREVER_S)
        if fault.startswith("http_"):
            key = served.authorization.removeprefix("Bearer ")
            text = json.dumps({"error": {"message": f"status {fault} for key {key}", "padding": "x" * 2000}}).encode()
            length = len(text) + (50 if fault.endswith("_cut") else 0)
            head = f"HTTP/1.1 {fault.split('_')[1]} No\r\nContent-Length: {length}\r\n\r\n"
            return await wire.send(head.encode() + text)
        if fault == "redirect":
            return await wire.send(b"HTTP/1.1 307 Elsewhere\r\nLocation: /v2\r\nContent-Length: 0\r\n\r\n")
        if fault == "bad_http":
            return await wire.send(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")
        if fault in ("header_cut", "header_reset"):
            await wire.send(HEADER[:30])
            return wire.reset() if fault == "header_reset" else None
        if served.is_canary:
            return await self._answer_canary(wire, served)
        if fault == "json_error":
            text = b'{"error": {"message": "not today", "code": 500}}'
            head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
            return await wire.send(head.encode() + text)
        if fault == "html":
            return await wire.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 4\r\n\r\n<p>.")
        await wire.send(HEADER)
        if fault == "header_then_reset":
            return wire.reset()
        return await self._stream(wire, served)

    async def _stream(self, wire: _Wire, served: Served) -> None:
        fault, asked = served.fault, int(served.body["max_tokens"])
        wire.is_dripping = fault == "drip"
        if fault in ("header_then_silence", "pings"):
            while True:  # a ping is no token
                await asyncio.sleep(0.02 if fault == "pings" else FOREVER_S)
                await wire.chunk(b": ping\n\n")
        if fault == "ping_first":
            await wire.chunk(b": ping\r\n\r\nevent: completion\r\nid: 1\r\n")
        tokens = {"too_few": asked - 1, "too_many": asked + 1}.get(fault, asked)
        step = 4 if fault == "coalesced" else 1
        for number in range(0, tokens, step):
            if number == asked // 2 and await self._break(wire, fault):
                return
            if number and self._pace_s:
                await asyncio.sleep(self._pace_s)
            await self.thaw()
            served.sent_ns.append(monotonic_ns())
            await wire.event(choices=[{"index": 0, "text": f"{served.sent_ns[-1]} ", "finish_reason": None}])
        while fault == "endless":
            await asyncio.sleep(0.02)
            await wire.event(choices=[{"index": 0, "text": "more ", "finish_reason": None}])
        if fault != "no_finish":
            await wire.event(choices=[{"index": 0, "text": "", "finish_reason": "length"}])
        if fault != "no_usage":
            await wire.event(choices=[], usage={"completion_tokens": tokens})
        if fault == "no_done":
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
            "no_choices": b'data: {"id": "cmpl-1"}\n\n',
            "bad_utf8": b'data: {"choices": [{"index": 0, "text": "\xff\xfe"}]}\n\n',
            "bad_sse": b"<html>502 Bad Gateway</html>\n\n",
        }
        if fault in messages:
            await wire.chunk(messages[fault])
            await wire.end()
        elif fault == "reset_mid_stream":
            await asyncio.sleep(0.05)  # an RST throws away what the peer has not read yet
            wire.reset()
        elif fault == "cut_chunk":
            await wire.send(b"40\r\ndata: {")
        elif fault == "bad_chunk":
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
        message: dict[str, Any] = {"choices": choices, "usage": {"completion_tokens": len(choices)}}
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
        length = len(text) + (10 if served.fault in ("body_cut", "body_stall") else 0)
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
        await self.thaw()
        served.sent_ns.append(monotonic_ns())
        await wire.send(head.encode() + text)
        if served.fault == "body_stall":
            await asyncio.sleep(FOREVER_S)


class _Wire:
    def __init__(self, stub: Stub, connection: socket.socket) -> None:
        self._stub = stub
        self._connection = connection
        self.is_dripping = False

    async def send(self, data: bytes) -> None:
        await self._stub.thaw()
        loop = asyncio.get_running_loop()
        if self.is_dripping:
            for position in range(len(data)):
                await loop.sock_sendall(self._connection, data[position : position + 1])
                await asyncio.sleep(0)
        else:
            await loop.sock_sendall(self._connection, data)

    async def chunk(self, data: bytes) -> None:
        await self.send(b"%x\r\n%b\r\n" % (len(data), data))

    async def event(self, **message: Any) -> None:
        await self.chunk(b"data: " + json.dumps(message).encode() + b"\n\n")

    async def end(self) -> None:
        await self.send(b"0\r\n\r\n")

    def reset(self) -> None:
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._connection.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--pace-s", type=float, default=0.0)
    with Stub(pace_s=parser.parse_args().pace_s) as own:
        print(own.endpoint, flush=True)
        sys.stdin.read()
        for one in own.served:
            print(json.dumps({"prompt": one.body["prompt"], "sent_ns": one.sent_ns}))
