"""Starts the load process, tells it where to send, and hands on every record as it is written.

The load runs in a process of its own, because locust patches the standard library on import.
"""

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import harness
from harness.clock import NS_PER_S, Deadline, now_ns
from harness.errors import LoadBroken
from harness.label import LABEL_VARIABLE
from harness.load.plan import LoadPlan
from harness.load.sse import endpoint_address
from harness.observe.history import Request, request_from_json

START_LIMIT_S = 60.0
ANSWER_LIMIT_S = 10.0
END_LIMIT_S = 5.0
TAIL_EVERY_S = 0.02
LEAD_S = 0.1  # between the start command and the common start


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """How well the load process kept its plan; latencies say nothing unless it did."""

    planned: int  # arrivals due until the stop
    recorded: int
    dropped: int  # beyond the in-flight limit
    lag_ms_p50: float  # dispatch minus planned start
    lag_ms_p99: float
    lag_ms_max: float
    loop_lag_ms_p99: float  # how late a timer of 5 ms was
    cpu_ratio: float  # of one core
    achieved_ratio: float  # sent by the stop, of those due
    exit_code: int


class LoadDriver:
    """One load process. `on_request` is called on a thread of the driver, once per arrival, in order of their ends."""

    def __init__(
        self,
        plan: LoadPlan,
        *,
        directory: Path,
        api_key: str,
        model: str,
        cpus: tuple[int, ...] = (),
        on_request: Callable[[Request], None],
        run_label: str,
    ) -> None:
        self.plan = plan
        self.log_path = directory / "load.log"
        self.records_path = directory / "requests.jsonl"
        self._directory = directory
        self._api_key = api_key
        self._model = model
        self._cpus = cpus
        self._on_request = on_request
        self._run_label = run_label
        self._process: subprocess.Popen[str] | None = None
        self._log: TextIO | None = None
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()  # one per command
        self._news: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()  # what it says by itself
        self._threads: list[threading.Thread] = []
        self._all_written = threading.Event()
        self._lock = threading.Lock()
        self._commands = 0
        self._delivered = 0
        self._callback_error: Exception | None = None
        self._start_ns: int | None = None
        self._report: LoadReport | None = None

    def spawn(self) -> None:
        """Start the load process, which needs a moment for its imports, without waiting for it.

        Raises: LoadBroken when it was started before or cannot be.
        """
        if self._process is not None:
            raise LoadBroken("the load was started already")
        try:
            self._spawn()
        except OSError as error:
            self.close()
            raise LoadBroken(f'the load process cannot be started in "{self._directory}": {error}') from error

    def start(self, endpoint: str = "", incarnation: str = "") -> int:
        """Start the arrivals, and the load process where that was not done; return the time that arrivals count from.

        The first arrivals go to `endpoint`; without one they end in `no_endpoint`.

        Raises: LoadBroken when it does not come up within its limit; nothing is left behind then.
        """
        if self._start_ns is not None:
            raise LoadBroken("the load was started already")
        if self._process is None:
            self.spawn()
        try:
            self._await(self._news, what="get ready", limit_s=START_LIMIT_S, wanted=lambda message: "ready" in message)
            if endpoint:
                self.admit(endpoint, incarnation)
            start_ns = now_ns() + round(LEAD_S * NS_PER_S)
            self._ask("start", start_ns=start_ns)
        except BaseException:
            self.close()
            raise
        self._start_ns = start_ns
        return start_ns

    def admit(self, endpoint: str, incarnation: str) -> None:
        """Send arrivals from now on to `endpoint`; those under way stay where they are.

        Raises: UsageError when it is not `http://HOST:PORT`, LoadBroken when the load process has died.
        """
        endpoint_address(endpoint)
        self._ask("admit", endpoint=endpoint, incarnation=incarnation)

    def withdraw(self) -> None:
        """Send arrivals from now on nowhere: they end in `no_endpoint`.

        Raises: LoadBroken when the load process has died.
        """
        self._ask("withdraw")

    def stop(self, limit_s: float = 15.0) -> LoadReport:
        """Plan no more arrivals, wait for those under way, and return once every record was delivered.

        A request under way may take up to its own total limit; `limit_s` comes on top.
        Raises: LoadBroken when the process died, records are missing, or `on_request` failed.
        """
        if self._report is not None:
            return self._report
        if self._start_ns is None or self._process is None:
            raise LoadBroken("the load was never started")
        stop_ns = int(self._ask("stop")["stop_ns"])
        kept = self._await(
            self._news,
            what="end its last request",
            limit_s=self.plan.shape.limits.total_s + limit_s,
            wanted=lambda message: "ended" in message,
        )["ended"]
        try:
            exit_code = self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise self._broken(f"the load process did not end within {limit_s:g} s after its last record") from None
        self._all_written.set()
        for thread in self._threads:
            thread.join(limit_s)
        planned = self.plan.due(self._start_ns, stop_ns)
        if self._callback_error is not None:
            raise self._broken(f"a record could not be handed on: {self._callback_error}") from self._callback_error
        if exit_code != 0 or not planned == self._delivered == kept["recorded"]:
            raise self._broken(f"{planned} arrivals were due, the load process recorded {kept['recorded']}")
        self.close()
        self._report = LoadReport(planned=planned, exit_code=exit_code, **kept)
        return self._report

    def close(self) -> None:
        """End the load process and everything in its group. Idempotent."""
        process = self._process
        if process is None:
            if self._log is not None:
                self._log.close()
            return
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(END_LIMIT_S)
        self._all_written.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(END_LIMIT_S)
        for stream in (process.stdin, process.stdout, self._log):
            if stream is not None:
                with suppress(BrokenPipeError):  # a command that the dead process never read
                    stream.close()

    def _spawn(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        self.plan.save(self._directory / "plan.json")
        self.records_path.write_bytes(b"")
        self._log = self.log_path.open("w", encoding="utf-8")
        package_root = str(Path(harness.__file__).parent.parent)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, (package_root, os.environ.get("PYTHONPATH", "")))),
            "PYTHONUNBUFFERED": "1",
            LABEL_VARIABLE: self._run_label,
            "VLLM_API_KEY": self._api_key,
        }
        # gevent.monkey patches before the package itself is imported, whatever that may import one day.
        command = [sys.executable, "-P", "-m", "gevent.monkey", "--module", "harness.load.locustfile"]
        command += ["--directory", str(self._directory.resolve()), "--model", self._model]
        command += ["--cpus", ",".join(str(cpu) for cpu in self._cpus)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            bufsize=1,
            env=environment,
            cwd=self._directory,
            start_new_session=True,
        )
        for target in (self._listen, self._tail):
            thread = threading.Thread(target=target, name=f"load-{target.__name__.strip('_')}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _ask(self, do: str, **fields: Any) -> dict[str, Any]:
        """Send one command and return its acknowledgement."""
        with self._lock:
            process = self._process
            if process is None or process.stdin is None or process.stdin.closed:
                raise LoadBroken(f'the load process is not running: it cannot be told to "{do}"')
            self._commands += 1
            try:
                process.stdin.write(json.dumps({"number": self._commands, "do": do, **fields}) + "\n")
                process.stdin.flush()
            except BrokenPipeError:
                raise self._died(f'before it could be told to "{do}"') from None
            return self._await(
                self._answers,
                what=f'answer "{do}"',
                limit_s=ANSWER_LIMIT_S,
                wanted=lambda message: message["ack"] == self._commands,
            )

    def _await(
        self,
        messages: queue.SimpleQueue[dict[str, Any] | None],
        *,
        what: str,
        limit_s: float,
        wanted: Callable[[dict[str, Any]], bool],
    ) -> dict[str, Any]:
        deadline = Deadline.after(limit_s)
        while True:
            try:
                message = messages.get(timeout=deadline.remaining_s())
            except queue.Empty:
                raise self._broken(f"the load process did not {what} within {limit_s:g} s") from None
            if message is None:
                messages.put(None)  # for whoever asks next
                raise self._died(f"before it could {what}")
            if wanted(message):
                return message

    def _listen(self) -> None:
        """Queue what the load process says; None when it has ended."""
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                message = dict(json.loads(line))
            except ValueError:
                continue
            (self._answers if "ack" in message else self._news).put(message)
        for messages in (self._answers, self._news):
            messages.put(None)

    def _tail(self) -> None:
        """Hand on every whole line of the record file, until all are written and read."""
        rest = b""
        with self.records_path.open("rb") as records:
            while True:
                is_last = self._all_written.is_set()
                *lines, rest = (rest + records.read()).split(b"\n")
                for line in lines:
                    self._deliver(line)
                if is_last:
                    return
                if not lines:
                    self._all_written.wait(TAIL_EVERY_S)

    def _deliver(self, line: bytes) -> None:
        try:
            request = request_from_json(json.loads(line))
            self._on_request(request)
        except Exception as error:  # raised again by stop(): a record that nobody saw must not go unnoticed
            self._callback_error = self._callback_error or error
        else:
            self._delivered += 1

    def _died(self, when: str) -> LoadBroken:
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_LIMIT_S)  # its pipes close a moment before it has an exit code
        return self._broken(f"the load process died {when}")

    def _broken(self, because: str) -> LoadBroken:
        code = None if self._process is None else self._process.poll()
        state = "still running" if code is None else f"exit code {code}"
        due = 0 if self._start_ns is None else self.plan.due(self._start_ns, now_ns())
        lines = self.log_path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        said = f'; last line of its log: "{lines[-1].replace(self._api_key or chr(0), "***")}"' if lines else ""
        return LoadBroken(
            f"{because}; {state}; {self._delivered} records of {due} arrivals due by now"
            f" ({len(self.plan.arrivals)} planned){said}; log: {self.log_path}"
        )
