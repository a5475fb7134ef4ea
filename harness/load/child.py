"""One loader as its parent sees it: a child process that is told what to do in JSON lines and answers in the same way."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import harness
from harness.clock import Deadline
from harness.errors import LoadBroken
from harness.label import LABEL_VARIABLE

ANSWER_LIMIT_S = 10.0
END_LIMIT_S = 5.0

Messages = queue.SimpleQueue[dict[str, Any] | None]


class LoaderChild:
    """A loader process in a process group of its own; `directory` gets its records, heartbeats and log.

    Raises: OSError when it cannot be started.
    """

    def __init__(
        self,
        number: int,
        *,
        loaders: int,
        directory: Path,
        model: str,
        api_key: str,
        cpus: tuple[int, ...],
        run_label: str,
        web_ui: bool,
    ) -> None:
        self.number = number
        self.log_path = directory / f"loader-{number}.log"
        self.records_path = directory / f"requests-{number}.jsonl"
        self.heartbeats_path = directory / f"heartbeats-{number}.jsonl"
        self._api_key = api_key
        self._log: TextIO = self.log_path.open("w", encoding="utf-8")
        self._answers: Messages = queue.SimpleQueue()  # one per command
        self._news: Messages = queue.SimpleQueue()  # what it says by itself
        self._commands = 0
        try:
            for path in (self.records_path, self.heartbeats_path):
                path.write_bytes(b"")
            # gevent.monkey patches before the package itself is imported, whatever that may import one day.
            command = [sys.executable, "-P", "-m", "gevent.monkey", "--module", "harness.load.locustfile"]
            command += ["--directory", str(directory.resolve()), "--model", model]
            command += ["--cpus", ",".join(str(cpu) for cpu in cpus)]
            command += ["--loader", str(number), "--loaders", str(loaders), *(["--web-ui"] if web_ui else [])]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                bufsize=1,
                env=_environment(api_key=api_key, run_label=run_label),
                cwd=directory,
                start_new_session=True,
            )
        except BaseException:
            self._log.close()
            raise
        self._listener = threading.Thread(target=self._listen, name=f"load-listen-{number}", daemon=True)
        self._listener.start()

    def tell(self, do: str, **fields: Any) -> None:
        """Send one command; `answer` waits for what it says to it.

        Raises: LoadBroken when the process has ended.
        """
        assert self._process.stdin is not None
        if self._process.stdin.closed:
            raise LoadBroken(f'loader {self.number} is not running: it cannot be told to "{do}"')
        self._commands += 1
        try:
            self._process.stdin.write(json.dumps({"number": self._commands, "do": do, **fields}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._died(f'before it could be told to "{do}"') from None

    def answer(self) -> dict[str, Any]:
        """Return the answer to the last command.

        Raises: LoadBroken when there is none within its limit.
        """
        return self._await(
            self._answers, "answer", limit_s=ANSWER_LIMIT_S, wanted=lambda message: message["ack"] == self._commands
        )

    def news(self, name: str, *, limit_s: float) -> Any:
        """Wait until the process says something under this name and return it.

        Raises: LoadBroken when it does not within the limit, or has ended.
        """
        return self._await(self._news, f'say "{name}"', limit_s=limit_s, wanted=lambda message: name in message)[name]

    @property
    def has_ended(self) -> bool:
        """Say whether the process is gone."""
        return self._process.poll() is not None

    def wait(self, limit_s: float) -> int:
        """Wait for the end of the process and return its exit code.

        Raises: LoadBroken when it goes on.
        """
        try:
            return self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise self.broken(f"did not end within {limit_s:g} s after its last record") from None

    def kill(self) -> None:
        """End the process and everything in its group. Idempotent."""
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(END_LIMIT_S)
        self._listener.join(END_LIMIT_S)
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                with suppress(BrokenPipeError):  # a command that the dead process never read
                    stream.close()

    def broken(self, because: str) -> LoadBroken:
        """Return an error that says in what state the process is and what it printed last."""
        code = self._process.poll()
        state = "still running" if code is None else f"exit code {code}"
        lines = self.log_path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        said = f'; last line of its log: "{lines[-1].replace(self._api_key or chr(0), "***")}"' if lines else ""
        return LoadBroken(f"loader {self.number} {because}; {state}{said}; log: {self.log_path}")

    def _await(
        self, messages: Messages, what: str, *, limit_s: float, wanted: Callable[[dict[str, Any]], bool]
    ) -> dict[str, Any]:
        deadline = Deadline.after(limit_s)
        while True:
            try:
                message = messages.get(timeout=deadline.remaining_s())
            except queue.Empty:
                raise self.broken(f"did not {what} within {limit_s:g} s") from None
            if message is None:
                messages.put(None)  # for whoever asks next
                raise self._died(f"before it could {what}")
            if wanted(message):
                return message

    def _listen(self) -> None:
        """Queue what the process says; None when it has ended."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                message = dict(json.loads(line))
            except ValueError:
                continue
            (self._answers if "ack" in message else self._news).put(message)
        for messages in (self._answers, self._news):
            messages.put(None)

    def _died(self, when: str) -> LoadBroken:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_LIMIT_S)  # its pipes close a moment before it has an exit code
        return self.broken(f"died {when}")


def _environment(*, api_key: str, run_label: str) -> dict[str, str]:
    package_root = str(Path(harness.__file__).parent.parent)
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH", "")))),
        "PYTHONUNBUFFERED": "1",
        LABEL_VARIABLE: run_label,
        "VLLM_API_KEY": api_key,
    }
