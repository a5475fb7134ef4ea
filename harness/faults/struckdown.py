"""A fault that struck an engine, and what is left of it when it was undone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from harness.clock import poll_until
from harness.errors import HarnessError, WaitExpired
from harness.faults.fault import Injected

END_SEEN_LIMIT_S = 3.0  # an engine in a container asks Docker once a second whether it has ended


@dataclass(slots=True)
class Struckdown:
    """A fault that struck processes: what is left of it is what is left of them."""

    injected: Injected
    prove: Callable[[], Injected]
    end: Callable[[], None]
    prove_end: Callable[[], Injected]

    def state(self) -> Injected:
        """Prove it again."""
        return self.prove()

    def finish(self, *, limit_s: float) -> None:
        """Undo it."""
        self.end()

    def undone(self) -> Injected:
        """Prove that nothing acts any more."""
        return self.prove_end()


def has_ended(exit_code: Callable[[], int | None]) -> bool:
    """Say whether an engine is known to have ended; one that cannot be asked, as by a Docker that hangs, is not."""
    with suppress(WaitExpired, HarnessError):
        poll_until(exit_code, what="the engine has ended", limit_s=END_SEEN_LIMIT_S, every_s=0.2)
        return True
    return False
