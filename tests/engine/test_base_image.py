"""Where no registry answers, a base is made by root, also through sudo, and nothing of the making stays."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import docker.errors
import pytest

from harness.clock import poll_until
from harness.engine import base_image
from harness.engine.build_context import HostSettings
from harness.errors import EnvironmentMissing
from harness.label import DIRECTORY_PREFIX

SETTINGS = HostSettings(pip={}, ca_bundle=None, apt_mirror="http://mirror.example/debian")
SUDO = '#!/bin/sh\n[ "$1" = -n ] || exit 9\nshift\necho "$1" >> {log}\nexec "$@"\n'
DEBOOTSTRAP = '#!/bin/sh\nmkdir -p "$4/proc" && echo made > "$4/file"\n'


class Client:
    """Takes an archive as the Docker SDK does, and keeps what was in the scratch directory then."""

    def __init__(self) -> None:
        self.imported: list[list[str]] = []
        self.api = SimpleNamespace(import_image_from_file=self._import)

    def _import(self, archive: str, **_: Any) -> None:
        self.imported.append(sorted(path.name for path in Path(archive).parent.iterdir()))


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a directory whose programs come first, and a temporary directory of its own."""
    directory = tmp_path / "bin"
    directory.mkdir()
    (tmp_path / "scratch").mkdir()
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    write(directory / "debootstrap", DEBOOTSTRAP)
    return directory


def write(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def scratch_of(programs: Path) -> list[Path]:
    return list((programs.parent / "scratch").iterdir())


def make(client: Client) -> None:
    base_image._make_base(client, SETTINGS, lambda line: None)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_root", [True, False], ids=["root", "sudo"])
def test_a_base_is_made_by_root_and_leaves_nothing(
    programs: Path, monkeypatch: pytest.MonkeyPatch, is_root: bool
) -> None:
    log = programs.parent / "sudo.log"
    write(programs / "sudo", SUDO.format(log=log))
    monkeypatch.setattr(os, "geteuid", lambda: 0 if is_root else 1000)
    client = Client()
    make(client)
    assert client.imported == [["root.tar"]]
    assert scratch_of(programs) == []
    asked = log.read_text().split() if log.exists() else []
    assert [Path(name).name for name in asked] == ([] if is_root else ["true", "debootstrap", "tar", "rm"])


@pytest.mark.parametrize("sudo", ["#!/bin/sh\necho a password is required >&2\nexit 1\n", None])
def test_without_root_there_is_a_sentence(programs: Path, monkeypatch: pytest.MonkeyPatch, sudo: str | None) -> None:
    if sudo is None:
        monkeypatch.setattr(base_image, "SUDO", (str(programs / "absent"),))
    else:
        write(programs / "sudo", sudo)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(EnvironmentMissing, match="only root can run debootstrap, and sudo does not let this user"):
        make(Client())
    assert scratch_of(programs) == []


def test_a_debootstrap_that_fails_is_quoted_and_leaves_nothing(programs: Path) -> None:
    write(programs / "debootstrap", '#!/bin/sh\nmkdir -p "$4/proc"\necho E: no mirror >&2\nexit 5\n')
    with pytest.raises(EnvironmentMissing, match="debootstrap ended with exit code 5: E: no mirror"):
        make(Client())
    assert scratch_of(programs) == []


def test_an_interrupted_debootstrap_ends_with_all_that_it_started(
    programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid_file = programs.parent / "pid"
    write(programs / "debootstrap", f'#!/bin/sh\nmkdir -p "$4"\nsleep 600 &\necho $! > {pid_file}\nwait\n')

    class Interrupted(subprocess.Popen[str]):
        def communicate(self, *arguments: Any, **options: Any) -> Any:
            if options.get("timeout") == base_image.MAKE_LIMIT_S:
                poll_until(lambda: pid_file.exists() or None, what="it runs", limit_s=20)
                raise KeyboardInterrupt
            return super().communicate(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        make(Client())
    sleeper = Path(f"/proc/{pid_file.read_text().strip()}")
    assert not sleeper.exists() or "Z" in (sleeper / "stat").read_text().rpartition(")")[2]
    assert scratch_of(programs) == []


def test_scratch_wears_a_label_so_that_a_sweep_finds_it(programs: Path) -> None:
    with base_image.scratch_directory() as directory:
        assert directory.name.startswith(DIRECTORY_PREFIX)
        assert directory.stat().st_mode & 0o777 == 0o700
    assert scratch_of(programs) == []


def test_why_a_base_cannot_be_pulled_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise docker.errors.APIError("500 Server Error", explanation="proxyconnect tcp: connection refused")

    def absent(name: str) -> None:
        raise docker.errors.ImageNotFound("none")

    client: Any = SimpleNamespace(images=SimpleNamespace(get=absent, pull=refuse))
    monkeypatch.setattr(base_image.shutil, "which", lambda *_, **__: None)
    for base, said in (
        (None, r"cannot be pulled \(proxyconnect tcp: connection refused\), and debootstrap is not installed"),
        ("my/base@sha256:01", "cannot be pulled: proxyconnect tcp: connection refused"),
    ):
        with pytest.raises(EnvironmentMissing, match=said):
            base_image.base_image(client, base, SETTINGS, lambda line: None)
