"""Scenarios of a GPU, played whole on the reference engine: a stand-in holds what the GPU would, and the rest is as ever."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from harness import after_detection, at, claims, faults, then
from harness.engine.beside import Beside
from harness.engine.engine import EngineIdentity
from harness.engine.process_child import ProcessEngine
from harness.faults import device_memory
from harness.faults.device_memory import HeldDeviceMemory
from harness.faults.weight_daemon import LOG_NAME, StaleWeightDaemon
from harness.judge.verdict import Verdict
from harness.observe.history import EventKind
from harness.report.store import ScenarioRecord
from harness.scenario import Mode
from tests.planted import DEFECT, PlantingStarter, run_on, short, verdicts

pytestmark = pytest.mark.slow

# Answers as vLLM's daemon does, and says that an engine was given all it holds.
DAEMON = """
import os, pickle, socket, struct
print("Weight cache target daemon rank 0 sent 21 tensors (+1 aliases) to engine", flush=True)
server = socket.socket(socket.AF_UNIX)
server.bind("vllm_weight_cache_0.sock")
server.listen()
while True:
    connection, _ = server.accept()
    size = struct.unpack("!Q", connection.recv(8))[0]
    connection.recv(size)
    payload = pickle.dumps({"status": "ok", "memory_bytes": 4096})
    connection.sendall(struct.pack("!Q", len(payload)) + payload)
    connection.close()
"""
HELD_BYTES = 1024**3
HOLDER = f"import sys; print({HELD_BYTES}, flush=True); sys.stdin.read()"


def anywhere(self: object, identity: EngineIdentity) -> None:
    """Let a fault of a GPU be injected without one."""


def undone(record: ScenarioRecord, fault: str) -> bool:
    """Say whether the undo of a fault is proved."""
    found = [event.data for event in record.history.of(EventKind.FAULT_UNDONE) if event.data["fault"] == fault]
    return len(found) == 1 and found[0]["proved"] is True


def test_a_daemon_is_filled_before_the_rollout_and_ended_by_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_beside(self: ProcessEngine, *arguments: str, directory: Path, log_path: Path) -> Beside:
        return Beside(
            (sys.executable, "-c", DAEMON, *arguments),
            environment=dict(self._spawned[1]),
            directory=directory,
            log_path=log_path,
        )

    monkeypatch.setattr(StaleWeightDaemon, "require", anywhere)
    monkeypatch.setattr(ProcessEngine, "run_beside", run_beside)
    scenario = short(
        "daemon_stands_in",
        faults.stale_weight_daemon(),
        claims=(claims.detected_by("canary"), claims.recovered(within_s=60.0)),
        timeline=(
            at(0.7).inject(),
            then().publish("new"),
            then().start_rollout(),
            after_detection(limit_s=40.0).remedy(),
        ),
        limit_s=300.0,
    )
    with run_on(PlantingStarter({"new-1": {DEFECT: "wrong_answer"}}), tmp_path) as run:
        record = run.scenario(scenario, Mode.UNGUARDED)

    assert set(verdicts(record).values()) == {Verdict.HELD}, record.findings
    because = [event.data["because"] for event in record.history.of(EventKind.FAULT_INJECTED)]
    assert "holds 4,096 bytes" in because[0]
    assert "sent 21 tensors to 1 engines" in because[1]
    assert undone(record, "stale_weight_daemon")
    assert (record.directory / "logs" / LOG_NAME).is_file()


def test_device_memory_is_held_while_an_engine_starts_and_given_back_by_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [2 * HELD_BYTES, HELD_BYTES, HELD_BYTES, 2 * HELD_BYTES]
    monkeypatch.setattr(HeldDeviceMemory, "require", anywhere)
    monkeypatch.setattr(device_memory, "HOLDER", HOLDER)
    monkeypatch.setattr(device_memory, "free_bytes", lambda device: free.pop(0) if len(free) > 1 else free[0])
    scenario = short(
        "holder_stands_in",
        faults.held_device_memory(),
        claims=(claims.recovered(within_s=60.0),),
        limit_s=300.0,
    )
    with run_on(PlantingStarter({"new-1": {DEFECT: "never_ready"}}), tmp_path) as run:
        record = run.scenario(scenario, Mode.GUARDED)

    assert set(verdicts(record).values()) == {Verdict.HELD}, record.findings
    assert undone(record, "held_device_memory")
