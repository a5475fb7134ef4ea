"""An HTTP response under gevent that notes when its bytes arrive."""

from __future__ import annotations

from dataclasses import dataclass

from geventhttpclient.response import HTTPSocketResponse

from harness.load.sse import StreamFault
from harness.load.stamps import StampedSocket
from harness.observe.history import RequestResult

ANSWER_BYTES_MAX = 64 * 1024**2


@dataclass(slots=True)
class Received:
    """What has come in on a connection."""

    size_bytes: int = 0
    last_ns: int = 0
    has_body: bool = False
    is_ended: bool = False


class Response(HTTPSocketResponse):
    """A response that notes when its bytes arrive; `received` is there even if the header never is."""

    def __init__(self, connection: StampedSocket, received: Received) -> None:
        self._connection = connection
        self._received = received
        super().__init__(connection, method="POST")

    def feed(self, data: str | bytes) -> None:
        """Take what `recv` just returned."""
        self._received.last_ns = self._connection.arrived_ns
        self._received.size_bytes += len(data)
        self._received.is_ended = not data
        if self._received.size_bytes > ANSWER_BYTES_MAX:
            raise StreamFault(RequestResult.MALFORMED, f"the answer is longer than {ANSWER_BYTES_MAX:,} bytes")
        super().feed(data)

    def read_text(self) -> str:
        """Read the whole body as text.

        Raises: StreamFault (malformed) when it is not UTF-8.
        """
        try:
            return bytes(self.read()).decode("utf-8")
        except UnicodeDecodeError as error:
            raise StreamFault(RequestResult.MALFORMED, f"the answer is not UTF-8: {error}") from error

    def _on_body(self, buf: bytearray) -> None:
        self._received.has_body = True
        super()._on_body(buf)
