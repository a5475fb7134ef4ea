from __future__ import annotations

import contextlib
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path

import docker
import docker.errors
import pytest

from harness.checkpoint import models
from harness.clock import poll_until
from harness.engine import container
from harness.engine.container import ContainerStarter, described
from harness.engine.container_engine import _exit_code
from harness.engine.container_options import container_options
from harness.engine.docker_daemon import connect, docker_sentence
from harness.engine.engine import Engine, EngineSite, Killable, Pausable
from harness.engine.image import ImageRef, ensure_image
from harness.engine.launch import SERVED_MODEL_NAME, Launch, WeightCache
from harness.errors import EngineNotReady, EnvironmentMissing, HarnessError, UsageError
from harness.guards.canary import complete, prompt_logprobs_of, request_body
from harness.label import LABEL_KEY, new_label

PROMPTS = [[5, 6, 7, 8, 9, 10], [20, 21, 22, 23]]
READY_LIMIT_S = 240.0


@pytest.fixture(scope="module")
def client() -> Iterator[docker.DockerClient]:
    with contextlib.closing(connect()) as client:
        yield client


@pytest.fixture(scope="module")
def image(client: docker.DockerClient) -> ImageRef:
    return ensure_image(progress=print)


@pytest.fixture
def site(tmp_path: Path) -> EngineSite:
    return EngineSite(
        run_label=str(new_label()),
        log_directory=tmp_path / "logs",
        work_directory=tmp_path,
        api_key=f"sk-{secrets.token_hex(16)}",
        memory_limit_bytes=6 * 1024**3,
    )


@pytest.fixture
def starter(image: ImageRef, site: EngineSite, client: docker.DockerClient) -> Iterator[ContainerStarter]:
    starter = ContainerStarter(image)
    starter.open(site)
    yield starter
    starter.close()
    assert labelled(client, site) == ([], [])


def labelled(client: docker.DockerClient, site: EngineSite) -> tuple[list[str], list[str]]:
    wanted = {"label": f"{LABEL_KEY}={site.run_label}"}
    containers = client.containers.list(all=True, filters=wanted)
    return [str(c.name) for c in containers], [str(n.name) for n in client.networks.list(filters=wanted)]


@pytest.mark.docker
def test_real_vllm_serves_freezes_dies_and_leaves_nothing(
    starter: ContainerStarter, site: EngineSite, client: docker.DockerClient
) -> None:
    checkpoint = models.tiny_llama(seed=1).build()
    engine = starter.start(
        Launch(checkpoint_root=checkpoint.parent, checkpoint_name=checkpoint.name), incarnation="old-1"
    )
    assert isinstance(engine, Engine)
    assert isinstance(engine, Killable)
    assert isinstance(engine, Pausable)
    assert engine.wait_ready(READY_LIMIT_S) > 1

    def ask(limit_s: float) -> object:
        body = request_body(SERVED_MODEL_NAME, PROMPTS)
        answer = complete(engine.endpoint, body, api_key=site.api_key, limit_s=limit_s)
        return prompt_logprobs_of(answer, PROMPTS)

    rows = ask(60.0)
    assert [len(row) for row in rows] == [5, 3]
    assert ask(60.0) == rows
    with pytest.raises(ValueError, match="HTTP 401"):
        complete(engine.endpoint, request_body(SERVED_MODEL_NAME, PROMPTS), api_key="wrong", limit_s=10.0)

    seen = client.containers.get(engine.container_id).attrs
    assert seen["HostConfig"]["PortBindings"]["8000/tcp"][0]["HostIp"] == "127.0.0.1"
    assert seen["HostConfig"]["CapDrop"] == ["ALL"]
    assert seen["Config"]["User"] != ""
    assert "Serving" in engine.log_path.read_text() or "Starting vLLM server" in engine.log_path.read_text()

    engine.pause()
    with pytest.raises(OSError, match="timed out"):
        ask(1.0)
    engine.resume()
    assert ask(60.0) == rows

    assert engine.kill("core", signal.SIGSEGV) > 1
    poll_until(engine.exit_code, what="end after the core's death", limit_s=60.0)
    assert engine.stop() == engine.exit_code()
    assert engine.stop() == engine.exit_code()
    log = engine.log_path.read_text()
    assert site.api_key not in log
    assert "shutdown complete" in log
    assert labelled(client, site)[0] == []


@pytest.mark.docker
def test_an_engine_that_refuses_says_why_and_leaves_nothing(
    starter: ContainerStarter, tmp_path: Path, site: EngineSite, client: docker.DockerClient
) -> None:
    (tmp_path / "empty").mkdir()
    launch = Launch(checkpoint_root=tmp_path, checkpoint_name="empty")
    engine = starter.start(launch, incarnation="new-1")
    with pytest.raises(EngineNotReady) as caught:
        engine.wait_ready(READY_LIMIT_S)
    assert caught.value.engine_exit_code == 1
    assert "/checkpoints/empty" in caught.value.log_lines[0]
    assert caught.value.log_path.read_text() != ""
    assert engine.exit_code() == 1
    starter.close()
    assert labelled(client, site) == ([], [])


@pytest.mark.docker
def test_an_engine_can_be_stopped_while_it_starts(starter: ContainerStarter, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    engine = starter.start(Launch(checkpoint_root=tmp_path, checkpoint_name="empty"), incarnation="new-1")
    assert engine.exit_code() is None
    assert engine.endpoint.startswith("http://127.0.0.1:")
    assert engine.kill("server", signal.SIGKILL) > 1
    assert poll_until(engine.exit_code, what="end", limit_s=30.0) == -signal.SIGKILL
    with pytest.raises(HarnessError):
        engine.kill("core", signal.SIGKILL)
    second = starter.start(Launch(checkpoint_root=tmp_path, checkpoint_name="empty"), incarnation="new-2")
    assert second.stop(grace_s=20.0) == -signal.SIGTERM


@pytest.mark.docker
def test_a_container_removed_by_somebody_else_counts_as_killed(
    starter: ContainerStarter, tmp_path: Path, client: docker.DockerClient
) -> None:
    (tmp_path / "empty").mkdir()
    engine = starter.start(Launch(checkpoint_root=tmp_path, checkpoint_name="empty"), incarnation="new-1")
    client.containers.get(engine.container_id).remove(force=True)
    assert poll_until(engine.exit_code, what="end", limit_s=30.0) == -signal.SIGKILL
    assert engine.stop() == -signal.SIGKILL


@pytest.mark.docker
def test_a_start_that_fails_midway_leaves_nothing(
    starter: ContainerStarter,
    tmp_path: Path,
    site: EngineSite,
    client: docker.DockerClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*arguments: object, **more: object) -> None:
        assert labelled(client, site)[0] != []
        raise RuntimeError("midway")

    monkeypatch.setattr(container, "ContainerEngine", broken)
    with pytest.raises(RuntimeError, match="midway"):
        starter.start(Launch(checkpoint_root=tmp_path, checkpoint_name="x"), incarnation="new-1")
    assert labelled(client, site)[0] == []


@pytest.mark.docker
@pytest.mark.parametrize(("gpus", "count", "ids"), [(("0", "3"), 0, ["0", "3"]), (2, 2, None)])
def test_gpus_reach_docker(
    image: ImageRef,
    site: EngineSite,
    tmp_path: Path,
    client: docker.DockerClient,
    gpus: tuple[str, ...] | int,
    count: int,
    ids: list[str] | None,
) -> None:
    launch = Launch(checkpoint_root=tmp_path, checkpoint_name="x")
    options = container_options(
        launch, site, image=image.name, incarnation="a", network="bridge", gpus=gpus, user="1234:99"
    )
    wanted = described(options)
    created = wanted.get_docker_client().create(
        image.name, command=list(options.command), ports=wanted.ports, tmpfs=wanted.tmpfs, **options.as_docker()
    )
    try:
        created.reload()
        (request,) = created.attrs["HostConfig"]["DeviceRequests"]
        assert (request["Count"], request["DeviceIDs"] or None, request["Capabilities"]) == (count, ids, [["gpu"]])
        assert created.attrs["HostConfig"]["ShmSize"] >= 1024**3
        assert created.attrs["Config"]["User"] == "1234:99"
        assert created.attrs["State"]["Status"] == "created"
    finally:
        created.remove(force=True)
        wanted.stop()


@pytest.mark.docker
def test_without_an_nvidia_runtime_there_is_a_sentence(
    image: ImageRef, client: docker.DockerClient, site: EngineSite, tmp_path: Path
) -> None:
    if "nvidia" in client.info()["Runtimes"]:
        pytest.skip("this Docker has the NVIDIA runtime")
    starter = ContainerStarter(image, gpus=1)
    with pytest.raises(EnvironmentMissing, match="gpu is not available: Docker has no NVIDIA runtime"):
        starter.identity()
    starter.open(site)
    try:
        with pytest.raises(EnvironmentMissing, match="gpu is not available"):
            starter.start(Launch(checkpoint_root=tmp_path, checkpoint_name="x"), incarnation="a")
        assert labelled(client, site)[0] == []
    finally:
        starter.close()


@pytest.mark.docker
def test_an_absent_image_is_one_sentence(client: docker.DockerClient, site: EngineSite) -> None:
    starter = ContainerStarter("vllm-rollout-harness/absent:0")
    for ask in (starter.identity, lambda: starter.open(site)):
        with pytest.raises(EnvironmentMissing, match='no image "vllm-rollout-harness/absent:0" here'):
            ask()
    assert labelled(client, site) == ([], [])


@pytest.mark.docker
def test_identity_names_release_and_build(image: ImageRef) -> None:
    identity = ContainerStarter(image).identity()
    assert (identity.kind, identity.label, identity.build) == ("container", f"vllm-cpu-{image.version}", image.id)


@pytest.mark.docker
def test_directories_that_are_not_there_are_told_before_docker_is_asked(
    starter: ContainerStarter, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=r'checkpoint root ".*absent" is not a directory'):
        starter.start(Launch(checkpoint_root=tmp_path / "absent", checkpoint_name="x"), incarnation="a")
    cached = Launch(
        checkpoint_root=tmp_path, checkpoint_name="x", weight_cache=WeightCache(directory=tmp_path / "absent")
    )
    with pytest.raises(UsageError, match=r'weight cache ".*absent" is not a directory'):
        starter.start(cached, incarnation="a")


def test_a_starter_must_be_opened(tmp_path: Path) -> None:
    starter = ContainerStarter("i")
    with pytest.raises(UsageError, match="not open"):
        starter.start(Launch(checkpoint_root=tmp_path, checkpoint_name="x"), incarnation="a")
    starter.close()


@pytest.mark.parametrize(("status", "code"), [(0, 0), (1, 1), (128, 128), (137, -9), (139, -11), (255, 255)])
def test_deaths_by_signal_are_negative(status: int, code: int) -> None:
    assert _exit_code(status) == code


def test_what_docker_lacks_is_named() -> None:
    driver = docker.errors.APIError("500", explanation='could not select device driver "" with capabilities: [[gpu]]')
    with pytest.raises(EnvironmentMissing, match="gpu is not available"), docker_sentence("start"):
        raise driver
    with pytest.raises(EnvironmentMissing, match="docker is not available: start: boom"), docker_sentence("start"):
        raise docker.errors.APIError("500", explanation="boom")
