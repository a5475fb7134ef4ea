"""The plug-in that lets vLLM take weights from files: where it is found, and that it is there only for those who ask for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import distributions
from pathlib import Path

import pytest

from harness.engine.container_options import TRANSFER_PLUGIN, ContainerOptions, container_options
from harness.engine.dev_api import updatable
from harness.engine.engine import EngineSite
from harness.engine.launch import WEIGHT_TRANSFER, Launch, WeightCache
from harness.engine.process import WEIGHT_TRANSFER_PLUGIN_DIRECTORY as PLUGIN
from harness.engine.process import ProcessStarter
from harness.engine.reference.weight_update import backend_of


@pytest.fixture
def site(tmp_path: Path) -> EngineSite:
    return EngineSite(run_label="run", log_directory=tmp_path / "logs", work_directory=tmp_path / "work", api_key="key")


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    return Launch(checkpoint_root=tmp_path, checkpoint_name="live")


def contained(launch: Launch, site: EngineSite) -> ContainerOptions:
    return container_options(launch, site, image="i", incarnation="old-1", network="n")


def test_entry_point_is_found_on_the_search_path() -> None:
    (found,) = distributions(path=[str(PLUGIN)])
    (entry_point,) = found.entry_points
    assert (found.name, entry_point.group) == ("vllm-rollout-weight-transfer", "vllm.general_plugins")
    assert entry_point.value == "vllm_rollout_weight_transfer:register"
    assert {str(file) for file in found.files or ()} == {
        str(file.relative_to(PLUGIN)) for file in PLUGIN.rglob("*") if file.is_file() and file.suffix != ".pyc"
    }


def test_plugin_imports_without_vllm_and_has_the_backend_that_engines_are_started_with() -> None:
    code = (
        "import json, sys, vllm_rollout_weight_transfer as p; p.register\n"
        "print(json.dumps([p.BACKEND, sorted({'torch', 'vllm', 'harness'} & {n.split('.')[0] for n in sys.modules})]))"
    )
    answer = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": str(PLUGIN), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        check=True,
        timeout=30,
    )
    assert json.loads(answer.stdout) == [json.loads(WEIGHT_TRANSFER[1])["backend"], []]


def test_container_has_the_plugin_only_when_weights_are_to_be_sent(launch: Launch, site: EngineSite) -> None:
    options = contained(updatable(launch), site)
    (mount,) = [mount for mount in options.mounts if mount.target == TRANSFER_PLUGIN]
    assert (mount.source, mount.is_read_only) == (PLUGIN, True)
    assert options.environment["PYTHONPATH"] == TRANSFER_PLUGIN
    assert WEIGHT_TRANSFER[0] in options.command
    without = contained(launch, site)
    assert TRANSFER_PLUGIN not in [mount.target for mount in without.mounts]
    assert "PYTHONPATH" not in without.environment


def test_both_plugins_are_found_in_a_container(launch: Launch, site: EngineSite, tmp_path: Path) -> None:
    cached = replace(updatable(launch), weight_cache=WeightCache(directory=tmp_path))
    assert len(contained(cached, site).environment["PYTHONPATH"].split(":")) == 2


def test_process_has_the_plugin_only_when_weights_are_to_be_sent(launch: Launch, site: EngineSite) -> None:
    starter = ProcessStarter(Path(sys.executable))

    def search_path(of: Launch) -> list[str]:
        environment = starter._environment(of, site=site, label="l", scratch=site.work_directory, is_cpu=True)
        return environment["PYTHONPATH"].split(os.pathsep)

    assert str(PLUGIN) in search_path(updatable(launch))
    assert str(PLUGIN) not in search_path(launch)


def test_flags_of_goldens_name_the_transfer_engine(launch: Launch) -> None:
    assert set(WEIGHT_TRANSFER) <= set(updatable(launch).flags())
    assert not set(WEIGHT_TRANSFER) & set(launch.flags())


def test_reference_engine_has_that_backend_alone() -> None:
    assert backend_of(None) is None
    assert backend_of(WEIGHT_TRANSFER[1]) == "rollout_files"
    for config in ('{"backend": "nccl"}', "[]", "no JSON"):
        with pytest.raises(ValueError, match=r"names the backend|Expecting value"):
            backend_of(config)
