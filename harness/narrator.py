"""Tells people what is happening, as it happens."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from harness.clock import now_ns, seconds_between
from harness.observe.history import Event, EventKind

Progress = Callable[[str], None]


def narrator(progress: Progress, name: str, mode: str) -> Callable[[Event], None]:
    """Return what turns the events of a scenario into lines of text with the time since it began."""
    started = now_ns()

    def tell(event: Event) -> None:
        words = _SENTENCES.get(event.kind)
        if words is not None:
            elapsed_s = seconds_between(started, now_ns())
            said = words.format_map(_Missing(event.data)).removesuffix(": ")  # where there is no reason
            with suppress(BrokenPipeError):  # whoever read on has gone; what is told here is on record as well
                progress(f"{name} [{mode}] {elapsed_s:6.1f} s  {said}")

    return tell


class _Missing(dict[str, Any]):
    def __missing__(self, key: str) -> str:
        return "?"


_SENTENCES = {
    EventKind.ENGINE_STARTING: "starting engine {incarnation}",
    EventKind.ENGINE_READY: "engine {incarnation} is ready after {took_s} s",
    EventKind.ENGINE_NOT_READY: "engine {incarnation} did not start: {reason}",
    EventKind.ENGINE_DIED: "engine {incarnation} died, exit code {exit_code}",
    EventKind.LOAD_STARTED: "load begins at {rate_rps} requests/s; next: publish",
    EventKind.PUBLISH_STARTED: "publishing the new checkpoint ({how}); next: rollout",
    EventKind.FAULT_INJECTED: "fault {fault}: {because}",
    EventKind.INCIDENT_STARTED: "striking engine {incarnation}; next: somebody notices",
    EventKind.RELOAD_STARTED: "engine {incarnation} is given other weights while it serves ({how})",
    EventKind.RELOAD_ENDED: "the {how} rollout of engine {incarnation} has ended: {because}",
    EventKind.GUARD_REFUSED: "guard {guard} refused",
    EventKind.GUARD_ACTED: "guard {guard}: {did}",
    EventKind.ROLLOUT_STARTED: "rolling out ({how}); next: somebody notices, or all is well",
    EventKind.DETECTION_SEEN: "noticed at layer {layer}: {because}",
    EventKind.REMEDY_STARTED: "remedy: {what}; next: service is back",
    EventKind.RECOVERY_SEEN: "service is back; next: the rest of the load",
}
