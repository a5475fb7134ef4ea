"""Real vLLM in Docker: one container per engine, one network per run, both labelled with the run."""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import shutil
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import docker
import docker.errors
from testcontainers.core.container import DockerContainer

from harness.engine.container_engine import ContainerEngine
from harness.engine.container_events import OnContainerEvent, container_events
from harness.engine.container_options import (
    CHECKPOINTS,
    PLUGIN_DIRECTORY,
    BindMount,
    ContainerOptions,
    container_options,
    container_user,
    is_readable_by_all,
)
from harness.engine.docker_daemon import connect, docker_sentence, present_image, require_here
from harness.engine.engine import EngineIdentity, EngineSite
from harness.engine.image import VERSION_LABEL, ImageRef
from harness.engine.launch import Launch
from harness.engine.reaper import start_reaper_if_present
from harness.errors import EnvironmentMissing, HarnessError, UsageError
from harness.label import LABEL_KEY

__all__ = ["ContainerEngine", "ContainerStarter", "described"]


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
            require_here()
            image = present_image(client, self._image)
            if self._gpus:
                _require_nvidia(client)
        version = (
            image.labels.get(VERSION_LABEL) or _tag(self._image).removeprefix("v") or image.short_id.partition(":")[2]
        )
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
            present_image(client, self._image)
            with docker_sentence("testcontainers' reaper"):
                start_reaper_if_present(client)
            with docker_sentence("the run's network"):
                self._network = client.networks.create(
                    f"rollout-{secrets.token_hex(6)}", driver="bridge", labels={LABEL_KEY: site.run_label}
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
        with docker_sentence(f'start of engine "{incarnation}"'):
            running = described(options)
            try:
                running.start()
                engine = ContainerEngine(running, options, incarnation=incarnation, site=self._site)
            except BaseException:
                running.stop(force=True)
                raise
        self._engines.append(engine)
        return engine

    def watch_events(self, on_event: OnContainerEvent) -> AbstractContextManager[None]:
        """Call `on_event(incarnation, action, attributes)` for what happens to this run's containers.

        Raises: UsageError when the starter is not open.
        """
        if self._site is None:
            raise UsageError("container events cannot be watched: the starter is not open")
        return container_events(self._site.run_label, on_event)

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
        if launch.compile_cache is not None:
            if not launch.compile_cache.is_dir():
                raise UsageError(f'compile cache "{launch.compile_cache}" is not a directory')
            _let_write(launch.compile_cache, user or self._image_user())
        options = container_options(
            launch,
            site,
            image=self._image,
            incarnation=incarnation,
            network=str(self._network.name),
            user=user,
            gpus=self._gpus,
        )
        return replace(options, mounts=tuple(_readable(mount, site.work_directory) for mount in options.mounts))

    def _image_user(self) -> str:
        assert self._client is not None
        return str(present_image(self._client, self._image).attrs["Config"].get("User") or "0:0")


def described(options: ContainerOptions) -> DockerContainer:
    """Return the container that these options describe, not created yet."""
    container = DockerContainer(options.image).with_command(list(options.command)).with_kwargs(**options.as_docker())
    container.env.update(options.environment)
    container.ports.update(options.ports)
    container.tmpfs.update(options.tmpfs)
    return container


def _tag(image: str) -> str:
    """Return the tag in an image's name; empty where it has none, as a digest or an id has."""
    return image.rpartition("/")[2].partition("@")[0].removeprefix("sha256:").partition(":")[2]


def _readable(mount: BindMount, work_directory: Path) -> BindMount:
    """Return a mount that the container's user can read: a plug-in that was installed with a umask of 077 as a copy.

    Checkpoints are the user's, and decide as whom the container runs; caches are given to that user.
    """
    if not mount.is_read_only or mount.target == CHECKPOINTS or is_readable_by_all(mount.source):
        return mount
    copy = work_directory / f"{mount.source.name}-{secrets.token_hex(4)}"
    shutil.copytree(mount.source, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (copy, *copy.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)  # not as the umask has it
    return replace(mount, source=copy)


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


def _require_nvidia(client: docker.DockerClient) -> None:
    runtimes = sorted(client.info().get("Runtimes") or {})
    if "nvidia" not in runtimes and shutil.which("nvidia-container-runtime-hook") is None:
        raise EnvironmentMissing("gpu", f"Docker has no NVIDIA runtime (its runtimes: {', '.join(runtimes)})")


def _remove_network(network: Any) -> None:
    with contextlib.suppress(docker.errors.NotFound):
        network.remove()


def _processor(site: EngineSite | None) -> str:
    cores = len(site.engine_cpus) if site is not None and site.engine_cpus else len(os.sched_getaffinity(0))
    model = platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{model}, {cores} core{'' if cores == 1 else 's'}"


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
