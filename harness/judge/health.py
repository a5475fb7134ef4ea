"""What `/health` of an engine told.

One probe that got no answer among good ones tells nothing: a slow machine looks the same. It counts when the connection was
refused, when the engine had ended, or when the probe before or after it failed too.
"""

from __future__ import annotations

from harness.observe.history import Event, EventKind, History

HTTP_OK = 200
OBSERVER = "health"  # the source of what is asked all the time; up to 0.1.0 it wrote a status only when that changed


def told_of_health(history: History, incarnation: str, *, since: int, until: int) -> tuple[Event, ...]:
    """Return what `/health` of an engine said between these times, and its end."""
    return tuple(
        event
        for event in history.of(EventKind.HEALTH, EventKind.ENGINE_DIED)
        if event.data["incarnation"] == incarnation and since <= event.at_ns < until
    )


def bad_health(told: tuple[Event, ...]) -> tuple[Event, ...]:
    """Return the answers of `/health` that count as bad."""
    return tuple(event for number, event in enumerate(told) if is_probe(event) and _counts(told, number))


def is_probe(event: Event) -> bool:
    """Say whether this is a probe rather than the end of an engine."""
    return event.kind is EventKind.HEALTH


def _counts(told: tuple[Event, ...], number: int) -> bool:
    event = told[number]
    if _is_good(event):
        return False
    if event.data["status"] or event.data.get("refused"):
        return True
    neighbours = told[max(number - 1, 0) : number] + told[number + 1 : number + 2]
    if any(not is_probe(each) for each in told[:number]) or any(not _is_good(each) for each in neighbours):
        return True
    lasted = number + 1 == len(told) and event.source == OBSERVER
    return lasted and "refused" not in event.data


def _is_good(event: Event) -> bool:
    return is_probe(event) and event.data["status"] == HTTP_OK
