"""One engine as a child process, with everything it started: from its first line of output to its last segment."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, BinaryIO

import psutil

from harness.clock import now_ns, poll_until
from harness.engine.beside import Beside
from harness.engine.engine import EngineSite
from harness.engine.proc import signal_if
from harness.engine.ready import copy_log, wait_healthy
from harness.errors import HarnessError, LeftOver, UsageError, WaitExpired
from harness.guards.segments import segment_names
from harness.label import LABEL_VARIABLE, SHARED_MEMORY

RUN_VARIABLE = LABEL_VARIABLE  # every process of a run carries it, so that a sweep finds them all
ENGINE_VARIABLE = "ROLLOUT_HARNESS_ENGINE"  # in the environment of every process of one engine
SERVE = "serve"  # vLLM's command that is an engine
OWN_SEGMENTS = "vllm_dist_"  # nobody else makes such; others are an engine's if it mapped them

_KILL_LIMIT_S = 10.0
_LOG_LIMIT_S = 5.0
_CHUNK_BYTES = 65536
_HELPER = "multiprocessing.resource_tracker"


class ProcessEngine:
    """An engine's server and everything it started."""

    def __init__(
        self,
        *,
        incarnation: str,
        endpoint: str,
        log_path: Path,
        label: str,
        secrets: tuple[str, ...],
        port: socket.socket,
        scratch: Path,
    ) -> None:
        """Take over the port that is held for it and its scratch directory; `label` is its ENGINE_VARIABLE."""
        self._incarnation = incarnation
        self._endpoint = endpoint
        self._log_path = log_path
        self._label = label
        self._secrets = secrets
        self._port = port
        self._scratch = scratch
        self._process: subprocess.Popen[bytes] | None = None
        self._spawned: tuple[tuple[str, ...], Mapping[str, str]] = ((), {})
        self._copier: threading.Thread | None = None
        self._started_ns = now_ns()
        self._segments_before = segment_names(SHARED_MEMORY)
        self._segments_mapped: set[str] = set()
        self._is_stopped = False
        self.left_over: tuple[str, ...] = ()  # shared-memory segments it left behind; known, and removed, after `stop`

    def spawn(self, command: Sequence[str], *, environment: Mapping[str, str]) -> None:
        """Start `command` in its own session with exactly this environment; its output goes to the log.

        Raises: OSError when it cannot be run.
        """
        self._spawned = (tuple(command), dict(environment))
        log = self._log_path.open("wb")
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                cwd=self._scratch,  # `python -m` imports from here first, so nothing may lie around
                start_new_session=True,
                bufsize=0,
            )
        except OSError:
            log.close()
            raise
        self._copier = threading.Thread(
            target=_copy, args=(self._process.stdout, log, self._secrets), name=f"log {self._incarnation}", daemon=True
        )
        self._copier.start()

    @property
    def incarnation(self) -> str:
        """Return the name of this start."""
        return self._incarnation

    @property
    def endpoint(self) -> str:
        """Return `http://127.0.0.1:PORT`."""
        return self._endpoint

    @property
    def log_path(self) -> Path:
        """Return the file with everything the engine printed, scrubbed of the API key."""
        return self._log_path

    @property
    def pid(self) -> int:
        """Return the process id of the server, which leads the group."""
        if self._process is None:
            raise UsageError(f'engine "{self._incarnation}" was never started')
        return self._process.pid

    @property
    def scratch(self) -> Path:
        """Return the directory it runs in, which goes with it."""
        return self._scratch

    @property
    def serve_arguments(self) -> tuple[str, ...]:
        """Return what follows `vllm serve` in its own command; empty for an engine that is no vLLM."""
        command = self._spawned[0]
        return command[command.index(SERVE) + 1 :] if SERVE in command else ()

    def run_beside(self, *arguments: str, directory: Path, log_path: Path) -> Beside:
        """Run another command of the same vLLM in `directory`, which is also its temporary one; it outlives this engine.

        Raises: UsageError for an engine that is no vLLM; HarnessError when it cannot be run.
        """
        command, environment = self._spawned
        if SERVE not in command:
            raise UsageError(f'engine "{self._incarnation}" is no vLLM: it has no other commands')
        own = (ENGINE_VARIABLE, "VLLM_API_KEY")  # a part of the engine would end with it
        kept = {name: value for name, value in environment.items() if name not in own}
        return Beside(
            (*command[: command.index(SERVE)], *arguments),
            environment={**kept, "TMPDIR": str(directory)},
            directory=directory,
            log_path=log_path,
        )

    def exit_code(self) -> int | None:
        """Return the exit code of the server, negative for a signal, or None while it runs."""
        return None if self._process is None else self._process.poll()

    def wait_ready(self, limit_s: float) -> float:
        """Wait until `/health` answers 200 and return the seconds since the start.

        Raises: EngineNotReady as soon as the engine ends, or when the limit passes.
        """
        waited_s = wait_healthy(
            incarnation=self._incarnation,
            endpoint=self._endpoint,
            started_ns=self._started_ns,
            limit_s=limit_s,
            exit_code=self.exit_code,
            log_path=self.log_path,
            finish_log=self._finish_log,
        )
        self._note_segments()
        return waited_s

    def kill(self, role: str, signal_number: int) -> int:
        """Send a signal to the `server` or the `core` and return the process id it went to.

        Raises: UsageError for another role; HarnessError when the server has ended.
        """
        if role not in ("server", "core"):
            raise UsageError(f'role "{role}" of engine "{self._incarnation}" is not one of "server", "core"')
        code = self.exit_code()
        if code is not None:
            raise HarnessError(f'engine "{self._incarnation}" cannot be signalled: it ended with exit code {code}')
        target = psutil.Process(self.pid) if role == "server" else self._computing()[0]
        _signal_all((target,), signal_number)
        return target.pid

    def pause(self) -> None:
        """Freeze the engine core and its workers; the server goes on answering `/health`."""
        _signal_all(self._computing(), signal.SIGSTOP)

    def resume(self) -> None:
        """Let them run again."""
        _signal_all(self._computing(), signal.SIGCONT)

    def parts(self) -> frozenset[str]:
        """Return the process ids of the server and of all it started."""
        return frozenset(str(process.pid) for process in self.members())

    def processes(self, role: str) -> tuple[int, ...]:
        """Return the process ids of the `server`, of what computes (`core`), of the first `worker`, or of `all`.

        Empty once they have ended; where the core has no workers it is the worker.
        """
        members = self.members()
        if role == "all":
            return tuple(process.pid for process in members)
        if role == "server":
            return tuple(process.pid for process in members if process.pid == self.pid)
        computing = self._computing() if members else []
        if role == "worker":
            workers = [process for process in computing if _title(process).startswith("VLLM::Worker")]
            computing = (workers or computing)[:1]
        return tuple(process.pid for process in computing)

    def members(self) -> list[psutil.Process]:
        """Return the living processes of this engine, also those that left its group."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def stop(self, grace_s: float = 10.0) -> int | None:
        """End the engine and all it started, and remove what it left in shared memory. Idempotent.

        Raises: LeftOver when a process survives SIGKILL.
        """
        if self._is_stopped:
            return self.exit_code()
        try:
            if self._process is not None:
                self._note_segments()
                self._end(self._process, grace_s=grace_s)
        finally:
            self._finish_log()
            self._port.close()
            shutil.rmtree(self._scratch, ignore_errors=True)
        self.left_over = tuple(self._remove_segments())
        self._is_stopped = True
        return self.exit_code()

    def _end(self, process: subprocess.Popen[bytes], *, grace_s: float) -> None:
        if process.poll() is None:
            process.terminate()
            _signal_all(self.members(), signal.SIGCONT)  # a frozen process cannot act on being asked
            with suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)

        def ended() -> bool | None:
            members = self.members()
            _signal_all(members, signal.SIGKILL)
            return None if members or process.poll() is None else True

        try:
            poll_until(ended, what=f'end of engine "{self._incarnation}"', limit_s=_KILL_LIMIT_S, every_s=0.01)
        except WaitExpired as error:
            raise LeftOver({"processes": [str(member.pid) for member in self.members()]}) from error

    def _note_segments(self) -> None:
        self._segments_mapped |= _mapped(process.pid for process in self.members())

    def _remove_segments(self) -> Iterator[str]:
        """Remove the new segments that are this engine's and that no process maps; what another one uses stays."""
        new = segment_names(SHARED_MEMORY) - self._segments_before
        own = {name for name in new if name.startswith(OWN_SEGMENTS) or name in self._segments_mapped}
        for name in sorted(own - _mapped(psutil.pids()) if own else own):
            with suppress(OSError):
                (SHARED_MEMORY / name).unlink()
                yield name

    def _finish_log(self) -> None:
        if self._copier is not None:
            self._copier.join(_LOG_LIMIT_S)

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            is_ours = os.getsid(process.pid) == self.pid or process.environ().get(ENGINE_VARIABLE) == self._label
            return is_ours and process.status() != psutil.STATUS_ZOMBIE
        except (psutil.Error, OSError):
            return False

    def _computing(self) -> list[psutil.Process]:
        """Return the engine core, then its workers; the server when it computes alone."""
        members = sorted(self.members(), key=lambda process: process.pid)
        cores = [process for process in members if _title(process).startswith("VLLM::EngineCore")]
        workers = [process for process in members if _title(process).startswith("VLLM::Worker")]
        # Without the package that sets titles: what the server started, but not the helper of multiprocessing.
        others = [process for process in members if process.pid != self.pid and _HELPER not in _title(process)]
        found = [*cores, *workers] or others or [process for process in members if process.pid == self.pid]
        if not found:
            raise UsageError(f'engine "{self._incarnation}" has ended: no process computes')
        return found


def engine_label(site: EngineSite, incarnation: str, scratch: Path) -> str:
    """Return what the processes of one engine wear; an incarnation is used again in the next scenario of a run."""
    return f"{site.run_label}/{incarnation}/{scratch.name}"


def processor_name() -> str:
    """Return the model of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else os.uname().machine


def _mapped(pids: Iterable[int]) -> set[str]:
    """Return the names of the shared-memory segments that these processes have mapped."""
    prefix = f"{SHARED_MEMORY}/"
    found: set[str] = set()
    for pid in pids:
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
            found.update(line.partition(prefix)[2] for line in lines if prefix in line)
    return found


def _copy(output: IO[bytes], log: BinaryIO, secrets: tuple[str, ...]) -> None:
    chunks = iter(lambda: output.read(_CHUNK_BYTES), b"")
    with output, suppress(OSError):
        with suppress(OSError), log:
            copy_log(chunks, log, secrets=secrets)
        for _ in chunks:  # a full disk ends the log, never the engine, which would wait for its pipe to be emptied
            pass


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _signal_all(processes: Sequence[psutil.Process], signal_number: int) -> None:
    for process in processes:
        signal_if(process.pid, signal_number, process.is_running)
