"""Starting, refusing, killing and leaving nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from reference_checkpoints import write_checkpoint
from reference_engines import API_KEY, Start

from harness.clock import poll_until
from harness.engine.engine import EngineSite
from harness.engine.launch import Launch
from harness.engine.ready import probe_health
from harness.engine.reference_starter import ReferenceStarter
from harness.errors import EngineNotReady, HarnessError, UsageError
from harness.label import new_label


def test_a_refusal_is_one_line_and_exit_code_1(tmp_path: Path, start_reference: Start) -> None:
    path = write_checkpoint(tmp_path / "c", intermediate_size=264)
    engine = start_reference(path)
    with pytest.raises(EngineNotReady) as caught:
        engine.wait_ready(20)
    assert caught.value.engine_exit_code == 1
    assert caught.value.log_lines[0].startswith("CheckpointDefect unexpected_shape: ")
    assert 'tensor "model.layers.0.mlp.down_proj.weight"' in caught.value.log_lines[0]
    text = engine.log_path.read_text()
    assert text.count("ERROR") == 1
    assert "Traceback" not in text


def test_a_socket_that_may_not_be_made_ends_it_with_one_line(checkpoint: Path, start_reference: Start) -> None:
    engine = start_reference(checkpoint, extra_arguments=("--uds", "/sys/engine.sock"))
    with pytest.raises(EngineNotReady) as caught:
        engine.wait_ready(20)
    assert caught.value.engine_exit_code == 1
    (line,) = caught.value.log_lines
    assert "cannot bind /sys/engine.sock: " in line


def test_it_serves_on_a_unix_socket(checkpoint: Path, start_reference: Start, tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    start_reference(checkpoint, extra_arguments=("--uds", str(path)))

    def answer() -> bytes | None:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(5.0)
            try:
                client.connect(str(path))
            except OSError:  # not yet made, or not yet listened on
                return None
            client.sendall(b"GET /health HTTP/1.1\r\nHost: engine\r\nConnection: close\r\n\r\n")
            return client.recv(1024)

    assert poll_until(answer, what="an answer from the socket", limit_s=20, every_s=0.05).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("name", ["absent", "file"])
def test_a_path_that_is_no_checkpoint_is_refused(tmp_path: Path, start_reference: Start, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineNotReady) as caught:
        start_reference(tmp_path / name).wait_ready(20)
    assert caught.value.engine_exit_code == 1
    assert caught.value.log_lines[0].startswith("CheckpointDefect directory_absent: ")


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        ({"dtype": "fp16"}, "argument --dtype: invalid choice: 'fp16'"),
        ({"dtype": "bf16"}, "argument --dtype: invalid choice: 'bf16'"),
        ({"extra_arguments": ("--disable-weight-cache",)}, "unrecognized arguments: --disable-weight-cache"),
        ({"extra_arguments": ("--load-format", "npcache")}, "argument --load-format: invalid choice: 'npcache'"),
        ({"max_model_len": 0}, "--max-model-len: 0 is not positive"),
        ({"environment": (("ROLLOUT_REFERENCE_STEP_MS", "fast"),)}, "could not convert string to float"),
    ],
)
def test_wrong_arguments_end_with_exit_code_2(
    checkpoint: Path, start_reference: Start, launch: dict[str, object], message: str
) -> None:
    engine = start_reference(checkpoint, **launch)
    with pytest.raises(EngineNotReady) as caught:
        engine.wait_ready(20)
    assert caught.value.engine_exit_code == 2
    assert message in caught.value.log_lines[0]


def test_ranks_that_do_not_divide_the_heads_are_refused_and_others_change_nothing(
    checkpoint: Path, start_reference: Start
) -> None:
    start_reference(checkpoint, extra_arguments=("--tensor-parallel-size", "2")).wait_ready(20)
    engine = start_reference(checkpoint, extra_arguments=("--tensor-parallel-size", "3"))
    with pytest.raises(EngineNotReady) as caught:
        engine.wait_ready(20)
    assert caught.value.engine_exit_code == 1
    assert "must be divisible by tensor parallel size (3)" in caught.value.log_lines[0]


@pytest.mark.parametrize("dtype", ["auto", "half", "float16", "bfloat16", "float", "float32"])
def test_every_dtype_of_vllm_is_accepted(checkpoint: Path, start_ready: Start, dtype: str) -> None:
    start_ready(checkpoint, dtype=dtype, extra_arguments=("--enforce-eager", "--max-num-seqs", "8"))


def test_a_relative_link_is_served(tmp_path: Path, checkpoint: Path, start_ready: Start) -> None:
    (tmp_path / "live").symlink_to(checkpoint.name)
    start_ready(tmp_path / "live")


def test_a_paused_engine_does_not_answer_until_resumed(checkpoint: Path, start_ready: Start) -> None:
    engine = start_ready(checkpoint)
    engine.pause()
    assert "TimeoutError" in probe_health(engine.endpoint, limit_s=0.3)
    engine.resume()
    assert probe_health(engine.endpoint, limit_s=10) == "HTTP 200"
    engine.pause()
    assert engine.stop(grace_s=10) == 0


@pytest.mark.parametrize("role", ["server", "core"])
def test_a_killed_engine_shows_its_signal(checkpoint: Path, start_ready: Start, role: str) -> None:
    engine = start_ready(checkpoint)
    assert engine.kill(role, signal.SIGKILL) == engine.pid
    assert poll_until(engine.exit_code, what="exit", limit_s=10) == -signal.SIGKILL
    with pytest.raises(HarnessError, match="exit code -9"):
        engine.kill(role, signal.SIGKILL)


def test_the_key_is_nowhere_to_be_seen(checkpoint: Path, start_ready: Start) -> None:
    engine = start_ready(checkpoint)
    assert API_KEY not in " ".join(psutil.Process(engine.pid).cmdline())
    engine.stop()
    assert API_KEY not in engine.log_path.read_text()


def test_engine_runs_on_the_processors_of_the_site(tmp_path: Path, checkpoint: Path) -> None:
    before = os.sched_getaffinity(0)
    chosen = max(before)
    starter = ReferenceStarter()
    site = EngineSite(
        run_label=str(new_label()),
        log_directory=tmp_path / "l",
        work_directory=tmp_path / "w",
        api_key="k",
        engine_cpus=(chosen,),
    )
    starter.open(site)
    try:
        engine = starter.start(Launch(checkpoint_root=tmp_path, checkpoint_name=checkpoint.name), incarnation="one")
        engine.wait_ready(20)
        assert os.sched_getaffinity(engine.pid) == {chosen}
        assert os.sched_getaffinity(0) == before
        assert starter.identity().hardware.endswith("1 cores")
    finally:
        starter.close()


def test_close_ends_every_engine_and_can_be_repeated(tmp_path: Path, checkpoint: Path) -> None:
    starter = ReferenceStarter()
    starter.open(
        EngineSite(run_label=str(new_label()), log_directory=tmp_path / "l", work_directory=tmp_path / "w", api_key="k")
    )
    launch = Launch(checkpoint_root=tmp_path, checkpoint_name=checkpoint.name)
    engines = [starter.start(launch, incarnation=f"e{number}") for number in range(2)]
    assert engines[0].endpoint != engines[1].endpoint
    starter.close()
    starter.close()
    for engine in engines:
        assert engine.exit_code() is not None
        assert not psutil.pid_exists(engine.pid)
    assert list((tmp_path / "w").iterdir()) == []


def test_a_starter_that_is_not_open_starts_nothing(checkpoint: Path) -> None:
    launch = Launch(checkpoint_root=checkpoint.parent, checkpoint_name=checkpoint.name)
    with pytest.raises(UsageError, match="not open"):
        ReferenceStarter().start(launch, incarnation="one")


def test_an_engine_does_not_outlive_a_killed_parent(tmp_path: Path, checkpoint: Path) -> None:
    program = f"""
import signal, sys
from pathlib import Path
from harness.engine.engine import EngineSite
from harness.engine.launch import Launch
from harness.engine.reference_starter import ReferenceStarter
from harness.label import new_label
starter = ReferenceStarter()
place = Path({str(tmp_path)!r})
starter.open(EngineSite(run_label=str(new_label()), log_directory=place / "l", work_directory=place / "w", api_key="k"))
engine = starter.start(Launch(checkpoint_root=place, checkpoint_name={checkpoint.name!r}), incarnation="one")
engine.wait_ready(20)
print(engine.pid, flush=True)
signal.pause()
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        child = psutil.Process(pid)
    finally:
        parent.kill()
        parent.communicate(timeout=10)

    def gone() -> bool | None:
        try:
            return True if child.status() == psutil.STATUS_ZOMBIE else None
        except psutil.NoSuchProcess:
            return True

    poll_until(gone, what="end of the orphaned engine", limit_s=10)


def test_stopping_an_engine_leaves_another_of_the_same_name_alone(tmp_path: Path, checkpoint: Path) -> None:
    # The engine that a scenario hands on has a name that the next scenario uses again.
    starter = ReferenceStarter()
    starter.open(
        EngineSite(
            run_label=str(new_label()),
            log_directory=tmp_path / "logs",
            work_directory=tmp_path / "work",
            api_key=API_KEY,
        )
    )
    launch = Launch(checkpoint_root=checkpoint.parent, checkpoint_name=checkpoint.name)
    try:
        first, second = (starter.start(launch, incarnation="new-1") for _ in range(2))
        second.wait_ready(20)
        assert first.stop() is not None
        assert second.exit_code() is None
        assert second.parts() == {str(second.pid)}
    finally:
        starter.close()
