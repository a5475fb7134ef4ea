"""How much one loader may be given: fixed figures, or half of what `harness calibrate` measured on this processor."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.checkpoint.models import default_cache
from harness.engine.process_child import processor_name

FILE_NAME = "loader-capacity.json"
SHARE_OF_MEASURED = 0.5  # the rest is for bursts, and for what else the machine does


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The highest rates that one loader kept here, and where and when that was."""

    processor: str
    cores: int
    events_per_s: float
    requests_per_s: float
    measured_at: str

    def save(self, directory: Path) -> Path:
        """Write it into a directory, whole or not at all, and return the file."""
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / FILE_NAME
        partial = path.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        partial.replace(path)
        return path


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The most that one loader is given in its busiest seconds, and where that figure comes from."""

    events_per_s: float
    requests_per_s: float
    because: str


# About a third of the events, and of the requests, that a loader can do on an ordinary server core.
FIXED = Capacity(
    events_per_s=5_000,
    requests_per_s=500,
    because="fixed figures; `harness calibrate` measures those of this machine",
)


def capacity_here(directory: Path | None = None) -> Capacity:
    """Return half of what was measured on this processor, or the fixed figures when nothing usable was."""
    path = (directory or default_cache()) / FILE_NAME
    try:
        measured = _measured(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return FIXED
    if measured.processor != processor_name() or measured.cores != cores_here():
        return FIXED
    return Capacity(
        events_per_s=SHARE_OF_MEASURED * measured.events_per_s,
        requests_per_s=SHARE_OF_MEASURED * measured.requests_per_s,
        because=f"half of the {measured.events_per_s:,.0f} events and {measured.requests_per_s:,.0f} requests per second "
        f'measured on "{measured.processor}" at {measured.measured_at}',
    )


def cores_here() -> int:
    """Return how many processor cores this process may use."""
    return len(os.sched_getaffinity(0))


def _measured(fields: Mapping[str, Any]) -> Measured:
    """Return what a file says.

    Raises: ValueError, KeyError or TypeError when it is not what was written.
    """
    measured = Measured(
        processor=str(fields["processor"]),
        cores=int(fields["cores"]),
        events_per_s=float(fields["events_per_s"]),
        requests_per_s=float(fields["requests_per_s"]),
        measured_at=str(fields["measured_at"]),
    )
    if not (0 < measured.events_per_s < 1e9 and 0 < measured.requests_per_s < 1e9):
        raise ValueError("rates must be above zero")
    return measured
