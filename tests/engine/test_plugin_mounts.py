"""What is mounted for the container's user can be read by it, with whatever umask it was installed and the harness runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.engine import container, container_options
from harness.engine.container import ContainerStarter
from harness.engine.container_options import PLUGIN_DIRECTORY, PLUGINS, is_readable_by_all
from harness.engine.engine import EngineSite
from harness.engine.launch import Launch, WeightCache


@pytest.fixture
def closed_umask() -> Iterator[None]:
    before = os.umask(0o077)
    yield
    os.umask(before)


@pytest.fixture
def starter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ContainerStarter:
    starter = ContainerStarter("image")
    site = EngineSite(run_label="r", log_directory=tmp_path / "logs", work_directory=tmp_path / "work", api_key="sk-x")
    monkeypatch.setattr(starter, "_client", object())
    monkeypatch.setattr(starter, "_site", site)
    monkeypatch.setattr(starter, "_network", SimpleNamespace(name="n"))
    monkeypatch.setattr(starter, "_image_user", lambda: "")
    monkeypatch.setattr(container, "_let_write", lambda *_: None)
    return starter


def plugin_of(starter: ContainerStarter, tmp_path: Path) -> Path:
    for name in ("checkpoints", "cache", "work"):
        (tmp_path / name).mkdir(exist_ok=True)
    launch = Launch(
        checkpoint_root=tmp_path / "checkpoints",
        checkpoint_name="live",
        weight_cache=WeightCache(directory=tmp_path / "cache", key="k"),
    )
    site = starter._site
    assert site is not None
    mounts = starter._options(launch, site, "old-1").mounts
    assert [mount.source for mount in mounts if not mount.is_read_only] == [tmp_path / "cache"]
    return next(mount.source for mount in mounts if mount.target == PLUGINS)


@pytest.mark.usefixtures("closed_umask")
def test_a_plugin_that_is_closed_to_others_is_mounted_as_a_copy_that_is_not(
    starter: ContainerStarter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a clone made by root with a umask of 077 is."""
    installed = tmp_path / "installed"
    (installed / "it-1.0.dist-info").mkdir(parents=True)
    (installed / "__pycache__").mkdir()
    (installed / "it.py").write_text("works = True\n")
    (installed / "it-1.0.dist-info" / "entry_points.txt").write_text("[vllm.general_plugins]\n")
    monkeypatch.setattr(container_options, "PLUGIN_DIRECTORY", installed)
    assert not is_readable_by_all(installed)

    mounted = plugin_of(starter, tmp_path)

    assert is_readable_by_all(mounted)
    assert mounted.is_relative_to(tmp_path / "work"), "it goes with the run"
    assert {str(path.relative_to(mounted)) for path in mounted.rglob("*")} == {
        "it.py",
        "it-1.0.dist-info",
        "it-1.0.dist-info/entry_points.txt",
    }
    assert (mounted / "it.py").read_text() == "works = True\n"
    assert not is_readable_by_all(installed), "what is installed stays as it was"


def test_a_plugin_that_all_can_read_is_mounted_itself(
    starter: ContainerStarter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert PLUGIN_DIRECTORY.is_dir()
    installed = tmp_path / "installed"
    installed.mkdir(mode=0o755)
    installed.chmod(0o755)
    monkeypatch.setattr(container_options, "PLUGIN_DIRECTORY", installed)
    assert plugin_of(starter, tmp_path) == installed
    assert list((tmp_path / "work").iterdir()) == []
