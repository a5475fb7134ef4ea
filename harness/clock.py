"""One monotonic clock, one kind of limit and the only polling loop in the project."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeVar

from harness.errors import WaitExpired

T = TypeVar("T")

NS_PER_S = 1_000_000_000


def now_ns() -> int:
    """Return the system-wide monotonic time in nanoseconds; comparable between processes of one host."""
    return time.monotonic_ns()


def seconds_between(start_ns: int, end_ns: int) -> float:
    """Return the seconds from `start_ns` to `end_ns`."""
    return (end_ns - start_ns) / NS_PER_S


def wall_time() -> str:
    """Return the time of day in UTC, for people only; nothing is measured with it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point in monotonic time by which something must have happened."""

    limit_s: float
    started_ns: int

    @classmethod
    def after(cls, limit_s: float) -> Deadline:
        """Start a limit of `limit_s` seconds now."""
        return cls(limit_s=limit_s, started_ns=now_ns())

    def waited_s(self) -> float:
        """Return the seconds since the limit began."""
        return seconds_between(self.started_ns, now_ns())

    def remaining_s(self) -> float:
        """Return the seconds left, never below zero."""
        return max(0.0, self.limit_s - self.waited_s())

    def is_expired(self) -> bool:
        """Say whether the limit has passed."""
        return self.waited_s() >= self.limit_s


def poll_until(ask: Callable[[], T | None], *, what: str, limit_s: float, every_s: float = 0.05) -> T:
    """Ask until an answer other than None comes and return it.

    An `OSError` or `ValueError` from `ask` counts as "not yet" and is quoted if the limit passes.
    Raises: WaitExpired with the number of tries and what was seen last.
    """
    deadline = Deadline.after(limit_s)
    tries = 0
    last_seen = "nothing"
    while True:
        tries += 1
        try:
            answer = ask()
        except (OSError, ValueError) as error:
            last_seen = f"{type(error).__name__}: {error}"
        else:
            if answer is not None:
                return answer
            last_seen = "not yet"
        if deadline.is_expired():
            raise WaitExpired(what, limit_s=limit_s, tries=tries, last_seen=last_seen)
        time.sleep(min(every_s, max(deadline.remaining_s(), 0.001)))


def pause(duration_s: float) -> None:
    """Wait for a planned time (a pace, never a wait for a condition: that is `poll_until`)."""
    time.sleep(max(0.0, duration_s))
