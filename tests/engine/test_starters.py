"""Starters of processes: closed, they end every engine they can; what a launch says is not all that an engine gets."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from harness.engine.engine import EngineSite
from harness.engine.launch import Launch
from harness.engine.process import ProcessStarter
from harness.engine.process_child import ENGINE_VARIABLE
from harness.engine.reference_starter import ReferenceStarter
from harness.errors import LeftOver
from harness.label import LABEL_VARIABLE


class Engine:
    """Says whether it was stopped, and may refuse."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.refuses = refuses
        self.is_stopped = False

    def stop(self, grace_s: float = 10.0) -> None:
        if self.refuses:
            raise LeftOver({"processes": ["7"]})
        self.is_stopped = True


@pytest.mark.parametrize("kind", [ProcessStarter, ReferenceStarter])
def test_an_engine_that_cannot_be_ended_keeps_no_other_alive(kind: Any) -> None:
    starter = kind(Path(sys.executable)) if kind is ProcessStarter else kind()
    engines = [Engine(), Engine(refuses=True), Engine()]
    starter._engines = engines
    if kind is ProcessStarter:
        starter._spawner = ThreadPoolExecutor(max_workers=1)
    with pytest.raises(LeftOver, match="processes: 7"):
        starter.close()
    assert [engine.is_stopped for engine in engines] == [True, False, True]
    assert getattr(starter, "_spawner", None) is None


def test_a_launch_replaces_neither_the_key_nor_the_label(tmp_path: Path) -> None:
    site = EngineSite(run_label="mine", log_directory=tmp_path, work_directory=tmp_path, api_key="key")
    given = ((LABEL_VARIABLE, "other"), ("VLLM_API_KEY", "other"), (ENGINE_VARIABLE, "other"), ("HF_HUB_OFFLINE", "0"))
    launch = Launch(checkpoint_root=tmp_path, checkpoint_name="live", environment=given)
    process = ProcessStarter(Path(sys.executable))._environment(
        launch, site=site, label="engine", scratch=tmp_path, is_cpu=True
    )
    reference = ReferenceStarter()._environment(launch, site=site, label="engine")
    for environment in (process, reference):
        assert environment[LABEL_VARIABLE] == "mine"
        assert environment["VLLM_API_KEY"] == "key"
        assert environment[ENGINE_VARIABLE] == "engine"
        assert environment["HF_HUB_OFFLINE"] == "0"
