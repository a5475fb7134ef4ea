"""The label that everything of one run wears, and from which anybody can tell whether the run still lives."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import tempfile
from dataclasses import dataclass
from pathlib import Path

LABEL_KEY = "io.github.vllm-rollout-harness.run"  # containers and networks
LABEL_VARIABLE = "ROLLOUT_HARNESS_RUN"  # processes, inherited by all their descendants
DIRECTORY_PREFIX = "rollout-harness-"
SHARED_MEMORY = Path("/dev/shm")
_FORM = re.compile(r"([0-9a-f]{8})-([0-9a-f]{8})-(\d+)-(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLabel:
    """A random name plus the host, process id and start time of the harness process that owns the run."""

    token: str
    host: str
    owner_pid: int
    owner_start_ticks: int

    def __str__(self) -> str:
        return f"{self.token}-{self.host}-{self.owner_pid}-{self.owner_start_ticks}"

    def is_foreign(self) -> bool:
        """Say whether the owner ran on another host (or before a reboot), where nobody here can see it."""
        return self.host != _host()

    def owner_is_alive(self) -> bool:
        """Say whether the owning process still runs here."""
        return _start_ticks(self.owner_pid) == self.owner_start_ticks


def new_label() -> RunLabel:
    """Make the label of a run owned by this process."""
    pid = os.getpid()
    return RunLabel(token=secrets.token_hex(4), host=_host(), owner_pid=pid, owner_start_ticks=_start_ticks(pid) or 0)


def parse_label(text: str) -> RunLabel | None:
    """Read a label; None for anything else."""
    match = _FORM.fullmatch(text)
    if match is None:
        return None
    token, host, pid, ticks = match.groups()
    return RunLabel(token=token, host=host, owner_pid=int(pid), owner_start_ticks=int(ticks))


def work_directory(label: RunLabel) -> Path:
    """Return the run's scratch directory, which does not survive it."""
    return Path(tempfile.gettempdir()) / f"{DIRECTORY_PREFIX}{label}"


def shared_memory_directory(label: RunLabel) -> Path:
    """Return the run's directory in shared memory."""
    return SHARED_MEMORY / f"{DIRECTORY_PREFIX}{label}"


def _host() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:
        boot = ""
    namespace = os.stat("/proc/self/ns/pid").st_ino if Path("/proc/self/ns/pid").exists() else 0
    return hashlib.sha256(f"{boot}{os.uname().nodename}{namespace}".encode()).hexdigest()[:8]


def _start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot, or None when it does not run."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the command name before it may hold anything
    return None if fields[0] in "ZX" else int(fields[19])
