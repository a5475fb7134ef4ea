"""Many questions in one night: how likely a false alarm is among all of them together."""

from __future__ import annotations

from collections.abc import Mapping


def holm(p_values: Mapping[str, float], level: float, *, hypotheses: int | None = None) -> set[str]:
    """Return the names whose hypotheses are rejected so that any false rejection has probability `level` at most.

    `hypotheses` counts those that are judged together with these but are not known yet; they are taken as not rejected.
    Source: Holm's step-down method.
    """
    remaining = max(len(p_values), hypotheses or 0)
    rejected: set[str] = set()
    for name, p in sorted(p_values.items(), key=lambda item: item[1]):
        if p > level / remaining:
            break
        rejected.add(name)
        remaining -= 1
    return rejected


def adjusted(p_values: Mapping[str, float]) -> dict[str, float]:
    """Return Holm's adjusted p-values: each is the smallest level at which its hypothesis is rejected."""
    largest, remaining = 0.0, len(p_values)
    found: dict[str, float] = {}
    for name, p in sorted(p_values.items(), key=lambda item: item[1]):
        largest = max(largest, min(1.0, p * remaining))
        found[name] = largest
        remaining -= 1
    return found
