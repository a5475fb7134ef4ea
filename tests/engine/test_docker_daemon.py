"""What a Docker engine must be for an engine's container to work, and what its image is called."""

from __future__ import annotations

import pytest

from harness.engine.container import _tag
from harness.engine.docker_daemon import require_here
from harness.errors import EnvironmentMissing


@pytest.mark.parametrize("place", ["", "unix:///run/user/1000/docker.sock", "tcp://127.0.0.1:2375", "tcp://[::1]:1"])
def test_a_docker_engine_of_this_machine_will_do(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.setenv("DOCKER_HOST", place)
    require_here()


@pytest.mark.parametrize("place", ["tcp://192.0.2.1:2375", "ssh://user@192.0.2.1", "tcp://no-such-host.invalid:2375"])
def test_a_docker_engine_elsewhere_is_refused_at_once(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.setenv("DOCKER_HOST", place)
    with pytest.raises(EnvironmentMissing, match="is on another machine: it cannot mount checkpoints"):
        require_here()


@pytest.mark.parametrize(
    ("image", "tag"),
    [
        ("vllm/vllm-openai:v0.32.0", "v0.32.0"),
        ("registry.example:5000/vllm", ""),
        ("registry.example:5000/vllm:0.32.0", "0.32.0"),
        ("vllm:0.32.0@sha256:0123", "0.32.0"),
        ("vllm@sha256:0123", ""),
        ("sha256:0123", ""),
        ("7fbe949d78f1", ""),
    ],
)
def test_the_release_of_an_image_is_its_tag_and_nothing_else(image: str, tag: str) -> None:
    assert _tag(image) == tag
