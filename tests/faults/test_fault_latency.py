"""Faults that change latency alone: somebody really waits, no byte changes, and what does nothing proves nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import pytest
from damage_cases import Pair, contents

from harness import faults
from harness.checkpoint.copy import private_copy
from harness.clock import now_ns, seconds_between
from harness.engine.engine import EngineIdentity
from harness.engine.launch import Launch
from harness.errors import EnvironmentMissing, FaultNotApplicable, ScenarioInvalid
from harness.faults import LiveFault
from harness.faults.fault import Surroundings
from harness.faults.slow_storage import _opens_at_once

VLLM = EngineIdentity(kind="container", name="vllm-cpu", version="0.32.0", build="", hardware="")
OPENER = """
import sys, time
sys.stdin.readline()
began = time.monotonic()
for path in sys.argv[1:]:
    open(path, "rb").read()
print(time.monotonic() - began)
"""


@dataclass
class Starting:
    """What an engine is to this fault: a process that opens files, some time after it was started."""

    process: subprocess.Popen[str]
    incarnation: str = "new-1"
    endpoint: str = "http://127.0.0.1:9"

    def exit_code(self) -> int | None:
        # The fault looks at the engine once it is in place; a real one takes seconds until it opens its weights.
        if self.process.stdin is not None and not self.process.stdin.closed:
            self.process.stdin.close()
        return self.process.poll()

    def waited_s(self) -> float:
        assert self.process.stdout is not None
        assert self.process.wait(30) == 0
        return float(self.process.stdout.read())


@contextmanager
def starting(*files: Path) -> Iterator[Starting]:
    """Start a process that opens these files one after the other."""
    command = [sys.executable, "-S", "-c", OPENER, *map(str, files)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Starting(process)
        finally:
            process.kill()


@pytest.fixture
def around(pair: Pair, tmp_path: Path) -> Surroundings:
    return Surroundings(
        live=private_copy(pair.new, tmp_path / "served"), other=pair.old, work=tmp_path, shared=tmp_path
    )


def weights(around: Surroundings) -> list[Path]:
    return sorted(around.live.glob("*.safetensors"))


def strike(fault: LiveFault, engine: Starting, around: Surroundings) -> faults.Acting:
    return fault.strike(engine, around, random=Random(1))  # type: ignore[arg-type]


def test_each_first_open_waits_and_no_byte_changes(around: Surroundings) -> None:
    before = contents(around.live)
    files = weights(around)
    with starting(*files, *files) as engine, ExitStack() as stack:
        struck = strike(faults.slow_storage(0.4), engine, around)
        stack.callback(struck.finish, limit_s=0)
        assert struck.injected.proved, struck.injected.because
        waited_s = engine.waited_s()
        held_up = struck.state().after["files"]
        struck.finish(limit_s=0)

        assert 0.75 <= waited_s < 10.0  # twice, and only the first time each
        assert all(0.4 <= seen["held_up_s"] < 5.0 and seen["is_over"] for seen in held_up.values())
        assert struck.undone().proved  # type: ignore[attr-defined]
    assert len(files) == 2
    assert contents(around.live) == before


def test_it_is_undone_at_once_while_somebody_waits(around: Surroundings) -> None:
    with starting(*weights(around)) as engine:
        struck = strike(faults.slow_storage(30.0), engine, around)
        assert not _opens_at_once(weights(around)[0])
        assert not struck.undone().proved  # type: ignore[attr-defined]
        began_ns = now_ns()
        struck.finish(limit_s=0)
        engine.waited_s()

        assert seconds_between(began_ns, now_ns()) < 15.0
        assert struck.undone().proved, struck.undone().because  # type: ignore[attr-defined]
        struck.finish(limit_s=0)


def test_an_engine_that_opens_nothing_proves_nothing(around: Surroundings) -> None:
    with starting() as engine:
        struck = strike(faults.slow_storage(5.0), engine, around)
        struck.finish(limit_s=0)

        assert not struck.injected.proved
        assert "of 2 weight files none is being opened" in struck.injected.because


@pytest.mark.parametrize("kind", ["nothing there", "open elsewhere", "shared", "too long"])
def test_what_cannot_be_slow_is_refused_and_nothing_is_held(around: Surroundings, kind: str) -> None:
    fault, said = faults.slow_storage(5.0), ""
    with ExitStack() as stack:
        if kind == "nothing there":
            for file in weights(around):
                file.unlink()
            said = "no safetensors file"
        elif kind == "open elsewhere":
            stack.enter_context(weights(around)[1].open("rb"))
            said = "the kernel gives no lease"
        elif kind == "shared":
            os.link(weights(around)[1], around.work / "theirs")
            said = "cannot be made slow"
        else:
            fault, said = faults.slow_storage(100_000.0), "the kernel breaks leases after"
        engine = stack.enter_context(starting())
        with pytest.raises(FaultNotApplicable, match=said):
            strike(fault, engine, around)
    assert all(_opens_at_once(file) for file in weights(around))


def test_an_engine_that_never_waits_in_open_cannot_be_struck() -> None:
    faults.slow_storage().require(replace(VLLM, kind="process"))
    with pytest.raises(EnvironmentMissing, match="the reference engine never waits in open"):
        faults.slow_storage().require(replace(VLLM, kind="reference"))


@pytest.mark.parametrize("delay_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_delay_that_is_none_is_refused_by_name(delay_s: float) -> None:
    with pytest.raises(ScenarioInvalid, match="slow_storage: open_delay_s must be a number of seconds above 0"):
        faults.slow_storage(delay_s)


def test_an_engine_that_compiles_in_traffic_is_launched_so(tmp_path: Path) -> None:
    launch = Launch(checkpoint_root=tmp_path, checkpoint_name="live", environment=(("KEPT", "1"),))
    altered, injected = faults.compile_in_traffic().alter(launch)

    assert dict(altered.environment) == {"KEPT": "1", "TORCHDYNAMO_DISABLE": "0"}
    assert injected.proved
    assert (injected.fault, injected.fault_id) == ("compile_in_traffic", "P03")
    again, twice = faults.compile_in_traffic().alter(altered)
    assert again == altered
    assert not twice.proved, "it changed nothing"


def test_a_cold_compile_cache_is_another_and_empty_one(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    (cache / "torch_compile_cache").mkdir(parents=True)
    with pytest.raises(FaultNotApplicable, match="no engine wrote a compile cache"):
        faults.cold_compile_cache().spoil(cache, random=Random(1))
    (cache / "torch_compile_cache" / "model").write_bytes(b"compiled")
    where, injected = faults.cold_compile_cache().spoil(cache, random=Random(1))

    assert injected.proved, injected.because
    assert (where != cache, list(where.iterdir())) == (True, [])
    assert (cache / "torch_compile_cache" / "model").read_bytes() == b"compiled"


def test_a_cold_prefix_cache_is_one_of_an_engine_that_has_one(tmp_path: Path) -> None:
    launch = Launch(
        checkpoint_root=tmp_path, checkpoint_name="live", extra_arguments=("--no-enable-prefix-caching", "--kept")
    )
    altered, injected = faults.cold_prefix_cache().alter(launch)

    assert altered.extra_arguments == ("--kept", "--enable-prefix-caching")
    assert injected.proved
    assert (injected.fault, injected.fault_id) == ("cold_prefix_cache", "P04")


def test_an_engine_without_a_compiler_is_launched_so(tmp_path: Path) -> None:
    launch = Launch(checkpoint_root=tmp_path, checkpoint_name="live", environment=(("KEPT", "1"), ("CXX", "g++")))
    altered, injected = faults.missing_compiler().alter(launch)

    assert dict(altered.environment) == {"KEPT": "1", "TORCHDYNAMO_DISABLE": "0", "CXX": "/nonexistent/g++"}
    assert injected.proved
    assert injected.fault_id == "M09"
    again, twice = faults.missing_compiler().alter(altered)
    assert again == altered
    assert not twice.proved, "it changed nothing"


def test_the_reference_engine_needs_no_compiler() -> None:
    faults.missing_compiler().require(VLLM)
    with pytest.raises(EnvironmentMissing, match="compiles nothing"):
        faults.missing_compiler().require(replace(VLLM, kind="reference"))
