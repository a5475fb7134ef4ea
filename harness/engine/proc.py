"""What the kernel says about one process of this machine, read from `/proc`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

GONE = ""
ZOMBIE_OR_DEAD = "ZX"
STOPPED = "T"


@dataclass(frozen=True, slots=True)
class Proc:
    """One process, told apart from a later one of the same number by when it started."""

    pid: int
    start_ticks: int

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
        try:
            lines = Path(f"/proc/{self.pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return False
        return any(file.is_in(line.split(maxsplit=5)) for line in lines)

    def has_open(self, file: FileId) -> bool:
        """Say whether one of its file descriptors is this file."""
        try:
            entries = os.listdir(f"/proc/{self.pid}/fd")
        except OSError:
            return False
        for entry in entries:
            try:
                status = os.stat(f"/proc/{self.pid}/fd/{entry}")
            except OSError:
                continue
            if (status.st_dev, status.st_ino) == (file.device, file.inode):
                return True
        return False


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
