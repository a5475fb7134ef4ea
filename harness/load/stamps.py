"""When bytes came in, by the kernel's own stamp: a loader that is busy does not make an engine look slow.

Source: Linux, Documentation/networking/timestamping; stamps of received TCP data. Imported under gevent alone.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic_ns, time_ns

import gevent.socket

from harness.clock import NS_PER_S

SO_TIMESTAMPNS = 35  # asm-generic/socket.h; Python has no name for it
_TIMESPEC = struct.Struct("@ll")
_SPACE_BYTES = socket.CMSG_SPACE(_TIMESPEC.size)


def ask_for_stamps(connection: gevent.socket.socket | socket.socket) -> None:
    """Ask the kernel to stamp what a socket receives, where it can.

    It begins to stamp some milliseconds after the first socket has asked, and goes on while any such socket is open.
    """
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)


class StampedSocket(gevent.socket.socket):
    """A TCP socket; `arrived_ns` is when the last bytes that `recv` returned had come in, on the monotonic clock.

    Where the kernel gave no stamp it is when they were read. Of several packets in one read the last counts.
    """

    def __init__(self, family: int) -> None:
        super().__init__(family, socket.SOCK_STREAM)
        self.arrived_ns = 0
        ask_for_stamps(self)

    def recv(self, bufsize: int, flags: int = 0) -> bytes:
        """Return what has come in, waiting for it."""
        data, ancillary, _, _ = self.recvmsg(bufsize, _SPACE_BYTES, flags)
        # In this order a process that is held up between the two calls takes the bytes for later, never for earlier.
        wall_ns, read_ns = time_ns(), monotonic_ns()
        arrived_ns = read_ns - (wall_ns - (_stamp_ns(ancillary) or wall_ns))
        # A time of day that was set meanwhile must not move anything out of its order.
        self.arrived_ns = min(max(arrived_ns, self.arrived_ns), read_ns)
        return bytes(data)


def _stamp_ns(ancillary: Sequence[tuple[int, int, bytes]]) -> int | None:
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == SO_TIMESTAMPNS and len(content) >= _TIMESPEC.size:
            seconds, nanoseconds = _TIMESPEC.unpack_from(content)
            return int(seconds) * NS_PER_S + int(nanoseconds)
    return None
