"""The ways from the old checkpoint to the new one."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from harness.errors import ScenarioInvalid


class How(StrEnum):
    """The procedure of a rollout."""

    RESTART = "restart"  # stop the old engine, start the new one in its place
    BLUE_GREEN = "blue_green"  # start the new one beside the old, move traffic, stop the old
    RELOAD = "reload"  # the running engine reads its weights again, from the same path


class Pause(StrEnum):
    """What a reload does with the requests that are under way."""

    WAIT = "wait"  # they are finished before it, new ones wait
    KEEP = "keep"  # they stand still and go on afterwards, with the new weights upon what the old ones computed
    NONE = "none"  # they go on


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """A procedure and how long its engine may take to become ready."""

    how: How
    ready_limit_s: float = 180.0
    resets_prefix_cache: bool = True  # of a reload
    pause: Pause = Pause.WAIT  # of a reload

    def as_remedy(self, *, beside: bool) -> Rollout:
        """Return how the repaired checkpoint is rolled out: never by a reload, an engine is trusted only once.

        `beside`: the old engine may go on serving until the new one is admitted.
        """
        if self.how is not How.RELOAD:
            return self
        return (blue_green if beside else restart)(ready_limit_s=self.ready_limit_s)


def restart(*, ready_limit_s: float = 180.0) -> Rollout:
    """Stop the old engine, then start the new one; nobody is served in between."""
    return Rollout(how=How.RESTART, ready_limit_s=ready_limit_s)


def blue_green(*, ready_limit_s: float = 180.0) -> Rollout:
    """Start the new engine beside the old one, move traffic when it is ready, then stop the old one."""
    return Rollout(how=How.BLUE_GREEN, ready_limit_s=ready_limit_s)


def reload_in_place(
    *, reset_prefix_cache: bool = True, pause: bool | str = True, ready_limit_s: float = 180.0
) -> Rollout:
    """Publish the new checkpoint where the running engine reads it, and let it reload through its development endpoints.

    Such an engine is started with `VLLM_SERVER_DEV_MODE=1`. Its development endpoints are not protected by the API key:
    whoever reaches the port can replace its weights, so it must listen on a loopback device or a private network alone.
    `pause` is what becomes of the requests under way: True or "wait", "keep", False or "none".
    Raises: ScenarioInvalid for another word.
    """
    chosen = (Pause.WAIT if pause else Pause.NONE) if isinstance(pause, bool) else pause
    if chosen not in frozenset(Pause):
        raise ScenarioInvalid(f'pause is "{chosen}", expected True, False or one of {", ".join(Pause)}')
    return Rollout(
        how=How.RELOAD, ready_limit_s=ready_limit_s, resets_prefix_cache=reset_prefix_cache, pause=Pause(chosen)
    )
