"""Bytes are stamped by the kernel when they come in, however late they are read."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from harness.clock import NS_PER_S, Deadline, now_ns, poll_until
from harness.load import stamps
from harness.load.stamps import StampedSocket

Ends = tuple[StampedSocket, socket.socket]  # of the reader, of the sender


@pytest.fixture
def ends() -> Iterator[Ends]:
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        reader = stack.enter_context(StampedSocket(socket.AF_INET))
        reader.connect(listener.getsockname())
        sender = stack.enter_context(listener.accept()[0])
        _let_pass(0.1)  # the kernel begins to stamp a moment after the first socket has asked
        yield reader, sender


def _let_pass(seconds: float) -> None:
    passed = Deadline.after(seconds)
    poll_until(lambda: passed.is_expired() or None, what="time", limit_s=seconds + 10.0, every_s=0.01)


def test_a_late_reader_knows_when_the_bytes_came(ends: Ends) -> None:
    reader, sender = ends
    sent_ns = now_ns()
    sender.sendall(b"token")
    _let_pass(0.4)

    assert reader.recv(100) == b"token"
    assert sent_ns <= reader.arrived_ns < sent_ns + 0.2 * NS_PER_S
    assert now_ns() - reader.arrived_ns > 0.3 * NS_PER_S


def test_of_what_is_read_together_the_last_counts(ends: Ends) -> None:
    reader, sender = ends
    sender.sendall(b"one")
    _let_pass(0.3)
    sent_ns = now_ns()
    sender.sendall(b"two")
    _let_pass(0.1)

    assert reader.recv(100) == b"onetwo"
    assert sent_ns <= reader.arrived_ns <= now_ns()


@pytest.mark.parametrize("jump_s", [-3600, 3600])
def test_a_time_of_day_that_is_set_moves_nothing_out_of_its_order(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, jump_s: int
) -> None:
    reader, sender = ends
    reader.arrived_ns = begin_ns = now_ns()
    monkeypatch.setattr(stamps, "time_ns", lambda: time.time_ns() + jump_s * NS_PER_S)
    sender.sendall(b"token")

    reader.recv(100)
    assert begin_ns <= reader.arrived_ns <= now_ns()


def test_without_a_stamp_it_is_the_time_of_reading(ends: Ends) -> None:
    reader, sender = ends
    reader.setsockopt(socket.SOL_SOCKET, stamps.SO_TIMESTAMPNS, 0)
    sender.sendall(b"token")
    _let_pass(0.1)
    before_ns = now_ns()

    assert reader.recv(100) == b"token"
    assert before_ns <= reader.arrived_ns <= now_ns()


def test_the_end_of_a_stream_is_an_empty_read(ends: Ends) -> None:
    reader, sender = ends
    sender.close()

    assert reader.recv(100) == b""
    assert reader.arrived_ns <= now_ns()
