"""What the kernel says about one process of this machine, read from `/proc`, and signals that reach that process alone."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

GONE = ""
ZOMBIE_OR_DEAD = "ZX"
STOPPED = "T"


def signal_if(pid: int, number: int, is_meant: Callable[[], bool]) -> bool:
    """Send a signal to the process of this number if it is the one that is meant; return whether it was sent.

    A process that was listed may have ended, and its number be another's by now. So the process is taken hold of first, and
    looked at then: whatever takes the number over afterwards is not hit.
    Raises: PermissionError when this user may not.
    """
    try:
        held = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        if not is_meant():
            return False
        signal.pidfd_send_signal(held, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(held)
    return True


@dataclass(frozen=True, slots=True)
class Proc:
    """One process, told apart from a later one of the same number by when it started."""

    pid: int
    start_ticks: int

    def signal(self, number: int) -> bool:
        """Send it a signal; return whether it was there to get one. Never reaches a later process of its number.

        Raises: PermissionError when this user may not.
        """
        return signal_if(self.pid, number, lambda: self.state() != GONE)

    def state(self) -> str:
        """Return the kernel's letter for its state (R, S, D, T, Z ...), or "" once it is gone."""
        fields = _stat(self.pid)
        return fields[0] if fields and int(fields[19]) == self.start_ticks else GONE

    def is_running(self) -> bool:
        """Say whether it is there and not merely waiting to be reaped."""
        state = self.state()
        return state != GONE and state not in ZOMBIE_OR_DEAD

    def maps(self, file: FileId) -> bool:
        """Say whether a file is mapped into its memory."""
        inode = f" {file.inode} "  # looked for first: an engine maps thousands of files, and is asked often
        return any(inode in line and file.is_in(line.split(maxsplit=5)) for line in self._lines("maps"))

    def has_open(self, file: FileId) -> bool:
        """Say whether one of its file descriptors is this file."""
        return any(True for _ in self._descriptors(file))

    def mapped_in_bytes(self, file: FileId) -> int:
        """Return how much of a mapped file this process has touched, by its largest mapping: what is in its page table.

        The kernel brings in what lies around a byte that is asked for, so that a small number says nothing.
        """
        largest, is_of_file = 0, False
        for line in self._lines("smaps"):
            fields = line.split(maxsplit=5)
            if fields and "-" in fields[0] and not fields[0].endswith(":"):
                is_of_file = file.is_in(fields)
            elif is_of_file and fields and fields[0] == "Rss:":
                largest = max(largest, int(fields[1]) * 1024)
        return largest

    def read_to_byte(self, file: FileId) -> int:
        """Return how far into a file it has read, by the farthest of its descriptors; 0 when it has none."""
        farthest = 0
        for descriptor in self._descriptors(file):
            for line in self._lines(f"fdinfo/{descriptor}"):
                if line.startswith("pos:"):
                    farthest = max(farthest, int(line.split()[1]))
        return farthest

    def _descriptors(self, file: FileId) -> Iterator[str]:
        try:
            entries = os.listdir(f"/proc/{self.pid}/fd")
        except OSError:
            return
        for entry in entries:
            try:
                status = os.stat(f"/proc/{self.pid}/fd/{entry}")
            except OSError:
                continue
            if (status.st_dev, status.st_ino) == (file.device, file.inode):
                yield entry

    def _lines(self, name: str) -> list[str]:
        try:
            return Path(f"/proc/{self.pid}/{name}").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return []


@dataclass(frozen=True, slots=True)
class FileId:
    """A file as the kernel knows it, whatever path leads to it: a container has other paths than its host."""

    device: int
    inode: int
    name: str

    @classmethod
    def of(cls, path: Path) -> FileId:
        """Return the identity of a file.

        Raises: OSError when it cannot be looked at.
        """
        status = path.stat()
        return cls(status.st_dev, status.st_ino, path.name)

    def is_in(self, mapping: list[str]) -> bool:
        """Say whether the fields of one line of `/proc/PID/maps` are about this file.

        Some file systems show another device number there than `stat` does: then the file's name decides.
        """
        if len(mapping) < 6 or mapping[4] != str(self.inode):
            return False
        device = f"{os.major(self.device):02x}:{os.minor(self.device):02x}"
        return mapping[3] == device or mapping[5].rpartition("/")[2] == self.name


def find(pid: int) -> Proc | None:
    """Return the process of this number, or None when there is none."""
    fields = _stat(pid)
    return Proc(pid, int(fields[19])) if fields else None


def _stat(pid: int) -> list[str]:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()  # the command name before it may hold anything
