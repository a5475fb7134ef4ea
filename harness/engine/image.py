"""Build the CPU image of real vLLM from `docker/`, once per set of inputs.

`python -m harness.engine.image` does it from a shell.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import re
import shutil
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import docker.errors
import requests

from harness.clock import Deadline, poll_until
from harness.engine.base_image import LABEL, Progress, base_image, scratch_directory
from harness.engine.build_context import HostSettings, assemble
from harness.engine.docker_daemon import connect, innermost
from harness.errors import EXIT_UNKNOWN, EnvironmentMissing, HarnessError, WaitExpired

DEFAULT_VERSION = "0.32.0"
REPOSITORY = "vllm-rollout-harness/vllm-cpu"
INPUTS_LABEL = f"{LABEL}.inputs"
VERSION_LABEL = f"{LABEL}.vllm-version"
STAGE_LABEL = f"{LABEL}.stage"  # set in the Dockerfile on the stage that is thrown away
NEEDED_BYTES = 12 * 1024**3
BUILD_LIMIT_S = 3600.0
REMOVAL_LIMIT_S = 20.0

_DOCKER_DIRECTORY = Path(__file__).with_name("images")  # in a clone a link to docker/, in a wheel its files
_DOCKERFILE = "vllm-cpu.Dockerfile"
_BUILD_FILES = (_DOCKERFILE, "vllm_metadata.py")
_LAYER = re.compile(r"---> ([0-9a-f]{12,64})")  # how the daemon names the image that a step has made


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
        base_name = base_image(client, base, settings, progress)
        progress(f"building {name} on {base_name}")
        with scratch_directory() as context:
            assemble(context, dockerfiles=[_build_file(file) for file in _BUILD_FILES], settings=settings)
            _build(
                client,
                context,
                name=name,
                arguments={
                    **settings.proxies,
                    "BASE_IMAGE": base_name,
                    "VLLM_VERSION": version,
                    "APT_MIRROR": settings.apt_mirror,
                },
                labels={INPUTS_LABEL: digest, VERSION_LABEL: version, LABEL: "image"},
                progress=progress,
            )
        _remove_unneeded(client, old_id)
        image = client.images.get(name)
        progress(f"built {name}: {image.attrs['Size'] / 1e9:.1f} GB")
        return ImageRef(id=str(image.id), name=name, version=version, digest_of_inputs=digest)


def _build(
    client: docker.DockerClient,
    context: Path,
    *,
    name: str,
    arguments: Mapping[str, str],
    labels: Mapping[str, str],
    progress: Progress,
) -> None:
    """Build the image; of the stages that saw the host's settings nothing stays, however the build ends."""
    private: list[str] = []
    answers: list[requests.Response] = []
    client.api.hooks["response"].append(lambda answer, *_, **__: answers.append(answer))
    stream = client.api.build(
        path=str(context),
        dockerfile=_DOCKERFILE,
        tag=name,
        rm=True,
        forcerm=True,
        decode=True,
        buildargs=dict(arguments),
        labels=dict(labels),
    )
    try:
        _follow_build(_noting_private(stream, private), name=name, progress=progress)
    finally:
        for answer in answers:
            answer.close()  # which ends a build that is still under way
        _remove_private(client, private, progress)


def _noting_private(stream: Iterator[Mapping[str, Any]], private: list[str]) -> Iterator[Mapping[str, Any]]:
    """Pass a build's messages on and note the images that hold the host's settings, parents first."""
    holds_settings = False
    for message in stream:
        for line in str(message.get("stream", "")).splitlines():
            if line.startswith("Step "):
                instruction = line.partition(" : ")[2]
                if instruction.startswith("FROM "):
                    holds_settings = False
                holds_settings = holds_settings or instruction.startswith("COPY host/ ")
            elif holds_settings and (layer := _LAYER.fullmatch(line.strip())):
                private.append(layer[1])
        yield message


def _remove_private(client: docker.DockerClient, private: Sequence[str], progress: Progress) -> None:
    left = list(dict.fromkeys(private))

    def removed() -> bool | None:
        # The step that an interrupt ended may still have become an image, which nobody told about, on top of these.
        images = client.api.images(all=True)
        known = {found["Id"] for found in images if found["Id"].removeprefix("sha256:")[:12] in left}
        left.extend(
            found["Id"].removeprefix("sha256:")[:12]
            for found in images
            if found.get("ParentId") in known and found["Id"] not in known
        )
        while left:
            with contextlib.suppress(docker.errors.ImageNotFound):
                if not client.images.get(left[-1]).tags:
                    client.images.remove(left[-1], noprune=True)  # what is below may be the cache of the next build
            left.pop()
        return True

    try:  # a conflict, which is an OSError, until the daemon has removed the container of the step that it ended
        poll_until(removed, what="images with the host's package settings removed", limit_s=REMOVAL_LIMIT_S)
    except WaitExpired as expired:
        progress(f"these images hold package settings of this host and stay: {', '.join(left)}: {expired.last_seen}")


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
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that it cleans up as after Ctrl-C
    try:
        image = ensure_image(options.version, base=options.base, progress=lambda line: print(line, flush=True))
    except HarnessError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("error: interrupted; what was made so far has been removed", file=sys.stderr)
        return EXIT_UNKNOWN
    print(f"{image.name} {image.id} (inputs {image.digest_of_inputs})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
