"""Which living processes use a file: mapped, open, locked or listened on, as far as this process may see.

Processes of other users cannot be looked into, and those of other PID namespaces (other containers, the host) are not
there at all. So nobody found means "not seen", never "not used".
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

HOST_NAMESPACE = 0xEFFFFFFC  # the inode of the first PID namespace, a constant of Linux
FileKey = tuple[int, int]  # device and inode


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """One process that uses a file. `pid` is None when only the use is known."""

    pid: int | None
    name: str
    how: str  # "maps", "opened", "locks" or "listens on"

    def __str__(self) -> str:
        who = "a process" if self.pid is None else f"process {self.pid}"
        return f'{who} ("{self.name}") {self.how} it' if self.name else f"{who} {self.how} it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """Who was seen using which file, and how far one could see."""

    holders: dict[FileKey, tuple[Holder, ...]]
    looked_at: int  # processes
    closed: int  # processes that could not be looked into
    sees_host: bool  # whether there is no PID namespace above this one

    def of(self, keys: Collection[FileKey]) -> tuple[Holder, ...]:
        """Return who uses any of these files."""
        return tuple(dict.fromkeys(holder for key in keys for holder in self.holders.get(key, ())))

    def __str__(self) -> str:
        limits = [f"{self.closed} could not be looked into"] if self.closed else []
        if not self.sees_host:
            limits.append("processes of other PID namespaces are invisible here")
        return f"looked at {self.looked_at} processes" + "".join(f"; {limit}" for limit in limits)


def look(keys: Collection[FileKey], *, sockets: Collection[Path] = ()) -> Sight:
    """Find who uses these files; `sockets` are the paths of those among them that are Unix sockets."""
    wanted = set(keys)
    found: dict[FileKey, dict[Holder, None]] = {key: {} for key in wanted}
    looked_at = closed = 0
    for pid in sorted(int(entry) for entry in os.listdir("/proc") if entry.isdecimal()):
        try:
            uses = [*_mapped(pid, wanted), *_opened(pid, wanted)]
        except PermissionError:
            closed += 1
            continue
        except OSError:  # it ended
            continue
        looked_at += 1
        for key, how in uses:
            found[key][Holder(pid=pid, name=_name(pid), how=how)] = None
    for key, pid_or_none in _locked(wanted):
        name = "" if pid_or_none is None else _name(pid_or_none)
        found[key][Holder(pid=pid_or_none, name=name, how="locks")] = None
    for path in _listened() & {str(path) for path in sockets}:
        with suppress(OSError, KeyError):
            found[key_of(os.lstat(path))][Holder(pid=None, name="", how="listens on")] = None
    return Sight(
        holders={key: tuple(holders) for key, holders in found.items() if holders},
        looked_at=looked_at,
        closed=closed,
        sees_host=_namespace() == HOST_NAMESPACE and Path("/proc/1").exists(),
    )


def key_of(status: os.stat_result) -> FileKey:
    """Return what identifies a file, whatever its path."""
    return status.st_dev, status.st_ino


def _mapped(pid: int, wanted: set[FileKey]) -> Iterator[tuple[FileKey, str]]:
    with open(f"/proc/{pid}/maps", "rb") as lines:
        for line in lines:
            fields = line.split(None, 5)
            if len(fields) > 4 and fields[4] != b"0":
                key = _device(fields[3]), int(fields[4])
                if key in wanted:
                    yield key, "maps"


def _opened(pid: int, wanted: set[FileKey]) -> Iterator[tuple[FileKey, str]]:
    for number in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError, ProcessLookupError):  # closed meanwhile
            key = key_of(os.stat(f"/proc/{pid}/fd/{number}"))
            if key in wanted:
                yield key, "opened"


def _locked(wanted: set[FileKey]) -> Iterator[tuple[FileKey, int | None]]:
    with suppress(OSError), open("/proc/locks", "rb") as lines:
        for line in lines:
            fields = [field for field in line.split() if field != b"->"]
            with suppress(ValueError, IndexError):
                pid, (device, _, inode) = int(fields[4]), fields[5].rpartition(b":")
                key = _device(device), int(inode)
                if key in wanted:
                    yield key, pid if pid > 0 else None


def _listened() -> set[str]:
    paths = set()
    with suppress(OSError), open("/proc/net/unix", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            fields = line.rstrip("\n").split(None, 7)
            if len(fields) == 8:
                paths.add(fields[7])
    return paths


def _device(text: bytes) -> int:
    major, _, minor = text.partition(b":")
    return os.makedev(int(major, 16), int(minor, 16))


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
