"""Starters of processes: closed, they end every engine they can; what a launch says is not all that an engine gets."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from harness.engine.engine import EngineSite
from harness.engine.launch import Launch
from harness.engine.proc import find
from harness.engine.process import ProcessStarter
from harness.engine.process_child import ENGINE_VARIABLE, ProcessEngine
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


@pytest.mark.parametrize("kind", [ProcessStarter, ReferenceStarter])
def test_an_interrupt_in_the_middle_of_a_start_loses_no_process(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []
    spawn = ProcessEngine.spawn

    def interrupted(engine: ProcessEngine, command: Any, *, environment: Any) -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        spawn(engine, [sys.executable, "-c", "import time; time.sleep(600)"], environment=environment)
        started.append(engine.pid)

    monkeypatch.setattr(ProcessEngine, "spawn", interrupted)
    starter = kind(Path(sys.executable)) if kind is ProcessStarter else kind()
    if kind is ProcessStarter:
        starter._packages = {"vllm": "0.32.0+cpu"}
    starter.open(EngineSite(run_label="test", log_directory=tmp_path, work_directory=tmp_path / "work", api_key="key"))
    try:
        with pytest.raises(KeyboardInterrupt):
            starter.start(Launch(checkpoint_root=tmp_path, checkpoint_name="live"), incarnation="one")
        assert len(started) == 1
        starter.close()
        assert [pid for pid in started if (process := find(pid)) is not None and process.is_running()] == []
    finally:
        starter.close()
        for pid in started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
