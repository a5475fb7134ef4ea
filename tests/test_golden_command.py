"""`harness golden` makes files that a canary recognises the engine by, and refuses an engine that would bless itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from harness.checkpoint.manifest import weights_id
from harness.checkpoint.models import tiny_llama
from harness.cli import main
from harness.engine.engine import EngineSite
from harness.engine.launch import Launch
from harness.engine.reference_starter import ReferenceStarter
from harness.guards.canary import Golden
from harness.label import DIRECTORY_PREFIX, LABEL_VARIABLE, new_label

KEY = "geheim"
Serve = Callable[..., str]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    cache = tmp_path_factory.mktemp("models")
    return tiny_llama(seed=1).build(cache), tiny_llama(seed=2).build(cache)


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Return a function that starts the reference engine on a checkpoint and returns its address."""
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    with ExitStack() as stack:

        def start(checkpoint: Path, *defects: str) -> str:
            starter = ReferenceStarter(defects=defects)
            stack.callback(starter.close)
            label = str(new_label())
            starter.open(
                EngineSite(run_label=label, log_directory=tmp_path / "l", work_directory=tmp_path / "w", api_key=KEY)
            )
            engine = starter.start(
                Launch(checkpoint_root=checkpoint.parent, checkpoint_name=checkpoint.name, max_model_len=320),
                incarnation=f"engine-{len(defects)}",
            )
            engine.wait_ready(30.0)
            return engine.endpoint

        yield start


def test_a_running_engine_is_recognised_by_its_golden(
    checkpoints: tuple[Path, Path], serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = checkpoints
    url, path = serve(old), tmp_path / "golden.json"
    assert main(["golden", url, "--out", str(path), "--checkpoint", str(old), "--deep", "--", "--dtype", "auto"]) == 0
    made = Golden.load(path)
    assert made.weights_id == weights_id(old)
    assert made.flags == ("max_model_len=320", "--dtype", "auto")
    assert (made.build, made.hardware, made.vocabulary_size, made.passes) == ("unknown", "unknown", 512, 4)
    assert made.source == "a running engine, as it was"
    assert made.deep is not None
    assert len(made.deep.prompt) == 300
    assert "they read 192 of 512 rows of the embedding" in capsys.readouterr().out
    for more in (["--all", "--deep"], []):
        assert main(["canary", url, "--golden", str(path), *more]) == 0
        assert main(["canary", serve(new), "--golden", str(path), *more]) == 1
    assert main(["canary", serve(old, "truncates_stream"), "--golden", str(path), "--all"]) == 1
    assert main(["canary", serve(old, "truncates_stream"), "--golden", str(path)]) == 0


def test_without_a_checkpoint_only_safe_tokens_are_asked_and_nothing_is_claimed(
    checkpoints: tuple[Path, Path], serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "golden.json"
    call = ["golden", serve(checkpoints[0]), "--out", str(path), "--prompts", "3", "--under-load"]
    assert main([*call, "--hardware", "a toy"]) == 0
    made = Golden.load(path)
    assert (made.weights_id, made.hardware, made.passes) == ("unknown", "a toy", 2)
    assert made.source == "a running engine, under load of ours"
    assert max(token for prompt in made.prompts for token in prompt) < 256
    said = capsys.readouterr().out
    assert "nobody said which checkpoint this is" in said
    assert "only token ids below 256 are asked" in said
    assert main([*call, "--vocabulary", "500", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 72


def test_many_prompts_read_every_row_at_the_same_price(
    checkpoints: tuple[Path, Path], serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, path = serve(checkpoints[0]), tmp_path / "golden.json"
    assert main(["golden", url, "--out", str(path), "--vocabulary", "512", "--prompts", "22"]) == 0
    assert "22 prompts in 11 passes of at most 48 tokens; they read 509 of 512 rows" in capsys.readouterr().out
    assert main(["canary", url, "--golden", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["asked"]["prompt_tokens"] == 48


def test_an_engine_that_serves_something_else_is_not_written_down(
    checkpoints: tuple[Path, Path], serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = checkpoints
    path = tmp_path / "golden.json"
    assert main(["golden", serve(new), "--out", str(path), "--checkpoint", str(old)]) == 2
    assert "from our own forward pass on the same weights" in capsys.readouterr().err
    assert not path.exists()


def test_a_cold_start_leaves_a_golden_and_nothing_else(
    checkpoints: tuple[Path, Path], serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    path = tmp_path / "golden.json"
    call = ["golden", "--engine", "reference", "--checkpoint", str(checkpoints[0]), "--out", str(path)]
    assert main([*call, "--max-model-len", "256", "--dtype", "bfloat16"]) == 0
    made = Golden.load(path)
    assert made.weights_id == weights_id(checkpoints[0])
    assert made.engine.startswith("reference-")
    assert made.build.startswith("python 3.")
    assert made.flags == ("bfloat16", "256")
    assert made.source == "a cold start"
    assert made.noise_checks == 40
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith("golden")] == ["golden.json"]
    assert not any(name.startswith(DIRECTORY_PREFIX) for name in os.listdir(tmp_path / "tmp"))
    assert main(["canary", serve(checkpoints[0]), "--golden", str(path), "--all"]) == 0


def test_an_interrupt_in_the_middle_of_a_start_leaves_nothing(
    checkpoints: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    started: list[subprocess.Popen[bytes]] = []

    def start(starter: ReferenceStarter, launch: Launch, *, incarnation: str) -> None:
        assert starter._site is not None
        environment = {**os.environ, LABEL_VARIABLE: starter._site.run_label}
        started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env=environment))
        raise KeyboardInterrupt

    monkeypatch.setattr(ReferenceStarter, "start", start)
    call = ["golden", "--engine", "reference", "--checkpoint", str(checkpoints[0])]
    try:
        assert main([*call, "--out", str(tmp_path / "golden.json")]) == 2
        assert started[0].wait(20.0) == -signal.SIGKILL
    finally:
        started[0].kill()
        started[0].wait()
    assert "interrupted" in capsys.readouterr().err
    assert not any((tmp_path / "tmp").iterdir())


def test_a_start_that_fails_keeps_the_log(
    checkpoints: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "golden.json"
    call = ["golden", "--engine", "reference", "--checkpoint", str(checkpoints[0]), "--out", str(path)]
    assert main([*call, "--", "--no-such-option"]) == 2
    assert "is not ready" in capsys.readouterr().err
    assert not path.exists()
    assert "no-such-option" in next((tmp_path / "golden.json.logs").iterdir()).read_text()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ([], "either the URL of a running engine, or --engine"),
        (["http://127.0.0.1:1", "--engine", "reference"], "either the URL of a running engine, or --engine"),
        (["--engine", "reference"], "a cold start needs --checkpoint"),
        (["--engine", "reference", "--checkpoint", "nowhere"], '"nowhere" is not a directory'),
        (["127.0.0.1"], "is no address"),
        (["http://127.0.0.1:1", "--prompts", "1"], "--prompts is 1"),
        (["http://127.0.0.1:1", "--vocabulary", "8"], "--vocabulary is 8"),
        (["http://127.0.0.1:1", "--deep", "--deep-tokens", "9"], "--deep-tokens is 9"),
        (["http://127.0.0.1:1", "--limit-s", "0"], "--limit-s is 0"),
        (["http://127.0.0.1:1", "--insecure"], "--insecure is about certificates"),
    ],
)
def test_wrong_calls(call: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["golden", *call, "--out", str(tmp_path / "golden.json")]) == 3
    assert said in capsys.readouterr().err


def test_nobody_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["golden", "http://127.0.0.1:1", "--out", str(tmp_path / "golden.json")]) == 2
    assert "no usable answer from http://127.0.0.1:1" in capsys.readouterr().err


def test_a_running_engine_is_asked_without_what_scenarios_need(tmp_path: Path) -> None:
    code = (
        "import sys; from harness.cli import main; "
        f"main(['golden', 'http://127.0.0.1:1', '--out', {str(tmp_path / 'golden.json')!r}]); "
        "print([name for name in ('numpy', 'docker', 'locust', 'gevent', 'pytest', 'jinja2') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]"
