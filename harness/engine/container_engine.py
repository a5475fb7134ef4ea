"""One running vLLM container: its port, its log, its processes and its end."""

from __future__ import annotations

import contextlib
import signal
import threading
from pathlib import Path

import docker.errors
import psutil
import requests
from docker.models.containers import Container
from testcontainers.core.container import DockerContainer

from harness.clock import now_ns, poll_until, seconds_between
from harness.engine.container_options import PORT, ContainerOptions
from harness.engine.container_signals import FIND_ROLE, send_signal
from harness.engine.docker_daemon import docker_sentence
from harness.engine.engine import EngineSite
from harness.engine.ready import copy_log, wait_healthy
from harness.errors import HarnessError, UsageError, WaitExpired

LOG_END_LIMIT_S = 10.0
KILL_LIMIT_S = 30.0
_INSPECT_EVERY_S = 1.0


class ContainerEngine:
    """A started container: an Engine that is also Killable and Pausable."""

    def __init__(
        self, running: DockerContainer, options: ContainerOptions, *, incarnation: str, site: EngineSite
    ) -> None:
        self._running = running
        self._container: Container = running.get_wrapped_container()
        self._incarnation = incarnation
        self._started_ns = now_ns()
        self._log_path = site.log_directory / f"{incarnation}.log"
        self._secrets = (options.environment["VLLM_API_KEY"],)
        self._exit_code: int | None = None
        self._is_removed = False
        self._inspected_ns = 0
        self._endpoint = f"http://127.0.0.1:{_published_port(self._container)}"
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log_path.write_bytes(b"")
        self._is_log_complete = False
        self._is_frozen = False
        self._log_thread = threading.Thread(target=self._follow_log, name=f"log of {incarnation}", daemon=True)
        self._log_thread.start()

    @property
    def incarnation(self) -> str:
        """Return the name of this start."""
        return self._incarnation

    @property
    def endpoint(self) -> str:
        """Return where the API is; port 0 (which refuses) when the container ended at once."""
        return self._endpoint

    @property
    def log_path(self) -> Path:
        """Return the log, scrubbed of the API key; it grows while the engine runs."""
        return self._log_path

    @property
    def container_id(self) -> str:
        """Return Docker's id of the container."""
        return str(self._container.id)

    def parts(self) -> frozenset[str]:
        """Return the short id of the container, as a sweep lists it."""
        return frozenset({self.container_id[:12]})

    def exit_code(self) -> int | None:
        """Return the exit code, negative for a signal, or None while the container runs."""
        if self._exit_code is not None or self._is_removed:
            return self._exit_code
        # The log ends when the container does, which is cheaper to watch than to ask the daemon.
        if self._log_thread.is_alive() and seconds_between(self._inspected_ns, now_ns()) < _INSPECT_EVERY_S:
            return None
        self._inspected_ns = now_ns()
        try:
            self._container.reload()
        except docker.errors.NotFound:
            self._exit_code = -int(signal.SIGKILL)  # somebody removed it by force
            return self._exit_code
        except (docker.errors.APIError, requests.RequestException):
            return None
        state = self._container.attrs["State"]
        if state["Status"] in ("exited", "dead"):
            self._exit_code = _exit_code(int(state["ExitCode"]))
        return self._exit_code

    def wait_ready(self, limit_s: float) -> float:
        """Wait until `/health` answers 200 and return the seconds since the start.

        Raises: EngineNotReady as soon as the container ends, or when the limit passes.
        """
        return wait_healthy(
            incarnation=self._incarnation,
            endpoint=self._endpoint,
            started_ns=self._started_ns,
            limit_s=limit_s,
            exit_code=self.exit_code,
            log_path=self._log_path,
            finish_log=self._finish_log,
        )

    def stop(self, grace_s: float = 10.0) -> int | None:
        """Ask the engine to end, kill it after `grace_s`, complete its log and remove it. Idempotent."""
        if self._is_removed:
            return self._exit_code
        with docker_sentence(f'stop of engine "{self._incarnation}"'):
            try:
                if self.exit_code() is None:
                    with contextlib.suppress(docker.errors.APIError, WaitExpired):  # it may end by itself meanwhile
                        self._ask_to_end()
                        self._wait_end(grace_s)
                if self.exit_code() is None:
                    with contextlib.suppress(docker.errors.APIError):
                        self._container.kill(signal="SIGKILL")
                    self._wait_end(KILL_LIMIT_S)
                self._finish_log()
            finally:
                self._remove()
        return self._exit_code

    def kill(self, role: str, signal_number: int) -> int:
        """Send a signal to `server` or `core` and return its process id as the container numbers it.

        Raises: UsageError for another role, HarnessError when no such process runs or it cannot be signalled.
        """
        if role not in FIND_ROLE:
            raise UsageError(f'"{role}" is not a process of vLLM: expected one of {", ".join(FIND_ROLE)}')
        number = int(signal_number)
        if number == signal.SIGSTOP:
            self._is_frozen = True  # before it is: an interrupt in the middle must not hide it
        with docker_sentence(f'signal {number} to the {role} of engine "{self._incarnation}"'):
            pid = send_signal(self._container, role, number)
        if pid is None:
            raise HarnessError(f'engine "{self._incarnation}" has no {role} process that takes signal {number}')
        return pid

    def processes(self, role: str) -> tuple[int, ...]:
        """Return the host's process ids of the `server`, of what computes (`core`), of the first `worker`, or of `all`.

        Empty when the container has ended, and where the Docker engine runs on another machine.
        """
        if self._is_removed:
            return ()
        with docker_sentence(f'processes of engine "{self._incarnation}"'):
            self._container.reload()
        init_pid = int(self._container.attrs["State"].get("Pid") or 0)
        try:
            if not init_pid or self.container_id not in Path(f"/proc/{init_pid}/cgroup").read_text(encoding="ascii"):
                return ()
            init = psutil.Process(init_pid)
            members = init.children(recursive=True)
        except (OSError, psutil.Error):
            return ()
        if role == "server":
            return tuple(process.pid for process in members if process.ppid() == init_pid)
        if role in ("core", "worker"):
            core = [process for process in members if "EngineCore" in _title(process)]
            workers = [process for process in members if "VLLM::Worker" in _title(process)]
            return tuple(process.pid for process in ([*core, *workers] if role == "core" else (workers or core)[:1]))
        return (init_pid, *(process.pid for process in members))

    def run_inside(self, *command: str) -> tuple[int, str]:
        """Run a command in the container and return its exit code and what it printed."""
        with docker_sentence(f'"{command[0]}" in engine "{self._incarnation}"'):
            done = self._container.exec_run(list(command))
        assert isinstance(done.output, bytes)
        assert done.exit_code is not None
        return int(done.exit_code), done.output.decode(errors="replace").strip()

    def limit_memory(self, limit_bytes: int) -> None:
        """Change how much memory the container may use, swap included.

        Raises: HarnessError when the kernel cannot bring the container below it.
        """
        with docker_sentence(f'memory limit of engine "{self._incarnation}"'):
            self._container.update(mem_limit=limit_bytes, memswap_limit=limit_bytes)

    def ended_for_memory(self) -> bool:
        """Say whether the kernel has killed a process of the container for want of memory, as Docker was told."""
        with docker_sentence(f'state of engine "{self._incarnation}"'):
            self._container.reload()
        return bool(self._container.attrs["State"].get("OOMKilled"))

    def pause(self) -> None:
        """Freeze the engine core; the server keeps answering `/health`."""
        self.kill("core", signal.SIGSTOP)

    def resume(self) -> None:
        """Let the engine core run again."""
        self.kill("core", signal.SIGCONT)

    def _ask_to_end(self) -> None:
        if self._is_frozen:  # what is frozen cannot hear SIGTERM
            self._container.exec_run(["sh", "-c", "kill -CONT -1"])
        self._container.kill(signal="SIGTERM")

    def _wait_end(self, limit_s: float) -> None:
        self._inspected_ns = 0
        poll_until(self.exit_code, what=f'end of engine "{self._incarnation}"', limit_s=limit_s)

    def _follow_log(self) -> None:
        try:
            with self._log_path.open("wb") as sink:
                copy_log(self._container.logs(stream=True, follow=True), sink, secrets=self._secrets)
            self._is_log_complete = True
        except (docker.errors.APIError, requests.RequestException, OSError):
            pass  # the log is read again, whole, at the end

    def _finish_log(self) -> None:
        self._log_thread.join(LOG_END_LIMIT_S)
        if self._is_log_complete:
            return
        # Somebody may have removed the container: then what was followed is all there is.
        with contextlib.suppress(docker.errors.APIError, requests.RequestException):
            whole = self._container.logs()
            with self._log_path.open("wb") as sink:
                copy_log([whole], sink, secrets=self._secrets)

    def _remove(self) -> None:
        self._is_removed = True
        with contextlib.suppress(docker.errors.NotFound):
            self._running.stop(force=True)


def _published_port(container: Container) -> int:
    container.reload()
    bindings = container.attrs["NetworkSettings"]["Ports"].get(f"{PORT}/tcp") or [{"HostPort": "0"}]
    return int(bindings[0]["HostPort"])


def _exit_code(status: int) -> int:
    """Undo the shell's way of writing a death by signal."""
    return 128 - status if 128 < status <= 128 + signal.NSIG else status


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
