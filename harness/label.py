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
SEGMENTS_RECORD = "segments"  # names of what killed processes leave in shared memory; in a directory of the scenario
MACHINE_ID = Path("/etc/machine-id")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PROCESS_NAMESPACE = Path("/proc/self/ns/pid")
# Short, because sockets lie in directories of this name and a socket's path holds 107 characters.
_FORM = re.compile(r"([0-9a-f]{6})-([0-9a-f]{4})([0-9a-f]{4})([0-9a-f]{4})-(\d+)-(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLabel:
    """A random name plus where and when the harness process that owns the run was started."""

    token: str
    host: str
    boot: str
    namespace: str  # of process ids: a container has one of its own
    owner_pid: int
    owner_start_ticks: int

    def __str__(self) -> str:
        return f"{self.token}-{self.host}{self.boot}{self.namespace}-{self.owner_pid}-{self.owner_start_ticks}"

    def is_foreign(self) -> bool:
        """Say whether the owner may live where nobody here can see it: on another host, or in another container."""
        return self.host != _host() or (self.boot == _boot() and self.namespace != _namespace())

    def owner_is_alive(self) -> bool:
        """Say whether the owning process still runs here; none does that was started before a reboot."""
        return self.boot == _boot() and _start_ticks(self.owner_pid) == self.owner_start_ticks


def new_label() -> RunLabel:
    """Make the label of a run owned by this process."""
    pid = os.getpid()
    return RunLabel(
        token=secrets.token_hex(3),
        host=_host(),
        boot=_boot(),
        namespace=_namespace(),
        owner_pid=pid,
        owner_start_ticks=_start_ticks(pid) or 0,
    )


def parse_label(text: str) -> RunLabel | None:
    """Read a label; None for anything else."""
    match = _FORM.fullmatch(text)
    if match is None:
        return None
    token, host, boot, namespace, pid, ticks = match.groups()
    return RunLabel(
        token=token,
        host=host,
        boot=boot,
        namespace=namespace,
        owner_pid=int(pid),
        owner_start_ticks=int(ticks),
    )


def work_directory(label: RunLabel) -> Path:
    """Return the run's scratch directory, which does not survive it."""
    return Path(tempfile.gettempdir()) / f"{DIRECTORY_PREFIX}{label}"


def shared_memory_directory(label: RunLabel) -> Path:
    """Return the run's directory in shared memory."""
    return SHARED_MEMORY / f"{DIRECTORY_PREFIX}{label}"


def _host() -> str:
    # Without an id of the machine an earlier boot cannot be told from another host of the same name.
    return _hashed(os.uname().nodename, _content(MACHINE_ID) or _content(BOOT_ID))


def _boot() -> str:
    return _hashed(_content(BOOT_ID))


def _namespace() -> str:
    return _hashed(str(PROCESS_NAMESPACE.stat().st_ino) if PROCESS_NAMESPACE.exists() else "")


def _hashed(*words: str) -> str:
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:4]


def _content(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot, or None when it does not run."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the command name before it may hold anything
    return None if fields[0] in "ZX" else int(fields[19])
