"""Talk to the Docker daemon, and say in one sentence what it lacks."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import docker
import docker.errors
import requests

from harness.errors import EnvironmentMissing

DEFAULT_PLACE = "unix:///var/run/docker.sock"


def connect(*, timeout_s: float = 60.0) -> docker.DockerClient:
    """Return a client of a Docker daemon that answers; the caller closes it.

    Raises: EnvironmentMissing when there is none.
    """
    place = os.environ.get("DOCKER_HOST") or DEFAULT_PLACE
    try:
        _require_listener(place)
        return docker.from_env(timeout=int(timeout_s))
    except (OSError, ValueError, docker.errors.DockerException, requests.RequestException) as error:
        raise EnvironmentMissing("docker", f"no Docker daemon answers at {place} ({innermost(error)})") from error


def is_absent(error: BaseException) -> bool:
    """Say whether `connect` failed because no Docker engine is here for this user, not because one did not answer."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, FileNotFoundError | ConnectionRefusedError | PermissionError):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _require_listener(place: str) -> None:
    # The SDK leaves a socket open when nobody listens on it.
    if place.startswith("unix://"):
        with socket.socket(socket.AF_UNIX) as attempt:
            attempt.settimeout(10.0)
            attempt.connect(place.removeprefix("unix://"))


def require_here() -> None:
    """Return if the Docker engine is on this machine: it mounts files of this one, and its ports are on loopback.

    Raises: EnvironmentMissing naming where it is instead.
    """
    place = os.environ.get("DOCKER_HOST") or DEFAULT_PLACE
    parts = urlsplit(place)
    host = parts.hostname
    if host is None or parts.scheme not in ("tcp", "http", "https", "ssh"):  # a socket
        return
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        addresses = []
    if not any(_is_own(family, address) for family, _, _, _, address in addresses):
        raise EnvironmentMissing(
            "docker",
            f"the Docker engine at {place} is on another machine: it cannot mount checkpoints of this one, and would publish "
            "an engine's port on its own loopback device",
        )


def _is_own(family: int, address: tuple[Any, ...]) -> bool:
    """Say whether an address is one of this machine's."""
    with socket.socket(family, socket.SOCK_STREAM) as attempt:
        try:
            attempt.bind(address)
        except OSError:
            return False
    return True


def present_image(client: docker.DockerClient, name: str) -> Any:
    """Return the image of this name.

    Raises: EnvironmentMissing when it is not on this host.
    """
    try:
        return client.images.get(name)
    except docker.errors.ImageNotFound:
        raise EnvironmentMissing("image", f'Docker has no image "{name}" here; pull or build it first') from None
    except docker.errors.APIError as error:
        raise EnvironmentMissing("image", f'Docker cannot look for image "{name}": {error.explanation}') from error


def is_present(client: docker.DockerClient, name: str) -> bool:
    """Say whether the image is on this host."""
    try:
        client.images.get(name)
    except docker.errors.ImageNotFound:
        return False
    return True


@contextlib.contextmanager
def docker_sentence(what: str) -> Iterator[None]:
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


def innermost(error: BaseException) -> str:
    """Return the message of the error at the root, on one line."""
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__ or error
    return " ".join(str(error).split())[:300] or type(error).__name__
