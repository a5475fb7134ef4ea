"""Find and end what a run left behind: by its label only, so that nothing else is ever touched."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.clock import poll_until
from harness.errors import WaitExpired
from harness.label import DIRECTORY_PREFIX, LABEL_KEY, LABEL_VARIABLE, SHARED_MEMORY, RunLabel, parse_label

DOCKER_LIMIT_S = 5
KINDS = ("containers", "networks", "processes", "directories")


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftovers:
    """What still wears one label."""

    label: RunLabel
    containers: tuple[str, ...] = ()
    networks: tuple[str, ...] = ()
    processes: tuple[int, ...] = ()
    directories: tuple[Path, ...] = ()

    def is_empty(self) -> bool:
        """Say whether nothing is left."""
        return not (self.containers or self.networks or self.processes or self.directories)

    def as_json(self) -> dict[str, list[str]]:
        """Return names by kind, without empty kinds."""
        return {kind: [str(thing) for thing in getattr(self, kind)] for kind in KINDS if getattr(self, kind)}


def find(*, docker: bool = True) -> tuple[Leftovers, ...]:
    """Return what wears any run's label, one entry per run. Things of a run on another host are not looked at."""
    found: dict[str, dict[str, list[Any]]] = {}

    def add(label: str, kind: str, thing: Any) -> None:
        parsed = parse_label(label)
        if parsed is not None and not parsed.is_foreign():
            found.setdefault(label, {kind: [] for kind in KINDS})[kind].append(thing)

    for pid, label in _labelled_processes():
        add(label, "processes", pid)
    for root in {Path(tempfile.gettempdir()), SHARED_MEMORY}:
        for path in sorted(root.glob(f"{DIRECTORY_PREFIX}*")):
            add(path.name.removeprefix(DIRECTORY_PREFIX), "directories", path)
    if docker:
        for kind, name, label in _labelled_in_docker():
            add(label, kind, name)
    return tuple(
        Leftovers(label=parsed, **{kind: tuple(things) for kind, things in kinds.items()})
        for label, kinds in sorted(found.items())
        if (parsed := parse_label(label)) is not None
    )


def find_of(label: RunLabel, *, docker: bool = True) -> Leftovers:
    """Return what wears this run's label, apart from the calling process itself."""
    return next((left for left in find(docker=docker) if left.label == label), Leftovers(label=label))


def find_of_dead_runs(*, docker: bool = True) -> tuple[Leftovers, ...]:
    """Return what runs left behind whose owner no longer lives."""
    return tuple(left for left in find(docker=docker) if not left.label.owner_is_alive())


def end(label: RunLabel, *, limit_s: float = 10.0, docker: bool = True) -> Leftovers:
    """End everything of one run and return what is left in spite of it: processes first, since they hold the rest."""

    segments: set[Path] = set()

    def ended() -> Leftovers | None:
        left = find_of(label, docker=docker)
        for pid in left.processes:
            segments.update(_segments_of(pid))
        for pid in left.processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if left.containers or left.networks:
            _remove_from_docker(left.containers, left.networks)
        for directory in left.directories:
            _remove_directory(directory)
        if not left.is_empty():
            return None
        _unlink_unmapped(segments)
        return left

    try:
        return poll_until(ended, what=f"everything of run {label} ended", limit_s=limit_s, every_s=0.2)
    except WaitExpired:
        return find_of(label, docker=docker)


def _segments_of(pid: int) -> set[Path]:
    """Return the shared-memory segments that a process maps; a killed engine cannot remove its own."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    paths = {Path(line.partition("/")[1] + line.partition("/")[2]) for line in lines if f" {SHARED_MEMORY}/" in line}
    return {path for path in paths if path.parent == SHARED_MEMORY and not path.name.endswith(" (deleted)")}


def _unlink_unmapped(segments: set[Path]) -> None:
    """Remove segments that nobody maps any more."""
    if segments:
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        mapped = {segment for pid in pids for segment in _segments_of(pid)}
        for segment in segments - mapped:
            segment.unlink(missing_ok=True)


def _remove_directory(directory: Path) -> None:
    for folder, names, _ in os.walk(directory):
        for name in names:  # read-only checkpoints must not survive for their mode bits
            with contextlib.suppress(OSError):
                os.chmod(Path(folder) / name, 0o700)
    shutil.rmtree(directory, ignore_errors=True)


def _labelled_processes() -> Iterable[tuple[int, str]]:
    marker = f"{LABEL_VARIABLE}=".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environment = (entry / "environ").read_bytes()
        except OSError:
            continue
        for variable in environment.split(b"\0"):
            if variable.startswith(marker):
                yield int(entry.name), variable[len(marker) :].decode("ascii", "replace")


def _labelled_in_docker() -> list[tuple[str, str, str]]:
    """Return (kind, name, label) of labelled containers and networks; empty where no Docker engine answers."""
    client = _docker_client()
    if client is None:
        return []
    try:
        chosen = {"label": [LABEL_KEY]}
        containers = [
            ("containers", c["Id"][:12], c["Labels"][LABEL_KEY]) for c in client.containers(all=True, filters=chosen)
        ]
        networks = [("networks", n["Id"][:12], n["Labels"][LABEL_KEY]) for n in client.networks(filters=chosen)]
        return containers + networks
    except Exception:  # an engine that goes away while asked leaves nothing that could be removed
        return []
    finally:
        client.close()


def _remove_from_docker(containers: Iterable[str], networks: Iterable[str]) -> None:
    client = _docker_client()
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


def _docker_client() -> Any:
    """Return a low-level client, or None where no Docker engine answers."""
    try:
        from harness.engine.docker_daemon import connect

        return connect(timeout_s=DOCKER_LIMIT_S).api
    except Exception:  # no package, no daemon, no permission: no containers of ours
        return None
