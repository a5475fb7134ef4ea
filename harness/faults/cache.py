"""The incident's weight cache that outlives its checkpoint, and the documented purge that comes too late.

Source: incident write-up (`/dev/shm/vllm_weight_cache`, purge in a `postStart` hook); taxonomy row K05.
What another process wrote into the cache is only read here, within limits, and never trusted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from blake3 import blake3

from harness.clock import now_ns, seconds_between
from harness.errors import FaultNotApplicable, ScenarioInvalid, UsageError
from harness.faults.facts import digest_of, weight_facts
from harness.faults.fault import Fault, Injected, Racing, parameters_of
from harness.guards.purge import list_cache, purge

KEYS = ("path", "content")
META_LIMIT_BYTES = 100_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleWeightCache:
    """A weight cache filled by the old engine that the new engine is launched with."""

    name: ClassVar[str] = "stale_weight_cache"
    fault_id: ClassVar[str] = "K05"
    key: str

    def __post_init__(self) -> None:
        if self.key not in KEYS:
            raise ScenarioInvalid(f'stale_weight_cache: key "{self.key}" is unknown; known: {", ".join(KEYS)}')

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def prove(self, cache_directory: Path, *, old: Path, new: Path) -> Injected:
        old_weights, new_weights = weight_facts(old), _weights_if_readable(new)
        entries: dict[str, Any] = {}
        stale = []
        for entry in cache_entries(cache_directory):
            try:
                model, tensors = read_entry(entry)
            except (OSError, ValueError, KeyError, TypeError) as error:
                entries[entry.name] = {"unreadable": f"{type(error).__name__}: {error}"}
                continue
            entries[entry.name] = {"model": model, "tensors": len(tensors), "weights": digest_of(tensors)}
            if tensors == old_weights and tensors != new_weights:
                stale.append(entry.name)
        if old_weights == new_weights:
            because = "the old and the new checkpoint have the same weights: no cache can be stale"
        elif not entries:
            because = f'no complete entry in "{cache_directory}": no engine filled it, or it went with its container'
        else:
            because = f"{len(stale)} of {len(entries)} entries hold the old checkpoint's {len(old_weights)} tensors"
        return Injected.of(
            self,
            proved=bool(stale),
            because=because,
            before={"old_weights": digest_of(old_weights), "new_weights": digest_of(new_weights)},
            after={"entries": entries, "stale": stale, "key": self.key},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LatePurge:
    """The documented purge as a hook that nothing orders before the server reads the cache."""

    name: ClassVar[str] = "late_purge"
    fault_id: ClassVar[str] = "K05"

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def after_start(self, cache_directory: Path) -> Racing:
        if not cache_directory.is_dir():
            raise FaultNotApplicable(f'"{cache_directory}" is not a directory: there is no cache to purge')
        try:
            list_cache(cache_directory)
        except UsageError as error:
            raise FaultNotApplicable(f"there is no cache to purge: {error}") from error
        return PurgeAfterLoad(self, cache_directory)


class PurgeAfterLoad:
    """A purge that loses the race: it runs once the engine has loaded."""

    def __init__(self, fault: Fault, cache_directory: Path) -> None:
        self._fault = fault
        self._directory = cache_directory
        self._started_ns = now_ns()
        self._at_start = _identities(cache_directory)
        self._purged_after_s: float | None = None
        self._error: Exception | None = None
        self.injected = self.state()

    def state(self) -> Injected:
        """Say what the cache held when the engine was started, and whether the purge has taken that away since."""
        left = sorted(
            name for name, identity in _identities(self._directory).items() if self._at_start.get(name) == identity
        )
        ran_s = self._purged_after_s
        done = "has not run yet" if ran_s is None else f"ran {ran_s:.2f} s after the start"
        if self._error is not None:
            done += f" with an error ({self._error})"
        return Injected.of(
            self._fault,
            proved=bool(self._at_start) and ran_s is not None and not left,
            because=f"the cache held {len(self._at_start)} entries when the engine was started; the purge {done}; "
            f"{len(left)} of them are left",
            before={"entries": sorted(self._at_start)},
            after={"entries_left": left, "purged_after_s": ran_s},
        )

    def engine_is_ready(self) -> None:
        """Purge, now that the engine has read what it wanted."""
        try:
            purge(self._directory)
        except (OSError, UsageError) as error:
            self._error = error
        self._purged_after_s = seconds_between(self._started_ns, now_ns())

    def finish(self, *, limit_s: float) -> None:
        """Return: nothing goes on in the background."""


def cache_entries(cache_directory: Path) -> tuple[Path, ...]:
    """Return the complete entries of a weight cache, by name."""
    if not cache_directory.is_dir():
        return ()
    entries = [entry for entry in cache_directory.iterdir() if entry.is_dir() and not entry.is_symlink()]
    return tuple(sorted(entry for entry in entries if (entry / "complete").is_file()))


def read_entry(entry: Path) -> tuple[str, dict[str, Any]]:
    """Return the model an entry is for, and dtype, shape and digest of every tensor as the segment holds it now.

    Raises: ValueError, KeyError or TypeError when it is not an entry; OSError when it cannot be read.
    """
    with _open(entry / "meta.json") as meta:
        fields = json.loads(meta.read(META_LIMIT_BYTES))
    tensors = {}
    with _open(entry / "tensors.bin") as segment:
        size = os.fstat(segment.fileno()).st_size
        for tensor in fields["tensors"]:
            begin, end = int(tensor["begin_byte"]), int(tensor["end_byte"])
            if not 0 <= begin <= end <= size:
                raise ValueError(f"tensor at bytes {begin} to {end}, the segment has {size}")
            segment.seek(begin)
            digest = blake3(segment.read(end - begin)).hexdigest()
            tensors[str(tensor["name"])] = {
                "dtype": str(tensor["dtype"]),
                "shape": [int(dim) for dim in tensor["shape"]],
                "blake3": digest,
            }
    return str(fields["model"]), tensors


def _open(path: Path) -> Any:
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK), "rb")


def _weights_if_readable(path: Path) -> dict[str, Any] | None:
    try:
        return weight_facts(path)
    except FaultNotApplicable:  # damaged as well: then it is certainly not what the cache holds
        return None


def _identities(cache_directory: Path) -> dict[str, tuple[int, int]]:
    found = {}
    for entry in cache_entries(cache_directory):
        try:
            state = entry.stat()
        except FileNotFoundError:  # purged while it was listed
            continue
        found[entry.name] = (state.st_ino, state.st_ctime_ns)
    return found


def stale_weight_cache(*, key: str = "path") -> StaleWeightCache:
    """Keep the weight cache that the old engine filled, keyed by "path" as documented, or by "content".

    Source: incident write-up; taxonomy row K05.
    """
    return StaleWeightCache(key=key)


def late_purge() -> LatePurge:
    """Purge the weight cache as a `postStart` hook may: after the engine has read it, since nothing orders the two.

    Source: incident write-up; taxonomy row K05.
    """
    return LatePurge()
