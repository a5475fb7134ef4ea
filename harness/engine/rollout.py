"""The ways from the old checkpoint to the new one."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class How(StrEnum):
    """The procedure of a rollout."""

    RESTART = "restart"  # stop the old engine, start the new one in its place
    BLUE_GREEN = "blue_green"  # start the new one beside the old, move traffic, stop the old


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """A procedure and how long its engine may take to become ready."""

    how: How
    ready_limit_s: float = 180.0


def restart(*, ready_limit_s: float = 180.0) -> Rollout:
    """Stop the old engine, then start the new one; nobody is served in between."""
    return Rollout(how=How.RESTART, ready_limit_s=ready_limit_s)


def blue_green(*, ready_limit_s: float = 180.0) -> Rollout:
    """Start the new engine beside the old one, move traffic when it is ready, then stop the old one."""
    return Rollout(how=How.BLUE_GREEN, ready_limit_s=ready_limit_s)
