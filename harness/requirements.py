"""What must be there before a run begins, looked at before anything is started: its absence is one sentence."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from harness.adapter_update import require_adapters
from harness.checkpoint.manifest import read_checkpoint
from harness.checkpoint.models import default_cache
from harness.engine.engine import EngineIdentity
from harness.errors import CheckpointDefect, UsageError
from harness.faults.fault import Demanding
from harness.label import SHARED_MEMORY
from harness.scenario import Scenario
from harness.settings import Settings

FREE_BYTES_MIN = 64 * 2**20  # two tiny checkpoints in a few copies, logs and history of a run
SHARED_FREE_BYTES_MIN = 8 * 2**20  # the weight cache of a tiny checkpoint; containers have 64 MiB in all by default
# Full copies, since not every file system can share blocks. Of the old checkpoint the one that is served; of the new one
# the private one that a fault damages, the one published from it, and the undamaged one of the remedy.
COPIES = {"old": 1, "new": 3}


def require(settings: Settings) -> None:
    """Return if the user's checkpoints can be rolled out and there is room for copies and results.

    Raises: UsageError naming what cannot be used, what was seen and what is needed.
    """
    if not sys.platform.startswith("linux"):
        raise UsageError(
            f"runs need Linux (processes are read from /proc, segments from /dev/shm), this is {sys.platform}"
        )
    copied_bytes = 0
    for which, path in (("old", settings.old), ("new", settings.new)):
        if path is not None:
            copied_bytes += COPIES[which] * _size_bytes(which, path)
    if settings.old is not None and settings.new is not None and settings.old.samefile(settings.new):
        raise UsageError(
            f'the old and the new checkpoint are the same directory "{settings.old.resolve()}": there is nothing to roll out'
        )
    try:
        temporary = Path(tempfile.gettempdir())
    except OSError as error:
        raise UsageError(f"no temporary directory can be written: {error.strerror or error}") from None
    _require_room("temporary", temporary, FREE_BYTES_MIN + copied_bytes)
    _require_room("shared-memory", SHARED_MEMORY, SHARED_FREE_BYTES_MIN)
    _require_room("cache", default_cache(), FREE_BYTES_MIN)
    _require_room("results", settings.results, FREE_BYTES_MIN)


def require_for_faults(scenario: Scenario, identity: EngineIdentity) -> None:
    """Return if what a scenario does can be done to such an engine.

    Raises: EnvironmentMissing with the reason.
    """
    if scenario.adapts:
        require_adapters(identity)
    for fault in scenario.faults:
        if isinstance(fault, Demanding):
            fault.require(identity)


def _size_bytes(which: str, path: Path) -> int:
    """Return the size of a user's checkpoint that an engine could load."""
    try:
        read_checkpoint(path)
        return sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    except (CheckpointDefect, OSError) as error:
        raise UsageError(f'the {which} checkpoint "{path}" cannot be rolled out: {error}') from error


def _require_room(what: str, path: Path, free_bytes_min: int) -> None:
    made_in = next(place for place in (path, *path.parents) if place.exists())  # nothing is made before it is needed
    try:
        with tempfile.TemporaryFile(dir=made_in) as probe:
            probe.write(b"x")
        free_bytes = shutil.disk_usage(made_in).free
    except OSError as error:
        raise UsageError(f'the {what} directory "{path}" cannot be written: {error.strerror or error}') from error
    if free_bytes < free_bytes_min:
        raise UsageError(
            f'the {what} directory "{path}" has {free_bytes / 2**20:.1f} MiB free, at least '
            f"{free_bytes_min / 2**20:.0f} MiB are needed"
        )
