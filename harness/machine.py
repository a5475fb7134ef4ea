"""What a run notes about the machine and the command it was made with."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from harness.label import DIRECTORY_PREFIX, SHARED_MEMORY, RunLabel, parse_label

GIT_LIMIT_S = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Cores:
    """Which processor cores the engine and the load generator get."""

    engine: tuple[int, ...]
    load: tuple[int, ...]

    @classmethod
    def divided(cls) -> Cores:
        """Give the last core this process may use to the load and the others to the engine; a single one is shared."""
        cores = tuple(sorted(os.sched_getaffinity(0)))
        return cls(engine=cores[:-1] or cores, load=cores[-1:])


def other_runs(own: RunLabel) -> tuple[RunLabel, ...]:
    """Return the runs that live on this machine beside ours, of whatever user, by the names of their scratch directories.

    Runs in containers and on hosts with processes of their own cannot be told from dead ones: they are not among them.
    """
    roots = {Path(tempfile.gettempdir()), SHARED_MEMORY}
    names = {path.name for root in roots for path in root.glob(f"{DIRECTORY_PREFIX}*")}
    labels = [parse_label(name.removeprefix(DIRECTORY_PREFIX)) for name in sorted(names)]
    return tuple(
        label
        for label in labels
        if label is not None and label.owner_pid != own.owner_pid and not label.is_foreign() and label.owner_is_alive()
    )


@dataclass(slots=True, kw_only=True)
class Neighbours:
    """Other runs that were seen on this machine while one went on: they share its cores."""

    own: RunLabel
    tell: Callable[[str], None]
    seen: dict[str, RunLabel] = field(default_factory=dict)  # by their token

    def look(self) -> bool:
        """Look at who lives now, and tell of each that was not seen before; return whether there is one."""
        new = [label for label in other_runs(self.own) if label.token not in self.seen]
        for label in new:
            self.seen[label.token] = label
            self.tell(
                f"another run of this harness lives on this machine (run {label.token}, process {label.owner_pid}): they "
                "share its cores, so that both may start, answer and recover later than alone"
            )
        return bool(new)

    def __str__(self) -> str:
        return ", ".join(f"{label.token} (process {label.owner_pid})" for label in self.seen.values())


def command(arguments: list[str]) -> str:
    """Return a command that a person can type to do this again."""
    program = Path(arguments[0]).name
    words = ["python", "-m", Path(arguments[0]).parent.name] if program == "__main__.py" else [program]
    return shlex.join([*words, *arguments[1:]])


def listed(cores: tuple[int, ...]) -> str:
    """Return core numbers as text."""
    return ", ".join(str(core) for core in cores)


def commit() -> str:
    """Return the commit the harness runs from, marked when files are changed; empty outside a repository."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=GIT_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
