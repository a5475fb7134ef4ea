"""Idle connections kept alive between requests, and what a failed connect means. Imported under gevent alone.

Nothing is ever sent twice. A connection that was closed while idle is replaced before anything is sent on it; one that
is closed after the send makes its request fail, although an engine that closes idle connections may not be to blame:
such a request is recorded as one on a `reused` connection.
"""

from __future__ import annotations

import errno
import select
import socket

from gevent.monkey import get_original

from harness.load.stamps import StampedSocket
from harness.observe.history import RequestResult

UNREACHABLE_ERRORS = frozenset(
    {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN, errno.EACCES, errno.EPERM}
)
_poll = get_original("select", "poll")  # gevent's own would let other greenlets run

Address = tuple[str, int]


class IdleConnections:
    """Connections to servers that are waiting for a request; the one used last is used next."""

    def __init__(self) -> None:
        self.closed_while_idle = 0
        self._idle: dict[Address, list[StampedSocket]] = {}

    def take(self, address: Address) -> StampedSocket | None:
        """Return a connection on which nothing was sent or closed since its last answer, if there is one."""
        idle = self._idle.get(address, [])
        while idle:
            connection = idle.pop()
            if not _has_news(connection):
                return connection
            self.closed_while_idle += 1
            connection.close()
        return None

    def keep(self, address: Address, connection: StampedSocket) -> None:
        """Keep a connection whose answer was read to its end."""
        self._idle.setdefault(address, []).append(connection)

    def close(self) -> None:
        """Close every idle connection."""
        for idle in self._idle.values():
            for connection in idle:
                connection.close()
        self._idle.clear()


def _has_news(connection: StampedSocket) -> bool:
    poll = _poll()
    poll.register(connection.fileno(), select.POLLIN)  # hang-up and error are always reported
    return bool(poll.poll(0))


def connect_result(error: OSError) -> RequestResult:
    """Say what a failed connect means."""
    if isinstance(error, ConnectionRefusedError):
        return RequestResult.REFUSED
    if isinstance(error, socket.gaierror):
        return RequestResult.DNS
    if error.errno in UNREACHABLE_ERRORS:
        return RequestResult.UNREACHABLE
    if error.errno == errno.ETIMEDOUT:
        return RequestResult.CONNECT_TIMEOUT
    if error.errno in (errno.ECONNRESET, errno.ECONNABORTED):
        return RequestResult.RESET
    return RequestResult.HARNESS_BUG  # out of files or ports: ours, never blamed on the engine
