"""Follows the files that loaders write, and hands on each line as it is written."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

TAIL_EVERY_S = 0.02

Deliver = Callable[[Any], None]


class Tail:
    """A thread that decodes every whole line of some files, which are there already, and calls what belongs to each.

    `error` is the first exception that a call raised: a record that nobody saw must not go unnoticed.
    """

    def __init__(self, files: Sequence[tuple[Path, Deliver]]) -> None:
        self.error: Exception | None = None
        self._files = tuple(files)
        self._all_written = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="load-tail", daemon=True)
        self._thread.start()

    def finish(self, limit_s: float) -> None:
        """Read what is left, knowing that no more will be written, and wait for the end. Idempotent."""
        self._all_written.set()
        if self._thread is not threading.current_thread():
            self._thread.join(limit_s)

    def _follow(self) -> None:
        with ExitStack() as stack:
            tails = [(stack.enter_context(path.open("rb")), deliver, bytearray()) for path, deliver in self._files]
            while True:
                is_last = self._all_written.is_set()
                seen = 0
                for file, deliver, rest in tails:
                    *lines, tail = (bytes(rest) + file.read()).split(b"\n")
                    rest[:] = tail
                    for line in lines:
                        self._hand_on(deliver, line)
                    seen += len(lines)
                if is_last:
                    return
                if not seen:
                    self._all_written.wait(TAIL_EVERY_S)

    def _hand_on(self, deliver: Deliver, line: bytes) -> None:
        try:
            deliver(json.loads(line))
        except Exception as error:
            self.error = self.error or error
