"""The example manifests are valid, keep the promises of their README, and their commands work on the real image."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import docker
import docker.errors
import kubernetes_validate
import pytest
import yaml
from docker.models.containers import Container
from docker.types import Mount

from harness.checkpoint.copy import private_copy
from harness.checkpoint.models import tiny_llama
from harness.clock import poll_until
from harness.engine.docker_daemon import connect
from harness.engine.image import ensure_image
from harness.faults import narrow_tensor
from harness.guards.canary import Golden
from harness.guards.canary_report import prometheus
from harness.guards.preflight_command import main as preflight_main

ROOT = Path(__file__).parent.parent
DIRECTORY = ROOT / "docs" / "kubernetes"
ALIVE_LIMIT_S = 150.0
# What a CPU build wants beside the manifest: the KV cache would be most of the host, and compiling takes a minute.
CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}
ARGUMENTS = "--served-model-name model --dtype auto --max-model-len 256 --enforce-eager"


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DIRECTORY / name).read_text()))


def of_kind(kind: str) -> dict[str, Any]:
    (found,) = [d for name in ("deployment.yaml", "monitoring.yaml") for d in documents(name) if d["kind"] == kind]
    return found


@pytest.fixture
def pod() -> dict[str, Any]:
    spec: dict[str, Any] = of_kind("Deployment")["spec"]["template"]["spec"]
    return spec


def named(items: list[dict[str, Any]], name: str) -> dict[str, Any]:
    (found,) = [item for item in items if item["name"] == name]
    return found


# --- what is written there ---


@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_manifests_fit_the_published_schemas(version: str) -> None:
    for document in documents("deployment.yaml"):
        kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "strategy", "type"), 3),
        (("spec", "template", "spec", "initContainers", 0, "restartPolicie"), "Always"),
        (("spec", "template", "spec", "containers", 0, "readinessProbe", "periodSeconds"), "often"),
    ],
)
def test_the_schemas_would_notice(path: tuple[Any, ...], value: Any) -> None:
    document = of_kind("Deployment")
    place: Any = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, "1.37", strict=True)


def test_every_volume_is_there_and_the_parent_of_the_link_is_mounted(pod: dict[str, Any]) -> None:
    volumes = {volume["name"] for volume in pod["volumes"]}
    containers = [*pod["initContainers"], *pod["containers"]]
    assert {mount["name"] for container in containers for mount in container["volumeMounts"]} == volumes
    (engine,) = pod["containers"]
    published = named(engine["volumeMounts"], "checkpoints")
    assert published["readOnly"] is True
    assert f"{published['mountPath']}/live" in engine["args"][0]  # the link below what is mounted
    for container in containers:
        writable = {mount["name"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
        allowed = {"publish": {"checkpoints"}, "purge-cache": {"shared-memory"}, "preflight": {"metrics"}}
        assert writable <= allowed.get(container["name"], {"shared-memory", "worker-memory", "metrics"})


def test_guards_come_in_order_and_no_hook_stands_in_for_them(pod: dict[str, Any]) -> None:
    assert [container["name"] for container in pod["initContainers"]] == [
        "metrics",
        "preflight",
        "publish",
        "purge-cache",
    ]
    assert pod["initContainers"][0]["restartPolicy"] == "Always"  # a sidecar: the others are waited for
    assert not any("restartPolicy" in container for container in pod["initContainers"][1:])
    assert "postStart" not in (DIRECTORY / "deployment.yaml").read_text()
    explained = " ".join((DIRECTORY / "README.md").read_text().split())
    assert "`postStart` is not used" in explained
    assert "not ordered before" in explained
    assert "kills the container" in explained


def test_preflight_and_the_engine_get_the_same_arguments(pod: dict[str, Any]) -> None:
    (engine,) = pod["containers"]
    assert engine["env"] == named(pod["initContainers"], "preflight")["env"]
    assert engine["args"][0].endswith("$ENGINE_ARGUMENTS")
    release = named(engine["env"], "ENGINE_RELEASE")["value"]
    assert engine["image"].endswith(":" + release.removeprefix("vllm=="))
    assert {c["image"] for c in (*pod["initContainers"], *pod["containers"])} == {engine["image"]}
    text = (DIRECTORY / "deployment.yaml").read_text()
    assert "api-key" not in " ".join(engine["args"])
    assert text.count("VLLM_API_KEY") == 1  # in a comment: the key comes from the secret


def test_readiness_is_the_canary_and_health_decides_about_restarts_alone(pod: dict[str, Any]) -> None:
    (engine,) = pod["containers"]
    assert engine["startupProbe"]["httpGet"]["path"] == engine["livenessProbe"]["httpGet"]["path"] == "/health"
    probe = engine["readinessProbe"]
    script = probe["exec"]["command"][-1]
    assert "harness canary" in script
    assert f"--period-s {probe['periodSeconds']} " in script
    limit_s = float(re.findall(r"--limit-s ([\d.]+)", script)[0])
    assert probe["timeoutSeconds"] >= 2 * limit_s  # the probe's own limit must not cut an answer that is still in time
    rollout = of_kind("Deployment")["spec"]
    assert rollout["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    assert rollout["minReadySeconds"] >= 3 * probe["periodSeconds"]


@pytest.mark.parametrize(
    ("passed", "code", "ready"),
    [
        *((False, 0, True), (False, 1, False), (False, 2, False)),
        *((True, 0, True), (True, 1, False), (True, 2, True), (True, 3, False)),
    ],
)
def test_what_each_answer_of_the_canary_does_to_the_pod(
    pod: dict[str, Any], tmp_path: Path, passed: bool, code: int, ready: bool
) -> None:
    (engine,) = pod["containers"]
    script = engine["readinessProbe"]["exec"]["command"][-1].replace("/tmp/", f"{tmp_path}/")
    if passed:
        (tmp_path / "canary-passed").touch()
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "harness"
    command.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\nexit {code}\n')
    command.chmod(0o755)
    done = subprocess.run(
        ["sh", "-c", script], env={"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}, timeout=30, check=False
    )
    assert (done.returncode == 0) is ready
    assert ("--all" in (tmp_path / "asked").read_text()) is not passed  # the gate asks everything
    assert (tmp_path / "canary-passed").exists() is (passed or code == 0)


def test_rules_are_about_metrics_that_exist(tmp_path: Path) -> None:
    rules = [rule for group in of_kind("PrometheusRule")["spec"]["groups"] for rule in group["rules"]]
    checkpoint = tiny_llama(seed=1).build()
    with contextlib.redirect_stdout(io.StringIO()):
        preflight_main([str(checkpoint), "--textfile", str(tmp_path / "preflight.txt")])
    written = prometheus(None) + (tmp_path / "preflight.txt").read_text() + "\nprobe_success 1\n"
    known = {re.split(r"[{ ]", line)[0] for line in written.splitlines() if line and not line.startswith("#")}
    assert {rule["alert"] for rule in rules} >= {"VllmHealthFails", "VllmAnswersFromWrongWeights"}
    for rule in rules:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert set(re.findall(r"\b(?:rollout|probe)_\w+", rule["expr"])) <= known, rule["expr"]
        assert re.search(r"(==|>=|>) \d+$", rule["expr"])
        assert rule["expr"].count("(") == rule["expr"].count(")")
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "1m"))
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert set(rule["annotations"]) == {"summary", "description"}


def test_what_is_scraped_is_what_is_served(pod: dict[str, Any]) -> None:
    sidecar = named(pod["initContainers"], "metrics")
    port = sidecar["ports"][0]
    assert str(port["containerPort"]) in sidecar["command"]
    monitor = of_kind("PodMonitor")["spec"]
    assert monitor["selector"]["matchLabels"] == of_kind("Deployment")["spec"]["template"]["metadata"]["labels"]
    text = (DIRECTORY / "deployment.yaml").read_text()
    for endpoint in monitor["podMetricsEndpoints"]:
        assert endpoint["port"] == port["name"]
        assert f"--textfile /metrics{endpoint['path']}" in text
    service = of_kind("Service")
    assert of_kind("Probe")["spec"]["targets"]["staticConfig"]["static"] == [
        f"http://{service['metadata']['name']}:{service['spec']['ports'][0]['port']}/health"
    ]


# --- the same commands, in Docker ---


@dataclass(frozen=True, kw_only=True)
class Node:
    """A pod's volumes as directories of this host, and the containers started of it."""

    client: docker.DockerClient
    image: str
    volumes: Mapping[str, Path]
    label: str
    values: Mapping[str, str]  # of the environment, in place of the manifest's

    def start(self, container: Mapping[str, Any], pod: Mapping[str, Any]) -> Container:
        """Start a container of the manifest: its command, arguments, environment, mounts and user."""
        environment = {entry["name"]: entry["value"] for entry in container.get("env", ())} | dict(self.values)
        user = pod["securityContext"]
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        return self.client.containers.run(
            self.image,
            entrypoint=container["command"],
            command=container.get("args", []),
            environment=environment,
            mounts=[
                Mount(
                    target=mount["mountPath"],
                    source=str(self.volumes[mount["name"]]),
                    type="bind",
                    read_only=mount.get("readOnly", False),
                )
                for mount in container["volumeMounts"]
            ],
            user=f"{user['runAsUser']}:{user['runAsGroup']}",
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            mem_limit="6g",
            network_mode="bridge",
            labels={self.label: "1"},
            detach=True,
        )

    def run(self, name: str, pod: Mapping[str, Any], **values: str) -> tuple[int, str]:
        """Run an init container to its end and return its exit code and what it printed."""
        node = replace(self, values={**self.values, **values})
        container = node.start(named(pod["initContainers"], name), pod)
        code = int(container.wait(timeout=60)["StatusCode"])
        return code, container.logs().decode()


@pytest.fixture(scope="module")
def client() -> Iterator[docker.DockerClient]:
    with contextlib.closing(connect(timeout_s=300.0)) as client:
        yield client


@pytest.fixture
def guarded_image(client: docker.DockerClient, tmp_path: Path) -> Iterator[str]:
    """Build the image of the Dockerfile on the real engine's, as its comment says."""
    engine = ensure_image(progress=print)
    context = tmp_path / "context"
    shutil.copytree(DIRECTORY, context)
    wheels = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", str(context / "wheels")]
    subprocess.run([*wheels, str(ROOT)], check=True, timeout=120, capture_output=True)
    name = f"vllm-rollout-harness/test-guarded:{secrets.token_hex(4)}"
    client.images.build(path=str(context), tag=name, buildargs={"ENGINE_IMAGE": engine.name}, rm=True, forcerm=True)
    yield name
    client.images.remove(name, force=True)


@pytest.fixture
def node(client: docker.DockerClient, guarded_image: str, pod: dict[str, Any], tmp_path: Path) -> Iterator[Node]:
    volumes = {volume["name"]: tmp_path / "volumes" / volume["name"] for volume in pod["volumes"]}
    for path in volumes.values():
        path.mkdir(parents=True)
        path.chmod(0o777)
    private_copy(tiny_llama(seed=1).build(), volumes["staging"] / "model-v2", share=False)
    private_copy(tiny_llama(seed=1).build(), volumes["staging"] / "model-bad", share=False)
    narrow_tensor("*layers.0.mlp.down_proj.weight", dim=1, by=8).damage(
        volumes["staging"] / "model-bad", old=volumes["staging"] / "model-v2", random=Random(1)
    )
    label = f"io.github.vllm-rollout-harness.test-{secrets.token_hex(6)}"
    yield Node(
        client=client,
        image=guarded_image,
        volumes=volumes,
        label=label,
        values={"ENGINE_ARGUMENTS": ARGUMENTS, "VLLM_API_KEY": "sk-test"},
    )
    for container in client.containers.list(all=True, filters={"label": label}):
        container.remove(force=True)


@pytest.mark.docker
def test_the_commands_of_the_manifest_work_on_the_real_image(node: Node, pod: dict[str, Any]) -> None:
    sidecar = node.start(named(pod["initContainers"], "metrics"), pod)
    code, said = node.run("preflight", pod, CHECKPOINT="/staging/model-bad")
    assert code == 1, said
    assert "do not roll out" in said
    assert not any(node.volumes["checkpoints"].iterdir())
    assert "rollout_preflight_success" in scraped(sidecar, "preflight.txt")
    assert re.search(r"rollout_preflight_success\{.*\} 0\n", scraped(sidecar, "preflight.txt"))

    left = node.volumes["shared-memory"] / "weight_cache"
    assert node.run("preflight", pod)[0] == 0
    leave_cache(node, pod)
    assert [entry.name for entry in left.iterdir()] == ["0123456789abcdef"]
    assert node.run("publish", pod)[0] == 0
    live = node.volumes["checkpoints"] / "live"
    assert os.readlink(live) == "versions/1"
    code, said = node.run("purge-cache", pod)
    assert code == 0, said
    assert not left.exists() or not any(left.iterdir())
    assert node.run("purge-cache", pod)[0] == 0  # the first pod on a node finds nothing

    (engine_spec,) = pod["containers"]
    engine = replace(node, values={**node.values, **CPU}).start(engine_spec, pod)
    poll_until(lambda: alive(engine), what="/health answers 200", limit_s=ALIVE_LIMIT_S, every_s=0.5)
    probe = engine_spec["readinessProbe"]["exec"]["command"]
    assert engine.exec_run(probe).exit_code != 0  # no golden yet: a wrong call admits nobody

    made = engine.exec_run(
        "harness golden http://127.0.0.1:8000 --out /tmp/golden.json --checkpoint /checkpoints/live --under-load --deep"
    )
    assert made.exit_code == 0, made.output.decode()
    assert b"not cross-checked" not in made.output  # NumPy comes with vLLM
    golden = node.volumes["golden"] / "golden.json"
    golden.write_bytes(engine.exec_run(["cat", "/tmp/golden.json"]).output)
    ready = engine.exec_run(probe)
    assert ready.exit_code == 0, ready.output.decode()
    assert b"asked all 4 passes by prompt_logprobs" in ready.output
    assert b"stream: right: framing, number of tokens, token ids, logprobs" in ready.output
    assert b"asked pass" in engine.exec_run(probe).output
    deep = engine.exec_run(["harness", "canary", "http://127.0.0.1:8000", "--golden", "/golden/golden.json", "--deep"])
    assert deep.exit_code == 0, deep.output.decode()
    assert b"long prompt: right" in deep.output
    assert "rollout_canary_success 1.0" in scraped(sidecar, "canary.txt")
    print(Golden.load(golden).noise_max, ready.output.decode(), deep.output.decode())

    fields = json.loads(golden.read_text())
    fields["prompt_logprobs"] = [[value - 0.5 for value in row] for row in fields["prompt_logprobs"]]
    golden.write_text(json.dumps(fields))
    wrong = engine.exec_run(probe)
    assert wrong.exit_code != 0
    assert b"another checkpoint answered" in wrong.output
    assert "rollout_canary_exit_code 1.0" in scraped(sidecar, "canary.txt")


def leave_cache(node: Node, pod: Mapping[str, Any]) -> None:
    """Leave what an engine of another checkpoint leaves on the node, as the user that engines run as."""
    script = (
        'entry="$VLLM_WEIGHT_CACHE_PATH/0123456789abcdef"; mkdir -p "$entry" && cd "$entry" && touch tensors.bin complete '
        '&& echo "{\\"model\\": \\"/checkpoints/live\\", \\"tensors\\": []}" > meta.json'
    )
    leaving = node.start({**named(pod["initContainers"], "purge-cache"), "args": [script]}, pod)
    assert leaving.wait(timeout=60)["StatusCode"] == 0, leaving.logs().decode()


def alive(engine: Container) -> bool | None:
    engine.reload()
    assert engine.status == "running", engine.logs(tail=30).decode()
    ask = "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=2)"
    return True if engine.exec_run(["python3", "-c", ask]).exit_code == 0 else None


def scraped(sidecar: Container, name: str) -> str:
    """Return what Prometheus would read, with the content type it insists on."""
    ask = (
        f"import urllib.request as r; a = r.urlopen('http://127.0.0.1:9400/{name}', timeout=5); "
        "assert a.headers['Content-Type'].startswith('text/plain'), a.headers; print(a.read().decode())"
    )

    def read() -> str | None:
        done = sidecar.exec_run(["python3", "-c", ask])
        return str(done.output.decode()) if done.exit_code == 0 else None

    return poll_until(read, what=f'"{name}" is served', limit_s=15.0, every_s=0.2)
