"""A server that answers completions with tokens at a fixed pace and does nothing else: what loaders are measured against.

Run by `harness.load.calibration` in a process of its own: it prints its endpoint and serves until its input ends.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from typing import cast

HEADER = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def _chunk(message: dict[str, object]) -> bytes:
    event = f"data: {json.dumps(message)}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(event), event)


def _token(reason: str | None) -> bytes:
    choice = {"index": 0, "text": " word", "token_ids": [7], "logprobs": None, "finish_reason": reason}
    return _chunk({"id": "cmpl-0", "object": "text_completion", "created": 0, "model": "m", "choices": [choice]})


TOKEN, LAST_TOKEN = _token(None), _token("length")
END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


class TokenStream(asyncio.Protocol):
    """One connection, which answers one request and is closed."""

    def __init__(self, pace_s: float) -> None:
        self._pace_s = pace_s
        self._loop = asyncio.get_running_loop()
        self._received = b""
        self._left = 0
        self._due_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the way to answer."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Begin to answer once the request is whole."""
        self._received += data
        head, _, body = self._received.partition(b"\r\n\r\n")
        length = next(
            (int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0
        )
        if len(body) < max(length, 1) or self._left:
            return
        self._left = int(json.loads(body)["max_tokens"])
        self._transport.write(HEADER)
        self._due_s = self._loop.time()
        self._send()

    def _send(self) -> None:
        if self._transport.is_closing():
            return
        self._left -= 1
        if self._left:
            self._transport.write(TOKEN)
            self._due_s += self._pace_s
            self._loop.call_at(self._due_s, self._send)
        else:
            self._transport.write(LAST_TOKEN + END)
            self._transport.close()


async def serve(pace_s: float) -> None:
    """Serve on a free loopback port until standard input ends."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def wait_for_end() -> None:
        sys.stdin.read()
        loop.call_soon_threadsafe(ended.set)

    server = await loop.create_server(lambda: TokenStream(pace_s), "127.0.0.1", 0, backlog=4096)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    threading.Thread(target=wait_for_end, daemon=True).start()
    await ended.wait()
    server.close()


if __name__ == "__main__":
    asyncio.run(serve(float(sys.argv[1])))
