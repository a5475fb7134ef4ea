"""Everything Docker is asked for when an engine's container is created: pure, so that it can be read and tested."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from docker.types import DeviceRequest, LogConfig, Mount

from harness.engine.cpu_ranks import rank_binding
from harness.engine.engine import EngineSite
from harness.engine.launch import (
    COMPILE_CACHE_VARIABLE,
    WEIGHT_CACHE_KEY_VARIABLE,
    WEIGHT_CACHE_PATH_VARIABLE,
    WEIGHT_CACHE_ROOT,
    Launch,
)
from harness.errors import UsageError
from harness.label import LABEL_KEY

PORT = 8000
CHECKPOINTS = "/checkpoints"
PLUGINS = "/opt/rollout-plugins"
COMPILE_CACHES = "/compile-caches"
PLUGIN_DIRECTORY = Path(__file__).with_name("weight_cache_plugin")
TRANSFER_PLUGIN = "/opt/rollout-weight-transfer"
TRANSFER_PLUGIN_DIRECTORY = Path(__file__).with_name("weight_transfer_plugin")
INCARNATION_LABEL = "io.github.vllm-rollout-harness.incarnation"
PIDS_LIMIT = 4096
SHARED_MEMORY_BYTES = 1024**3  # Docker's own 64 MiB is too little for more than one worker

_OFFLINE = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "NO_COLOR": "1",
    "PYTHONFAULTHANDLER": "1",  # a worker killed by SIGBUS or SIGSEGV says so in the log, which vLLM does not
}
_CPU_IMAGE = {"VLLM_CPU_KVCACHE_SPACE": "1"}  # GiB; the default is most of the host
_EAGER = {
    # Even in eager mode the first request with logprobs compiles a helper: 16 to 21 s on two cores (0.32.0, 2 runs),
    # which would be counted as a slow answer or a slow recovery.
    "TORCHDYNAMO_DISABLE": "1",
}
# The container's user may have no name and no home: what libraries derive from these is given instead.
_PLACES = {
    "HOME": "/tmp",
    "USER": "vllm",
    "LOGNAME": "vllm",
    "XDG_CACHE_HOME": "/tmp/.cache",
    "TORCHINDUCTOR_CACHE_DIR": "/tmp/.cache/torchinductor",  # its default asks for the user's name
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BindMount:
    """A directory of the host as the container sees it."""

    source: Path
    target: str
    is_read_only: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerOptions:
    """What Docker is asked for. The environment holds the API key and stays out of every text."""

    image: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    mounts: tuple[BindMount, ...]
    labels: Mapping[str, str]
    network: str
    user: str  # "uid:gid"; empty: the image's own
    cpus: str  # "0,1"; empty: no pinning
    memory_limit_bytes: int
    gpus: tuple[str, ...] | int = 0  # ids, or how many (-1: all)
    shared_memory_bytes: int = SHARED_MEMORY_BYTES

    @property
    def ports(self) -> dict[str, Any]:
        """Return what is published: one port, on loopback, chosen by the kernel."""
        return {f"{PORT}/tcp": ("127.0.0.1",)}

    @property
    def tmpfs(self) -> dict[str, str]:
        """Return the container's scratch; compiled code is loaded from there, so it must be executable."""
        return {"/tmp": "exec,mode=1777"}

    def as_docker(self) -> dict[str, Any]:
        """Return the keyword arguments of the Docker SDK beyond image, command, environment, ports, tmpfs."""
        wanted: dict[str, Any] = {
            "labels": dict(self.labels),
            "network": self.network,
            "mounts": [
                Mount(target=m.target, source=str(m.source), type="bind", read_only=m.is_read_only) for m in self.mounts
            ],
            "cap_drop": ["ALL"],
            "security_opt": ["no-new-privileges"],
            "mem_limit": self.memory_limit_bytes,
            "memswap_limit": self.memory_limit_bytes,
            "pids_limit": PIDS_LIMIT,
            "shm_size": self.shared_memory_bytes,
            # vLLM as process 1 would ignore a SIGTERM that comes before its handlers are set.
            "init": True,
            # The log is read back through the daemon, which not every driver can do.
            "log_config": LogConfig(type=LogConfig.types.JSON),
        }
        if self.user:
            wanted["user"] = self.user
        if self.cpus:
            wanted["cpuset_cpus"] = self.cpus
        if self.gpus:
            chosen = {"count": self.gpus} if isinstance(self.gpus, int) else {"device_ids": list(self.gpus)}
            wanted["device_requests"] = [DeviceRequest(**chosen, capabilities=[["gpu"]])]
        return wanted


def container_options(
    launch: Launch,
    site: EngineSite,
    *,
    image: str,
    incarnation: str,
    network: str,
    user: str = "",
    gpus: tuple[str, ...] | int = 0,
) -> ContainerOptions:
    """Say what Docker is asked for to serve `launch` as `incarnation`.

    Without GPUs it is a CPU image: eager, nothing compiled, 1 GiB of KV cache.
    Raises: UsageError when the checkpoint's name leads out of its root.
    """
    name = PurePosixPath(launch.checkpoint_name)
    if name.is_absolute() or ".." in name.parts or not name.parts:
        raise UsageError(f'checkpoint name "{launch.checkpoint_name}" must name an entry below its root')
    environment = {**_OFFLINE, **_PLACES}
    mounts = [BindMount(source=launch.checkpoint_root.absolute(), target=CHECKPOINTS, is_read_only=True)]
    if not gpus:
        environment.update(_CPU_IMAGE)
        environment.update(rank_binding(launch.extra_arguments, site.engine_cpus))
        if launch.compile_cache is None:
            environment.update(_EAGER)
    environment.update(launch.environment)
    if launch.weight_cache is not None:
        mounts += [
            BindMount(source=launch.weight_cache.directory.absolute(), target=WEIGHT_CACHE_ROOT, is_read_only=False),
            BindMount(source=PLUGIN_DIRECTORY, target=PLUGINS, is_read_only=True),
        ]
        environment[WEIGHT_CACHE_PATH_VARIABLE] = WEIGHT_CACHE_ROOT
        environment[WEIGHT_CACHE_KEY_VARIABLE] = launch.weight_cache.key
        environment["PYTHONPATH"] = ":".join(filter(None, (PLUGINS, environment.get("PYTHONPATH"))))
    if launch.transfers_weights:
        mounts.append(BindMount(source=TRANSFER_PLUGIN_DIRECTORY, target=TRANSFER_PLUGIN, is_read_only=True))
        environment["PYTHONPATH"] = ":".join(filter(None, (TRANSFER_PLUGIN, environment.get("PYTHONPATH"))))
    if launch.compile_cache is not None:
        # Each cache has a place of its own, so that one that was moved is seen to have moved.
        place = f"{COMPILE_CACHES}/{launch.compile_cache.name}"
        mounts.append(BindMount(source=launch.compile_cache.absolute(), target=place, is_read_only=False))
        environment[COMPILE_CACHE_VARIABLE] = place
    environment["VLLM_API_KEY"] = site.api_key
    arguments = launch.arguments(model=f"{CHECKPOINTS}/{name}", host="0.0.0.0", port=PORT)  # noqa: S104 inside a bridge
    chosen = {"--enforce-eager", "--no-enforce-eager"} & set(launch.extra_arguments)
    if not gpus and launch.compile_cache is None and not chosen:
        arguments += ("--enforce-eager",)
    return ContainerOptions(
        image=image,
        command=arguments,
        environment=environment,
        mounts=tuple(mounts),
        labels={LABEL_KEY: site.run_label, INCARNATION_LABEL: incarnation},
        network=network,
        user=user,
        cpus=",".join(str(cpu) for cpu in site.engine_cpus),
        memory_limit_bytes=site.memory_limit_bytes,
        gpus=gpus,
        shared_memory_bytes=launch.shared_memory_bytes or SHARED_MEMORY_BYTES,
    )


def container_user(checkpoint_root: Path, *, uid: int, gid: int) -> str:
    """Return as whom the container runs so that it can read the checkpoints; empty means the image's own user.

    A person who is not root lends their own ids. Root keeps them: the image's user does, unless some file is closed
    to others; then it is the owner of the checkpoints, with no capabilities either way.
    """
    if uid != 0:
        return f"{uid}:{gid}"
    if is_readable_by_all(checkpoint_root):
        return ""
    owner = checkpoint_root.stat()
    return f"{owner.st_uid}:{owner.st_gid}"


def is_readable_by_all(root: Path) -> bool:
    """Say whether every user may read everything below `root`."""
    if root.stat().st_mode & 0o005 != 0o005:
        return False
    for directory, subdirectories, files in os.walk(root):
        for names, needed in ((subdirectories, 0o005), (files, 0o004)):
            for name in names:
                try:
                    mode = os.stat(os.path.join(directory, name)).st_mode
                except OSError:  # a dangling link: nobody can read it
                    continue
                if mode & needed != needed:
                    return False
    return True
