"""Another command of an engine's own vLLM, run beside it on this machine: it outlives the engine and goes with the run."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

import psutil

from harness.clock import poll_until
from harness.engine.proc import Proc, find
from harness.engine.undisturbed import undisturbed
from harness.errors import HarnessError, LeftOver, WaitExpired

KILL_LIMIT_S = 10.0
TOLD_LINES = 3
TOLD_BYTES = 64 * 1024

T = TypeVar("T")


@runtime_checkable
class Hosting(Protocol):
    """An engine whose interpreter can run other commands of its vLLM here."""

    @property
    def scratch(self) -> Path:
        """Return the directory it runs in, which goes with it; other engines of its run have theirs beside."""

    @property
    def serve_arguments(self) -> tuple[str, ...]:
        """Return what follows `vllm serve` in its own command: the model, then options."""

    def run_beside(self, *arguments: str, directory: Path, log_path: Path) -> Beside:
        """Run `vllm ARGUMENTS` in a directory, with this engine's interpreter and environment, as no part of it.

        Raises: HarnessError when it cannot be run.
        """


class Beside:
    """A command that runs in a session of its own; whoever started it ends it."""

    def __init__(
        self, command: Sequence[str], *, environment: Mapping[str, str], directory: Path, log_path: Path
    ) -> None:
        """Start it with exactly this environment; its output goes to the log.

        Raises: HarnessError when it cannot be run.
        """
        self._what = " ".join(command[-3:])
        self._log_path = log_path
        self._has_ended = False  # since then its number may be anybody's
        try:
            with log_path.open("wb") as log, undisturbed():
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=dict(environment),
                    cwd=directory,
                    start_new_session=True,
                )
        except OSError as error:
            raise HarnessError(f'"{self._what}" cannot be run beside an engine: {error}') from error

    @property
    def pid(self) -> int:
        """Return its process id, which leads its session."""
        return self._process.pid

    def is_running(self) -> bool:
        """Say whether it, or anything it started in its session, is there."""
        self._process.poll()  # what has ended and is not waited for would still be listed
        return bool(self._members())

    def poll_until(self, ask: Callable[[], T | None], *, what: str, limit_s: float) -> T:
        """Ask until an answer comes and return it.

        Raises: HarnessError as soon as the command ends; WaitExpired when the limit passes.
        """

        def look() -> T | None:
            code = self._process.poll()
            if code is not None:
                raise HarnessError(
                    f'"{self._what}" ended with exit code {code} before {what}; it said: {self._last_words()}; '
                    f"log: {self._log_path}"
                )
            return ask()

        return poll_until(look, what=what, limit_s=limit_s, every_s=0.2)

    def end(self, *, limit_s: float) -> None:
        """Ask it to end, and kill what is left of it after the limit. Idempotent.

        Raises: LeftOver when a process survives SIGKILL.
        """
        if self._process.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(limit_s)

        def ended() -> bool | None:
            for member in self._members():
                member.signal(signal.SIGKILL)
            self._process.poll()
            return None if self._members() else True

        try:
            poll_until(ended, what=f'end of "{self._what}"', limit_s=KILL_LIMIT_S, every_s=0.02)
        except WaitExpired as error:
            raise LeftOver({"processes": [str(member.pid) for member in self._members()]}) from error
        self._has_ended = True

    def _last_words(self) -> str:
        with self._log_path.open("rb") as log:
            log.seek(max(0, self._log_path.stat().st_size - TOLD_BYTES))
            lines = log.read().decode("utf-8", "replace").split("\n")
        return " / ".join([line.strip()[:300] for line in lines if line.strip()][-TOLD_LINES:]) or "nothing"

    def _members(self) -> list[Proc]:
        found: list[Proc] = []
        for pid in () if self._has_ended else psutil.pids():
            with suppress(OSError):
                if os.getsid(pid) == self._process.pid and (proc := find(pid)) is not None and proc.is_running():
                    found.append(proc)
        return found
