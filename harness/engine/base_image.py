"""Find or make the Debian image that the CPU image of vLLM is built on; where no registry answers, with debootstrap."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import docker
import docker.errors
import psutil
import requests

from harness.engine.build_context import HostSettings
from harness.engine.docker_daemon import innermost, is_present
from harness.errors import EnvironmentMissing
from harness.label import new_label, work_directory

LABEL = "io.github.vllm-rollout-harness"
REGISTRY_BASE = "debian:bookworm-slim"
LOCAL_BASE = "vllm-rollout-harness/base:bookworm"
MAKE_LIMIT_S = 1800.0
SUDO_LIMIT_S = 60.0
SUDO = ("sudo", "-n")  # never asks: nobody may be there to answer

Progress = Callable[[str], None]


@contextlib.contextmanager
def scratch_directory() -> Iterator[Path]:
    """Give a private directory that is gone afterwards; a sweep finds it where this process is killed."""
    directory = work_directory(new_label())
    directory.mkdir(mode=0o700)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def base_image(client: docker.DockerClient, base: str | None, settings: HostSettings, progress: Progress) -> str:
    """Return the name of an image on this host to build on: `base`, or Debian's, pulled or made.

    Raises: EnvironmentMissing when there is none and none can be had.
    """
    for candidate in (base,) if base else (REGISTRY_BASE, LOCAL_BASE):
        if is_present(client, candidate):
            return candidate
    wanted = base or REGISTRY_BASE
    progress(f"pulling {wanted}")
    try:
        client.images.pull(wanted)
        return wanted
    except (docker.errors.APIError, requests.RequestException) as error:
        because = " ".join(str(getattr(error, "explanation", None) or innermost(error)).split())
        if base:
            raise EnvironmentMissing("image", f'base "{base}" is not here and cannot be pulled: {because}') from error
    _make_base(client, settings, progress, because=because)
    return LOCAL_BASE


def _make_base(client: docker.DockerClient, settings: HostSettings, progress: Progress, *, because: str = "") -> None:
    program = shutil.which("debootstrap", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    as_root = _as_root()
    if program is None or as_root is None:
        lack = (
            "debootstrap is not installed"
            if program is None
            else "only root can run debootstrap, and sudo does not let this user without a password"
        )
        raise EnvironmentMissing(
            "image",
            f'base "{REGISTRY_BASE}" cannot be pulled ({because}), and {lack}; name one with '
            "python -m harness.engine.image --base IMAGE",
        )
    progress(
        f"no registry answers: making {LOCAL_BASE} with debootstrap from {settings.apt_mirror or 'its own mirror'}"
    )
    include = "--include=ca-certificates,python3,python3-venv"
    with scratch_directory() as scratch:
        root, archive = scratch / "root", scratch / "root.tar"
        try:
            for command in (
                [program, "--variant=minbase", include, "bookworm", str(root), *filter(None, (settings.apt_mirror,))],
                ["tar", "-C", str(root), "-cf", str(archive), "."],
            ):
                _run([*as_root, *command], what=Path(command[0]).name, as_root=as_root)
        finally:
            _remove_root(root, as_root)
        repository, _, tag = LOCAL_BASE.partition(":")
        client.api.import_image_from_file(str(archive), repository=repository, tag=tag, changes=f"LABEL {LABEL}=base")


def _as_root() -> Sequence[str] | None:
    """Return what a command must begin with to be run by root, or None where this user cannot have that."""
    if os.geteuid() == 0:
        return ()
    try:
        asked = subprocess.run([*SUDO, "true"], capture_output=True, timeout=SUDO_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return SUDO if asked.returncode == 0 else None


def _run(command: Sequence[str], *, what: str, as_root: Sequence[str]) -> None:
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        try:
            said, _ = process.communicate(timeout=MAKE_LIMIT_S)
        except BaseException:
            _kill(process, as_root)
            raise
    if process.returncode != 0:
        last = " | ".join(said.strip().splitlines()[-3:])
        raise EnvironmentMissing("image", f"{what} ended with exit code {process.returncode}: {last}")


def _kill(process: subprocess.Popen[str], as_root: Sequence[str]) -> None:
    """Kill a command with all that it started; what sudo started only root may kill."""
    with contextlib.suppress(psutil.NoSuchProcess):
        started = psutil.Process(process.pid)
        pids = [str(child.pid) for child in (*started.children(recursive=True), started)]
        subprocess.run([*as_root, "sh", "-c", 'kill -KILL "$@"', "sh", *pids], capture_output=True, check=False)


def _remove_root(root: Path, as_root: Sequence[str]) -> None:
    """Remove a Debian root, whose files are root's; an interrupted debootstrap leaves its mounts in it."""
    mounted = [Path(disk.mountpoint) for disk in psutil.disk_partitions(all=True)]
    for mount in sorted((mount for mount in mounted if mount.is_relative_to(root)), reverse=True):
        subprocess.run([*as_root, "umount", "--lazy", str(mount)], capture_output=True, check=False)
    subprocess.run([*as_root, "rm", "-rf", "--one-file-system", str(root)], capture_output=True, check=False)
