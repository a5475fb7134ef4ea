"""Build the CPU image of real vLLM from `docker/`, once per set of inputs.

`python -m harness.engine.image` does it from a shell.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import docker.errors
import requests

from harness.clock import Deadline
from harness.engine.build_context import HostSettings, assemble
from harness.engine.docker_daemon import connect, innermost, is_present
from harness.errors import EnvironmentMissing, HarnessError

DEFAULT_VERSION = "0.32.0"
REPOSITORY = "vllm-rollout-harness/vllm-cpu"
LABEL = "io.github.vllm-rollout-harness"
INPUTS_LABEL = f"{LABEL}.inputs"
VERSION_LABEL = f"{LABEL}.vllm-version"
STAGE_LABEL = f"{LABEL}.stage"  # set in the Dockerfile on the stage that is thrown away
REGISTRY_BASE = "debian:bookworm-slim"
LOCAL_BASE = "vllm-rollout-harness/base:bookworm"
NEEDED_BYTES = 12 * 1024**3
BUILD_LIMIT_S = 3600.0

_DOCKER_DIRECTORY = Path(__file__).resolve().parents[2] / "docker"
_DOCKERFILE = "vllm-cpu.Dockerfile"
_BUILD_FILES = (_DOCKERFILE, "vllm_metadata.py")

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRef:
    """An image on this host."""

    id: str
    name: str
    version: str
    digest_of_inputs: str


def image_name(version: str) -> str:
    """Return the local name of the image with this vLLM release."""
    return f"{REPOSITORY}:{version}"


def inputs_digest(version: str, base: str | None) -> str:
    """Return the digest of everything that decides what the image is: build files, release, choice of base."""
    digest = hashlib.sha256()
    for part in (version, base or "auto", *(_build_file(name).read_text(encoding="utf-8") for name in _BUILD_FILES)):
        digest.update(len(part.encode()).to_bytes(8, "big") + part.encode())
    return digest.hexdigest()[:16]


def ensure_image(
    version: str = DEFAULT_VERSION, *, base: str | None = None, progress: Progress = lambda line: None
) -> ImageRef:
    """Return the image with this vLLM release, building it when it is absent or was built from other inputs.

    `base` names the image to build on; None takes `debian:bookworm-slim` where it is present or can be pulled, else
    a Debian root made with debootstrap. `progress` gets lines for people.
    Raises: EnvironmentMissing in one sentence: no daemon, no base, no space, or the build's last lines.
    """
    digest = inputs_digest(version, base)
    name = image_name(version)
    with contextlib.closing(connect(timeout_s=900.0)) as client, _in_one_sentence(f'build of image "{name}"'):
        old_id = None
        with contextlib.suppress(docker.errors.ImageNotFound):
            image = client.images.get(name)
            if image.labels.get(INPUTS_LABEL) == digest:
                return ImageRef(id=str(image.id), name=name, version=version, digest_of_inputs=digest)
            old_id = image.id
        _require_space(str(client.info().get("DockerRootDir", "")))
        settings = HostSettings.read()
        base_name = _base_image(client, base, settings, progress)
        progress(f"building {name} on {base_name}")
        with tempfile.TemporaryDirectory(prefix="rollout-image-") as context:
            assemble(Path(context), dockerfiles=[_build_file(file) for file in _BUILD_FILES], settings=settings)
            stream = client.api.build(
                path=context,
                dockerfile=_DOCKERFILE,
                tag=name,
                rm=True,
                forcerm=True,
                decode=True,
                buildargs={"BASE_IMAGE": base_name, "VLLM_VERSION": version, "APT_MIRROR": settings.apt_mirror},
                labels={INPUTS_LABEL: digest, VERSION_LABEL: version, LABEL: "image"},
            )
            _follow_build(stream, name=name, progress=progress)
        _remove_unneeded(client, old_id)
        image = client.images.get(name)
        progress(f"built {name}: {image.attrs['Size'] / 1e9:.1f} GB")
        return ImageRef(id=str(image.id), name=name, version=version, digest_of_inputs=digest)


def _follow_build(stream: Iterator[Mapping[str, Any]], *, name: str, progress: Progress) -> None:
    deadline = Deadline.after(BUILD_LIMIT_S)
    tail: deque[str] = deque(maxlen=6)
    for message in stream:
        for line in str(message.get("stream", "")).splitlines():
            if line.startswith("Step "):
                progress(f"{deadline.waited_s():5.0f} s  {line[:110]}")
            if line.strip() and not line.startswith(" --->"):
                tail.append(line.strip()[:300])
        if "error" in message:
            raise EnvironmentMissing("image", f'"{name}" could not be built: {_why_build_failed(message, tail)}')
        if deadline.is_expired():
            raise EnvironmentMissing("image", f'"{name}" was not built within {BUILD_LIMIT_S:g} s')


def _why_build_failed(message: Mapping[str, Any], tail: deque[str]) -> str:
    last_lines = " | ".join(tail)
    if "no space left" in (last_lines + str(message["error"])).lower():
        return "the disk is full (no space left on device)"
    # The daemon's own sentence quotes the whole RUN instruction; what the command printed says more.
    code = message.get("errorDetail", {}).get("code")
    ended = f"a step ended with exit code {code}" if code is not None else str(message["error"])[:300]
    return f"{ended}; its last lines: {last_lines}" if last_lines else ended


def _base_image(client: docker.DockerClient, base: str | None, settings: HostSettings, progress: Progress) -> str:
    for candidate in (base,) if base else (REGISTRY_BASE, LOCAL_BASE):
        if is_present(client, candidate):
            return candidate
    wanted = base or REGISTRY_BASE
    progress(f"pulling {wanted}")
    repository, _, tag = wanted.rpartition(":") if ":" in wanted.rpartition("/")[2] else (wanted, ":", "latest")
    try:
        client.images.pull(repository, tag=tag)
        return wanted
    except (docker.errors.APIError, requests.RequestException) as error:
        if base:
            raise EnvironmentMissing("image", f'base "{base}" is not here and cannot be pulled: {error}') from error
    _make_base(client, settings, progress)
    return LOCAL_BASE


def _make_base(client: docker.DockerClient, settings: HostSettings, progress: Progress) -> None:
    program = shutil.which("debootstrap", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if program is None or os.geteuid() != 0:
        lack = "debootstrap is not installed" if program is None else "only root can run debootstrap"
        raise EnvironmentMissing("image", f'base "{REGISTRY_BASE}" cannot be pulled, and {lack}; name one with --base')
    progress(f"no registry answers: making {LOCAL_BASE} with debootstrap from {settings.apt_mirror}")
    include = "--include=ca-certificates,python3,python3-venv"
    with tempfile.TemporaryDirectory(prefix="rollout-base-") as scratch:
        root, archive = Path(scratch) / "root", Path(scratch) / "root.tar"
        for command in (
            [program, "--variant=minbase", include, "bookworm", str(root), settings.apt_mirror],
            ["tar", "-C", str(root), "-cf", str(archive), "."],
        ):
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=1800, check=False)
            if done.returncode != 0:
                last = " | ".join((done.stdout + done.stderr).strip().splitlines()[-3:])
                raise EnvironmentMissing(
                    "image", f"{Path(command[0]).name} ended with exit code {done.returncode}: {last}"
                )
        repository, _, tag = LOCAL_BASE.partition(":")
        client.api.import_image_from_file(str(archive), repository=repository, tag=tag, changes=f"LABEL {LABEL}=base")


def _remove_unneeded(client: docker.DockerClient, old_id: str | None) -> None:
    thrown_away = client.images.list(filters={"label": STAGE_LABEL, "dangling": True})
    for image_id in (*(image.id for image in thrown_away), old_id):
        # Still used by a container, or kept under another name: not ours to end.
        with contextlib.suppress(docker.errors.APIError):
            if image_id and not client.images.get(image_id).tags:
                client.images.remove(image_id)


def _require_space(directory: str) -> None:
    if not directory or not Path(directory).exists():  # a daemon elsewhere
        return
    free = shutil.disk_usage(directory).free
    if free < NEEDED_BYTES:
        raise EnvironmentMissing(
            "image",
            f'building needs {NEEDED_BYTES / 1e9:.0f} GB under "{directory}", {free / 1e9:.1f} GB are free',
        )


def _build_file(name: str) -> Path:
    path = _DOCKER_DIRECTORY / name
    if not path.is_file():
        raise EnvironmentMissing("image", f'"{path}" is missing: images are built from a clone of the repository')
    return path


@contextlib.contextmanager
def _in_one_sentence(what: str) -> Iterator[None]:
    try:
        yield
    except (docker.errors.DockerException, requests.RequestException, subprocess.TimeoutExpired, OSError) as error:
        raise EnvironmentMissing("image", f"{what}: {innermost(error)}") from error


def main(arguments: list[str] | None = None) -> int:
    """Build the image from a shell and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m harness.engine.image", description=__doc__)
    parser.add_argument("--version", default=DEFAULT_VERSION, help="vLLM release (default: %(default)s)")
    parser.add_argument("--base", help="image to build on (default: debian:bookworm-slim, else made with debootstrap)")
    options = parser.parse_args(arguments)
    try:
        image = ensure_image(options.version, base=options.base, progress=lambda line: print(line, flush=True))
    except HarnessError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{image.name} {image.id} (inputs {image.digest_of_inputs})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
