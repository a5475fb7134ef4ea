"""Real vLLM in Docker: one container per engine, one network per run, both labelled with the run."""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import docker.errors
import requests
from docker.models.containers import Container
from testcontainers.core.config import testcontainers_config
from testcontainers.core.container import DockerContainer

from harness.clock import now_ns, poll_until, seconds_between
from harness.engine.container_options import (
    PLUGIN_DIRECTORY,
    PORT,
    RUN_LABEL,
    ContainerOptions,
    container_options,
    container_user,
)
from harness.engine.engine import EngineIdentity, EngineSite
from harness.engine.image import VERSION_LABEL, ImageRef, connect
from harness.engine.launch import Launch
from harness.engine.ready import copy_log, wait_healthy
from harness.errors import EnvironmentMissing, HarnessError, UsageError, WaitExpired

LOG_END_LIMIT_S = 10.0
KILL_LIMIT_S = 30.0
_INSPECT_EVERY_S = 1.0
# A slim image has no ps. The server is the child of Docker's init; the core titles itself.
_FIND_ROLE = {
    "server": 'read -r stat < $d/stat || continue; rest="${stat##*) ? }"; [ "${rest%% *}" = 1 ] || continue',
    "core": 'case "$(tr "\\0" " " < $d/cmdline)" in *EngineCore*) ;; *) continue;; esac',
}


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
        with _docker_sentence(f'stop of engine "{self._incarnation}"'):
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
        if role not in _FIND_ROLE:
            raise UsageError(f'"{role}" is not a process of vLLM: expected one of {", ".join(_FIND_ROLE)}')
        number = int(signal_number)
        script = (
            f"for d in /proc/[0-9]*; do {_FIND_ROLE[role]}; pid=${{d#/proc/}}; [ $pid = $$ ] && continue; "
            f"kill -{number} $pid && echo $pid && exit; done 2>/dev/null; exit 1"
        )
        with _docker_sentence(f'signal {number} to the {role} of engine "{self._incarnation}"'):
            done = self._container.exec_run(["sh", "-c", script])
        if done.exit_code != 0:
            raise HarnessError(f'engine "{self._incarnation}" has no {role} process that takes signal {number}')
        if number == signal.SIGSTOP:
            self._is_frozen = True
        return int(bytes(done.output).split()[0])

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


class ContainerStarter:
    """Starts vLLM containers of one image; owns the run's network."""

    def __init__(self, image: str | ImageRef, *, gpus: tuple[str, ...] | int = 0) -> None:
        """Choose the image, by name or as built, and the GPUs: ids, or how many (-1: all, 0: a CPU image)."""
        self._image = image.name if isinstance(image, ImageRef) else image
        self._gpus = gpus
        self._site: EngineSite | None = None
        self._client: docker.DockerClient | None = None
        self._network: Any = None
        self._engines: list[ContainerEngine] = []

    def identity(self) -> EngineIdentity:
        """Say which image will be started.

        Raises: EnvironmentMissing when the daemon, the image or the NVIDIA runtime is missing.
        """
        with contextlib.closing(connect()) as client:
            image = _present_image(client, self._image)
            if self._gpus:
                _require_nvidia(client)
        version = image.labels.get(VERSION_LABEL) or self._image.rpartition(":")[2].removeprefix("v")
        return EngineIdentity(
            kind="container",
            name="vllm" if self._gpus else "vllm-cpu",
            version=version,
            build=str(image.id),
            hardware=_gpu_models(self._gpus) if self._gpus else _processor(self._site),
        )

    def open(self, site: EngineSite) -> None:
        """Create the run's network.

        Raises: EnvironmentMissing when the daemon or the image is missing.
        """
        self.close()
        client = connect()
        try:
            _present_image(client, self._image)
            _use_reaper_only_if_present(client)
            with _docker_sentence("the run's network"):
                self._network = client.networks.create(
                    f"rollout-{secrets.token_hex(6)}", driver="bridge", labels={RUN_LABEL: site.run_label}
                )
        except BaseException:
            client.close()
            raise
        self._client, self._site = client, site

    def start(self, launch: Launch, *, incarnation: str) -> ContainerEngine:
        """Start a container and return at once; nothing is left behind if it cannot be started.

        Raises: UsageError for directories that are not there, EnvironmentMissing for what Docker lacks.
        """
        if self._client is None or self._site is None:
            raise UsageError("the container starter is not open")
        options = self._options(launch, self._site, incarnation)
        with _docker_sentence(f'start of engine "{incarnation}"'):
            running = described(options)
            try:
                running.start()
                engine = ContainerEngine(running, options, incarnation=incarnation, site=self._site)
            except BaseException:
                running.stop(force=True)
                raise
        self._engines.append(engine)
        return engine

    def close(self) -> None:
        """End every engine that still runs and remove the network. Idempotent."""
        with contextlib.ExitStack() as release:  # goes on after an error, and raises it at the end
            if self._client is not None:
                release.callback(self._client.close)
            if self._network is not None:
                release.callback(_remove_network, self._network)
            for engine in self._engines:
                release.callback(engine.stop, 2.0)
            self._client = self._network = None
            self._engines = []

    def _options(self, launch: Launch, site: EngineSite, incarnation: str) -> ContainerOptions:
        if not launch.checkpoint_root.is_dir():
            raise UsageError(f'checkpoint root "{launch.checkpoint_root}" is not a directory')
        if not os.access(launch.checkpoint_root, os.R_OK | os.X_OK):
            raise UsageError(f'checkpoint root "{launch.checkpoint_root}" cannot be read')
        user = container_user(launch.checkpoint_root, uid=os.geteuid(), gid=os.getegid())
        if launch.weight_cache is not None:
            if not launch.weight_cache.directory.is_dir():
                raise UsageError(f'weight cache "{launch.weight_cache.directory}" is not a directory')
            if not PLUGIN_DIRECTORY.is_dir():
                raise HarnessError(f'the weight-cache plug-in is missing: "{PLUGIN_DIRECTORY}"')
            _let_write(launch.weight_cache.directory, user or self._image_user())
        return container_options(
            launch,
            site,
            image=self._image,
            incarnation=incarnation,
            network=str(self._network.name),
            user=user,
            gpus=self._gpus,
        )

    def _image_user(self) -> str:
        assert self._client is not None
        return str(_present_image(self._client, self._image).attrs["Config"].get("User") or "0:0")


def described(options: ContainerOptions) -> DockerContainer:
    """Return the container that these options describe, not created yet."""
    container = DockerContainer(options.image).with_command(list(options.command)).with_kwargs(**options.as_docker())
    container.env.update(options.environment)
    container.ports.update(options.ports)
    container.tmpfs.update(options.tmpfs)
    return container


def _published_port(container: Container) -> int:
    container.reload()
    bindings = container.attrs["NetworkSettings"]["Ports"].get(f"{PORT}/tcp") or [{"HostPort": "0"}]
    return int(bindings[0]["HostPort"])


def _exit_code(status: int) -> int:
    """Undo the shell's way of writing a death by signal."""
    return 128 - status if 128 < status <= 128 + signal.NSIG else status


def _let_write(directory: Path, user: str) -> None:
    """Give the cache to the container's user; only root can and needs to."""
    if os.geteuid() != 0:
        return
    uid, _, gid = user.partition(":")
    if not uid.isdecimal():
        directory.chmod(0o777)  # a user known by name inside the image only
        return
    for path in (directory, *directory.rglob("*")):
        os.chown(path, int(uid), int(gid) if gid.isdecimal() else -1, follow_symlinks=False)


def _present_image(client: docker.DockerClient, name: str) -> Any:
    try:
        return client.images.get(name)
    except docker.errors.ImageNotFound:
        raise EnvironmentMissing("image", f'Docker has no image "{name}" here; pull or build it first') from None


def _require_nvidia(client: docker.DockerClient) -> None:
    runtimes = sorted(client.info().get("Runtimes") or {})
    if "nvidia" not in runtimes and shutil.which("nvidia-container-runtime-hook") is None:
        raise EnvironmentMissing("gpu", f"Docker has no NVIDIA runtime (its runtimes: {', '.join(runtimes)})")


def _use_reaper_only_if_present(client: docker.DockerClient) -> None:
    try:
        client.images.get(testcontainers_config.hub_image_name_prefix + testcontainers_config.ryuk_image)
    except docker.errors.ImageNotFound:
        testcontainers_config.ryuk_disabled = True


def _remove_network(network: Any) -> None:
    with contextlib.suppress(docker.errors.NotFound):
        network.remove()


def _processor(site: EngineSite | None) -> str:
    cores = len(site.engine_cpus) if site is not None and site.engine_cpus else len(os.sched_getaffinity(0))
    model = platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{model}, {cores} cores"


def _gpu_models(gpus: tuple[str, ...] | int) -> str:
    count = "all" if gpus == -1 else str(gpus) if isinstance(gpus, int) else str(len(gpus))
    import pynvml  # type: ignore[import-untyped]  # loads the driver's library

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return f"{count} GPUs"
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        models = sorted({str(pynvml.nvmlDeviceGetName(handle)) for handle in handles})
    finally:
        pynvml.nvmlShutdown()
    return f"{count} of {', '.join(models)}"


@contextlib.contextmanager
def _docker_sentence(what: str) -> Iterator[None]:
    """Turn the Docker SDK's errors into one sentence about `what`."""
    try:
        yield
    except docker.errors.ImageNotFound as error:
        raise EnvironmentMissing("image", f"{what}: {error.explanation}") from error
    except (docker.errors.DockerException, requests.RequestException) as error:
        text = " ".join(str(getattr(error, "explanation", None) or error).split())
        if "could not select device driver" in text:
            raise EnvironmentMissing("gpu", f"{what}: Docker has no NVIDIA runtime ({text})") from error
        raise EnvironmentMissing("docker", f"{what}: {text}") from error
