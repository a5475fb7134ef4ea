"""Find and end what a run left behind: by its label only, so that nothing else is ever touched."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from harness.clock import Deadline, poll_until
from harness.engine.proc import signal_if
from harness.errors import WaitExpired
from harness.label import (
    DIRECTORY_PREFIX,
    LABEL_KEY,
    LABEL_VARIABLE,
    SEGMENTS_RECORD,
    SHARED_MEMORY,
    RunLabel,
    parse_label,
)

DOCKER_LIMIT_S = 5
UNMOUNT_LIMIT_S = 10.0
KINDS = ("containers", "networks", "processes", "directories")


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftovers:
    """What still wears one label.

    `unanswered` says why Docker could not be asked for containers and networks; it is empty when Docker was asked, and
    when there is no Docker engine here that could hold any.
    """

    label: RunLabel
    containers: tuple[str, ...] = ()
    networks: tuple[str, ...] = ()
    processes: tuple[int, ...] = ()
    directories: tuple[Path, ...] = ()
    unanswered: str = ""

    def is_empty(self) -> bool:
        """Say whether it is known that nothing is left: false too when Docker did not answer."""
        return not (self.containers or self.networks or self.processes or self.directories or self.unanswered)

    def as_json(self) -> dict[str, list[str]]:
        """Return names by kind, without empty kinds; `unanswered` holds why Docker could not be asked."""
        names = {kind: [str(thing) for thing in getattr(self, kind)] for kind in KINDS if getattr(self, kind)}
        return names | ({"unanswered": [self.unanswered]} if self.unanswered else {})


def find(*, docker: bool = True) -> tuple[Leftovers, ...]:
    """Return what wears any run's label, one entry per run. Things of a run on another host are not looked at."""
    return _look(docker=docker)[0]


def find_of(label: RunLabel, *, docker: bool = True) -> Leftovers:
    """Return what wears this run's label, apart from the calling process itself."""
    found, unanswered = _look(docker=docker)
    return next((left for left in found if left.label == label), Leftovers(label=label, unanswered=unanswered))


def find_of_dead_runs(*, docker: bool = True) -> tuple[Leftovers, ...]:
    """Return what runs left behind whose owner no longer lives."""
    return tuple(left for left in find(docker=docker) if not left.label.owner_is_alive())


def docker_unanswered() -> str:
    """Return why Docker cannot be asked for what runs left behind; empty when it can, or when there is none here."""
    return _labelled_in_docker()[1]


def end(label: RunLabel, *, limit_s: float = 10.0, settle_s: float = 0.0, docker: bool = True) -> Leftovers:
    """End everything of one run and return what is left in spite of it: processes first, since they hold the rest.

    Nothing may be seen for `settle_s` before that counts: a container whose creation was under way appears late.
    """
    segments: set[Path] = set()
    quiet: Deadline | None = None

    def ended() -> Leftovers | None:
        nonlocal quiet
        left = find_of(label, docker=docker)
        for pid in left.processes:
            segments.update(_segments_of(pid))
        for pid in left.processes:
            with contextlib.suppress(PermissionError):
                signal_if(pid, signal.SIGKILL, partial(_wears, pid, label))
        if left.containers or left.networks:
            _remove_from_docker(left.containers, left.networks)
        for directory in left.directories:
            segments.update(_recorded_segments(directory))
            remove_directory(directory)
        if not left.processes:  # whether Docker answers or not
            _unlink_unmapped(segments)
        if not left.is_empty():
            quiet = None
            return None
        quiet = quiet or Deadline.after(settle_s)
        if not quiet.is_expired():
            return None
        return left

    try:
        return poll_until(ended, what=f"everything of run {label} ended", limit_s=limit_s, every_s=0.2)
    except WaitExpired:
        return find_of(label, docker=docker)


def _look(*, docker: bool) -> tuple[tuple[Leftovers, ...], str]:
    """Return what wears any run's label, and why Docker did not answer."""
    found: dict[str, dict[str, list[Any]]] = {}

    def add(label: str, kind: str, thing: Any) -> None:
        parsed = parse_label(label)
        if parsed is not None and not parsed.is_foreign():
            found.setdefault(label, {kind: [] for kind in KINDS})[kind].append(thing)

    for pid, label in _labelled_processes():
        add(label, "processes", pid)
    for root in {Path(tempfile.gettempdir()), SHARED_MEMORY}:
        for path in sorted(root.glob(f"{DIRECTORY_PREFIX}*")):
            if _is_own_directory(path):
                add(path.name.removeprefix(DIRECTORY_PREFIX), "directories", path)
    in_docker, unanswered = _labelled_in_docker() if docker else ([], "")
    for kind, name, label in in_docker:
        add(label, kind, name)
    things = tuple(
        Leftovers(label=parsed, unanswered=unanswered, **{kind: tuple(names) for kind, names in kinds.items()})
        for label, kinds in sorted(found.items())
        if (parsed := parse_label(label)) is not None
    )
    return things, unanswered


def _segments_of(pid: int) -> set[Path]:
    """Return the shared-memory segments that a process maps; a killed engine cannot remove its own."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    paths = {Path(line.partition("/")[1] + line.partition("/")[2]) for line in lines if f" {SHARED_MEMORY}/" in line}
    return {path for path in paths if path.parent == SHARED_MEMORY and not path.name.endswith(" (deleted)")}


def _recorded_segments(directory: Path) -> set[Path]:
    """Return the segments whose processes were killed before they could be looked at: a fault wrote their names down."""
    names: set[str] = set()
    for record in directory.glob(f"*/{SEGMENTS_RECORD}"):
        with contextlib.suppress(OSError):
            names.update(record.read_text(encoding="utf-8", errors="replace").splitlines())
    return {SHARED_MEMORY / name for name in names if name not in ("", ".", "..") and "/" not in name}


def _unlink_unmapped(segments: set[Path]) -> None:
    """Remove segments that nobody maps any more."""
    if segments:
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        mapped = {segment for pid in pids for segment in _segments_of(pid)}
        for segment in segments - mapped:
            with contextlib.suppress(OSError):  # somebody else's, or gone
                segment.unlink()


def _is_own_directory(path: Path) -> bool:
    """Say whether this is a directory of the user who sweeps: anybody can put a link of that name into /tmp."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def remove_directory(directory: Path) -> None:
    """Remove a run's own directory whatever the mode bits in it say, with what is mounted there."""
    if not _is_own_directory(directory):
        return
    _unmount_below(directory)
    _open_up(str(directory))
    with contextlib.suppress(OSError):
        for _, names, _, folder in os.fwalk(directory, follow_symlinks=False):
            for name in names:  # read-only checkpoints must not survive for their mode bits
                _open_up(name, inside=folder)
    shutil.rmtree(directory, ignore_errors=True)


def _unmount_below(directory: Path) -> None:
    """Take away what a fault mounted inside a directory of ours; only root can have mounted anything."""
    try:
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").strip("\n").split("\n")
    except OSError:
        return
    directory = directory.resolve()  # the kernel names places without the links that lead to them
    places = [Path(_unescaped(line.split(" ")[1])) for line in lines]
    for place in sorted((p for p in places if p != directory and p.is_relative_to(directory)), reverse=True):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            command = ["umount", "--lazy", str(place)]
            subprocess.run(command, capture_output=True, timeout=UNMOUNT_LIMIT_S, check=False)


def _unescaped(text: str) -> str:
    """Return a path of `/proc/self/mounts` as it is: there blank, tab, newline and backslash are octal numbers."""
    return re.sub(r"\\(040|011|012|134)", lambda found: chr(int(found[1], 8)), text)


def _open_up(name: str, *, inside: int | None = None) -> None:
    """Let the owner into a directory of ours; links and what belongs to others stay as they are."""
    with contextlib.suppress(OSError):
        place = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=inside)
        try:
            if os.fstat(place).st_uid == os.geteuid():
                os.chmod(f"/proc/self/fd/{place}", 0o700)  # the very directory that was looked at
        finally:
            os.close(place)


def _labelled_processes() -> Iterable[tuple[int, str]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            for label in _labels_of(int(entry.name)):
                yield int(entry.name), label


def _labels_of(pid: int) -> list[str]:
    marker = f"{LABEL_VARIABLE}=".encode()
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return []
    worn = [variable for variable in environment.split(b"\0") if variable.startswith(marker)]
    return [variable[len(marker) :].decode("ascii", "replace") for variable in worn]


def _wears(pid: int, label: RunLabel) -> bool:
    """Say whether the process of this number wears the label now."""
    return str(label) in _labels_of(pid)


def _labelled_in_docker() -> tuple[list[tuple[str, str, str]], str]:
    """Return (kind, name, label) of labelled containers and networks, and why Docker did not answer."""
    client, unanswered = _docker_client()
    if client is None:
        return [], unanswered
    try:
        chosen = {"label": [LABEL_KEY]}
        containers = [
            ("containers", c["Id"][:12], c["Labels"][LABEL_KEY]) for c in client.containers(all=True, filters=chosen)
        ]
        networks = [("networks", n["Id"][:12], n["Labels"][LABEL_KEY]) for n in client.networks(filters=chosen)]
        return containers + networks, ""
    except Exception as error:  # whatever it was: what Docker holds is not known
        return [], _why_unanswered(error)
    finally:
        client.close()


def _remove_from_docker(containers: Iterable[str], networks: Iterable[str]) -> None:
    client, _ = _docker_client()
    if client is None:
        return
    try:
        for name in containers:
            with contextlib.suppress(Exception):  # tried again until the limit
                client.remove_container(name, force=True, v=True)
        for name in networks:
            with contextlib.suppress(Exception):
                client.remove_network(name)
    finally:
        client.close()


def _docker_client() -> tuple[Any, str]:
    """Return a low-level client, or None and why Docker did not answer; the reason is empty where there is no Docker."""
    try:
        from harness.engine.docker_daemon import connect, is_absent
    except ImportError:  # without the package no run has made a container
        return None, ""
    try:
        return connect(timeout_s=DOCKER_LIMIT_S).api, ""
    except Exception as error:
        return None, "" if is_absent(error) else _why_unanswered(error)


def _why_unanswered(error: Exception) -> str:
    from harness.engine.docker_daemon import innermost

    return f"Docker did not answer: {innermost(error)}"
