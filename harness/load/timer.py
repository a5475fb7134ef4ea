"""How long a request may still take, under gevent: the limit of the part it is in, and the total behind all of them."""

from __future__ import annotations

import gevent

from harness.clock import Deadline
from harness.load.shape import RequestLimits
from harness.observe.history import RequestResult


class Expired(Exception):
    """A limit of the request passed."""


class RequestTimer:
    """Raises `Expired` in the greenlet that set the limit which passed; `result` then says which one it was."""

    def __init__(self, limits: RequestLimits) -> None:
        self.limits = limits
        self.result = RequestResult.DEADLINE
        self._total = Deadline.after(limits.total_s)
        self._timer: gevent.Timeout | None = None

    def limit(self, result: RequestResult, limit_s: float) -> None:
        """Give what follows `limit_s` seconds, less if the total limit comes first; it ends in `result` otherwise."""
        self.end()
        remaining_s = self._total.remaining_s()
        if remaining_s <= limit_s:
            self.result, seconds, named = RequestResult.DEADLINE, remaining_s, self.limits.total_s
        else:
            self.result, seconds, named = result, limit_s, limit_s
        self._timer = gevent.Timeout.start_new(seconds, Expired(f"limit of {named:g} s passed"))

    def end(self) -> None:
        """Let nothing expire any more. Idempotent."""
        if self._timer is not None:
            self._timer.close()
            self._timer = None
