"""Testcontainers' reaper is used where its image is there, and nobody outside this machine reaches it."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator

import docker
import pytest
from testcontainers.core.config import testcontainers_config
from testcontainers.core.container import Reaper

from harness.engine.docker_daemon import connect
from harness.engine.image import ensure_image
from harness.engine.reaper import start_reaper_if_present

# What matters of the real one here: it says that it has started, and takes connections on its port.
STAND_IN = (
    "import socket; listening = socket.create_server(('', 8080)); print('reaper Started!', flush=True); "
    "connection = listening.accept()[0]; print(connection.recv(200), flush=True); connection.recv(200)"
)


@pytest.fixture(scope="module")
def client() -> Iterator[docker.DockerClient]:
    with contextlib.closing(connect()) as client:
        yield client


@pytest.fixture
def reaper_image(client: docker.DockerClient, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name = f"reaper-stand-in-{secrets.token_hex(4)}"
    entry = {"entrypoint": ["/opt/vllm/bin/python3", "-u", "-c", STAND_IN], "command": [], "network_mode": "none"}
    stand_in = client.containers.create(ensure_image().name, **entry)
    try:
        stand_in.commit(repository=name, tag="latest", changes=["USER 0"])
    finally:
        stand_in.remove(force=True)
    monkeypatch.setattr(testcontainers_config, "ryuk_image", f"{name}:latest")
    monkeypatch.setattr(testcontainers_config, "_ryuk_disabled", False)
    monkeypatch.setattr(Reaper, "_instance", None)
    try:
        yield name
    finally:
        Reaper.delete_instance()
        client.images.remove(f"{name}:latest", force=True)


@pytest.mark.docker
def test_reaper_is_reachable_from_this_machine_alone(client: docker.DockerClient, reaper_image: str) -> None:
    assert start_reaper_if_present(client)
    assert Reaper._container is not None
    running = Reaper._container.get_wrapped_container()
    running.reload()
    published = running.attrs["NetworkSettings"]["Ports"]["8080/tcp"]
    assert {port["HostIp"] for port in published} == {"127.0.0.1"}


@pytest.mark.docker
def test_without_its_image_the_reaper_is_not_asked_for(
    client: docker.DockerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(testcontainers_config, "ryuk_image", f"absent-{secrets.token_hex(4)}:latest")
    monkeypatch.setattr(testcontainers_config, "_ryuk_disabled", False)
    assert not start_reaper_if_present(client)
    assert testcontainers_config.ryuk_disabled
