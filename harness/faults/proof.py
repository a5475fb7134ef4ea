"""How a damage proves itself: the same facts are read from disk before and after, and something must hold between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from harness.faults.facts import refusal
from harness.faults.fault import Fault, Injected

Facts = Mapping[str, Any]


def prove(
    fault: Fault,
    change: Callable[[], object],
    *,
    look: Callable[[], Facts],
    holds: Callable[[Facts, Facts], bool],
    told: Callable[[Facts, Facts], str],
) -> Injected:
    """Make a change, look before and after, and say whether the change did what it should.

    `holds` and `told` are given what was seen before and after: nothing else proves anything.
    """
    before = look()
    change()
    after = look()
    return Injected.of(
        fault,
        proved=holds(before, after),
        because=told(before, after),
        before=before,
        after=after,
    )


def weight_file_facts(path: Path) -> dict[str, Any]:
    """Return name, size, and why a reader would refuse a weight file; its data are not read. Size None: absent."""
    try:
        size_bytes: int | None = path.stat().st_size
    except OSError:
        size_bytes = None
    return {"shard": path.name, "size_bytes": size_bytes, "defect": refusal(path)}


def told_of_file(before: Facts, after: Facts) -> str:
    """Say what became of a weight file, from its `weight_file_facts`."""
    fits = "its header fits" if after["defect"] is None else f"a reader refuses it: {after['defect']}"
    return f'"{after["shard"]}" had {told_size(before["size_bytes"])}, has {told_size(after["size_bytes"])}; {fits}'


def told_size(size_bytes: int | None) -> str:
    """Return a size in words."""
    return "no file" if size_bytes is None else f"{size_bytes:,} bytes"
