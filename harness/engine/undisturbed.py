"""What must not be interrupted half-way: the start of a process that nobody would know of."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Hold back Ctrl-C and its like until the block ends, then let them do what they do. For blocks that end soon.

    The signals are not masked, since a child would inherit that; in other threads than the main one there is nothing to do.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    before: dict[int, Callable[[int, FrameType | None], object]] = {}
    try:
        for number in INTERRUPTING:
            handler = signal.getsignal(number)
            if callable(handler):
                before[number] = handler
                signal.signal(number, lambda number, frame: came.append((number, frame)))
        yield
    finally:
        for held, handler in before.items():
            signal.signal(held, handler)
    for received, frame in came:
        before[received](received, frame)
