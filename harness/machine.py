"""What a run notes about the machine and the command it was made with."""

from __future__ import annotations

import os
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

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
