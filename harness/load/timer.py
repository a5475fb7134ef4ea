"""How long a request may still take, under gevent: the limit of the part it is in, and the total behind all of them."""

from __future__ import annotations

from typing import Any

import gevent

from harness.clock import NS_PER_S, now_ns
from harness.load.shape import RequestLimits
from harness.observe.history import RequestResult


class Expired(Exception):
    """A limit of the request passed."""


class RequestTimer:
    """Raises `Expired` in the greenlet that made it once a limit has passed; `result` then says which one it was.

    A limit is renewed at every token: that moves the time that is due and leaves the running timer alone, which looks at
    its end whether it has become later.
    """

    def __init__(self, limits: RequestLimits) -> None:
        self.limits = limits
        self.result = RequestResult.DEADLINE
        self._greenlet = gevent.getcurrent()
        self._total_ns = now_ns() + round(limits.total_s * NS_PER_S)
        self._due_ns = 0
        self._named_s = 0.0
        self._timer: Any = None
        self._ends_ns = 0  # when the running timer does

    def limit(self, result: RequestResult, limit_s: float) -> None:
        """Give what follows `limit_s` seconds, less if the total limit comes first; it ends in `result` otherwise."""
        due_ns = now_ns() + round(limit_s * NS_PER_S)
        if self._total_ns <= due_ns:
            self.result, self._due_ns, self._named_s = RequestResult.DEADLINE, self._total_ns, self.limits.total_s
        else:
            self.result, self._due_ns, self._named_s = result, due_ns, limit_s
        if self._timer is None or self._due_ns < self._ends_ns:
            self.end()
            self._start()

    def end(self) -> None:
        """Let nothing expire any more. Idempotent."""
        if self._timer is not None:
            self._timer.close()
            self._timer = None

    def _start(self) -> None:
        self._ends_ns = self._due_ns
        self._timer = gevent.get_hub().loop.timer(max(0.0, (self._due_ns - now_ns()) / NS_PER_S))
        self._timer.start(self._look)

    def _look(self) -> None:
        """Expire, or wait for what has become due later; runs in the hub."""
        self.end()
        if now_ns() < self._due_ns:
            self._start()
        else:
            self._greenlet.throw(Expired(f"limit of {self._named_s:g} s passed"))
