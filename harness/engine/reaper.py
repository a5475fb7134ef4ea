"""Testcontainers' own reaper, where its image is there, with its port on loopback alone."""

from __future__ import annotations

import docker
import docker.errors
from testcontainers.core import container as testcontainers_container
from testcontainers.core.config import testcontainers_config
from testcontainers.core.container import DockerContainer, Reaper


class _OnLoopback(DockerContainer):
    """A container whose ports nobody outside this machine reaches."""

    def with_exposed_ports(self, *ports: str | int) -> _OnLoopback:
        """Publish ports on loopback, each at a free port of the host."""
        for port in ports:
            self.ports[str(port)] = ("127.0.0.1", None)  # type: ignore[assignment]  # the Docker SDK takes a pair
        return self

    def get_container_host_ip(self) -> str:
        """Return where the ports are."""
        return "127.0.0.1"

    def get_exposed_port(self, port: int) -> int:
        """Return the host's port."""
        return int(self.get_docker_client().port(self.get_container_id(), port))


def start_reaper_if_present(client: docker.DockerClient) -> bool:
    """Start the reaper if its image is on this machine, once per process; without, our own sweep ends what is left.

    Whoever reaches its port can have containers removed, and testcontainers publishes it on every interface.
    """
    if testcontainers_config.ryuk_disabled:
        return False
    try:
        client.images.get(testcontainers_config.hub_image_name_prefix + testcontainers_config.ryuk_image)
    except docker.errors.ImageNotFound:
        testcontainers_config.ryuk_disabled = True
        return False
    given = testcontainers_container.DockerContainer
    testcontainers_container.DockerContainer = _OnLoopback  # type: ignore[misc]  # what the reaper is made of
    try:
        Reaper.get_instance()
    finally:
        testcontainers_container.DockerContainer = given  # type: ignore[misc]
    return True
