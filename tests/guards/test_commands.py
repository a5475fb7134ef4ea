"""The guards as an operator calls them: what they print, what they change and how they end."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from harness.checkpoint import models
from harness.cli import GUARDS, SUMMARIES, main
from harness.guards.canary import Golden
from harness.guards.publish_lock import locked

PROMPTS = ((1, 5, 6), (1, 7))
OLD = ((-1.0, -2.0), (-3.0,))
NEW = ((-1.5, -2.0), (-3.0,))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.tiny_llama(hidden=32, intermediate=48).build(tmp_path_factory.mktemp("cache"))


class Server(HTTPServer):
    """Answers every canary with the same logprobs, and keeps what it was asked."""

    rows: tuple[tuple[float, ...], ...] | None = OLD
    asked: list[tuple[str, str | None, Any]]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer({"data": [{"id": "served"}]}, None)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.rows is None:
            self._answer({"choices": [{"index": 0}, {"index": 1}]}, asked)
            return
        choices = [
            {
                "index": index,
                "prompt_logprobs": [
                    None,
                    *({str(token): {"logprob": value}} for token, value in zip(prompt[1:], row, strict=True)),
                ],
            }
            for index, (prompt, row) in enumerate(zip(PROMPTS, self.server.rows, strict=True))
        ]
        self._answer({"choices": choices}, asked)

    def _answer(self, content: Any, asked: Any) -> None:
        self.server.asked.append((self.path, self.headers["Authorization"], asked))
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server(("127.0.0.1", 0), Handler)
    made.asked = []
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield made
    finally:
        made.shutdown()
        thread.join(timeout=10)
        made.server_close()


@pytest.fixture
def goldens(tmp_path: Path) -> dict[str, Path]:
    old = Golden(
        weights_id="w-old",
        engine="reference-1.0",
        build="0",
        hardware="cpu",
        flags=("auto", "256"),
        prompts=PROMPTS,
        prompt_logprobs=OLD,
        noise_max=0.0,
        noise_checks=20,
        tolerance=0.01,
    )
    made = {
        "old": old,
        "new": dataclasses.replace(old, weights_id="w-new", prompt_logprobs=NEW),
        "twin": dataclasses.replace(old, weights_id="w-twin", prompt_logprobs=((-1.005, -2.0), (-3.0,))),
        "other_prompts": dataclasses.replace(old, prompts=((1, 2, 3), (4, 5))),
    }
    for name, golden in made.items():
        golden.save(tmp_path / f"{name}.json")
    return {name: tmp_path / f"{name}.json" for name in made}


def ask(server: Server, *more: object) -> int:
    return main(["canary", f"http://127.0.0.1:{server.server_port}", *map(str, more)])


# publish and rollback


def test_publish_and_rollback(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "models"
    assert main(["publish", str(checkpoint), str(root)]) == 0
    assert "is now version 1" in (printed := capsys.readouterr().out)
    assert "before: nothing" in printed
    assert main(["publish", str(checkpoint), str(root), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    copied = said.pop("copied")
    assert said == {
        "live": str(root / "live"),
        "version": 2,
        "path": str(root / "versions" / "2"),
        "previous": 1,
        "previous_path": str(root / "versions" / "1"),
    }
    assert copied["files"] == len(list(checkpoint.iterdir()))
    assert copied["reflinked_bytes"] + copied["copied_bytes"] == sum(f.stat().st_size for f in checkpoint.iterdir())
    assert copied["linked_bytes"] == 0
    assert os.readlink(root / "live") == "versions/2"
    assert main(["rollback", str(root)]) == 0
    assert "is now version 1" in (printed := capsys.readouterr().out)
    assert "before: version 2" in printed
    assert os.readlink(root / "live") == "versions/1"


def test_publish_keeps_as_many_versions_as_asked(checkpoint: Path, tmp_path: Path) -> None:
    for _ in range(3):
        assert main(["publish", str(checkpoint), str(tmp_path), "--name", "served", "--keep", "2"]) == 0
    assert {path.name for path in (tmp_path / "versions").iterdir()} == {"2", "3"}
    assert os.readlink(tmp_path / "served") == "versions/3"


def test_publish_into_a_directory_that_stays_one(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "live").mkdir()
    (tmp_path / "live" / "precious").touch()
    assert main(["publish", str(checkpoint), str(tmp_path), "--exchange"]) == 0
    assert f'before: version 0 ("{tmp_path}/versions/0")' in capsys.readouterr().out
    assert not (tmp_path / "live").is_symlink()
    assert main(["rollback", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["version"] == 0
    assert (tmp_path / "live" / "precious").exists()


def test_the_danger_of_hard_links_is_named(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["publish", str(checkpoint), str(tmp_path), "--link"]) == 0
    printed = capsys.readouterr()
    assert "bytes by hard link" in printed.out
    assert "writes into the live checkpoint" in printed.err
    assert ended(["publish", "--help"]) == 0
    assert "writes into the live checkpoint" in " ".join(capsys.readouterr().out.split())


def test_another_publish_is_waited_for_or_refused_by_name(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with locked(tmp_path, limit_s=0):
        (tmp_path / "versions").mkdir()
        for command in (["publish", str(checkpoint), str(tmp_path)], ["rollback", str(tmp_path)]):
            assert main([*command, "--wait", "0"]) == 2
            assert f"is being published to by process {os.getpid()} on" in capsys.readouterr().err
        for wrong in ("-1", "soon", "nan", "inf"):
            assert ended(["publish", str(checkpoint), str(tmp_path), "--wait", wrong]) == 3
    assert main(["publish", str(checkpoint), str(tmp_path), "--wait", "0"]) == 0


def test_nothing_to_roll_back_to(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["publish", str(checkpoint), str(tmp_path)]) == 0
    assert main(["rollback", str(tmp_path)]) == 3
    assert capsys.readouterr().err.startswith("harness: no version before 1 is kept")
    assert os.readlink(tmp_path / "live") == "versions/1"


def test_a_real_directory_is_never_replaced(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "live").mkdir()
    (tmp_path / "live" / "precious").touch()
    assert main(["publish", str(checkpoint), str(tmp_path)]) == 3
    assert "is a real directory, not a link" in capsys.readouterr().err
    assert (tmp_path / "live" / "precious").exists()


# canary


def test_the_golden_s_answer_is_recognised(
    server: Server, goldens: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY_OF_TEST", "secret")
    assert ask(server, "--golden", goldens["old"], "--api-key-env", "KEY_OF_TEST") == 0
    assert capsys.readouterr().out.startswith(
        "the golden's checkpoint answered; largest difference in prompt logprobs: 0"
    )
    (listed, completed) = server.asked
    assert listed[:2] == ("/v1/models", "Bearer secret")
    assert completed[:2] == ("/v1/completions", "Bearer secret")
    assert completed[2]["model"] == "served"
    assert completed[2]["prompt"] == [list(prompt) for prompt in PROMPTS]


def test_a_named_model_is_asked_once(server: Server, goldens: dict[str, Path]) -> None:
    assert ask(server, "--golden", goldens["old"], "--model", "mine") == 0
    assert [(path, asked["model"]) for path, _, asked in server.asked] == [("/v1/completions", "mine")]


def test_another_answer_is_told_apart(
    server: Server, goldens: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    server.rows = NEW
    assert ask(server, "--golden", goldens["old"]) == 1
    assert capsys.readouterr().out.startswith("another checkpoint answered")
    assert ask(server, "--golden", goldens["old"], "--golden-new", goldens["new"]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("the other checkpoint answered")
    assert "0.5 from w-old, 0 from w-new" in printed
    server.rows = ((-1.2, -2.0), (-3.0,))
    assert ask(server, "--golden", goldens["old"], "--golden-new", goldens["new"]) == 1
    assert capsys.readouterr().out.startswith("neither known checkpoint answered")
    server.rows = OLD
    assert ask(server, "--golden", goldens["old"], "--golden-new", goldens["twin"]) == 1
    assert capsys.readouterr().out.startswith("the answer fits both checkpoints")


def test_canary_as_json(server: Server, goldens: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    server.rows = ((float("nan"), -2.0), (-3.0,))
    assert ask(server, "--golden", goldens["old"], "--golden-new", goldens["new"], "--json") == 1
    seen = json.loads(capsys.readouterr().out)
    assert seen["answer"] == "neither"
    assert seen["golden"] == {"weights_id": "w-old", "engine": "reference-1.0", "difference": None}
    server.rows = NEW
    assert ask(server, "--golden", goldens["old"], "--golden-new", goldens["new"], "--json") == 1
    assert json.loads(capsys.readouterr().out)["answer"] == "golden_new"
    assert ask(server, "--golden", goldens["old"], "--json") == 1
    seen = json.loads(capsys.readouterr().out)
    assert (seen["answer"], seen["golden"]["difference"]) == ("neither", 0.5)
    assert ask(server, "--golden", goldens["new"], "--json") == 0
    assert json.loads(capsys.readouterr().out)["answer"] == "golden"


def test_no_usable_answer(server: Server, goldens: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    server.rows = None
    assert ask(server, "--golden", goldens["old"]) == 2
    assert "no prompt logprobs" in capsys.readouterr().err
    assert main(["canary", "http://127.0.0.1:1", "--golden", str(goldens["old"]), "--limit-s", "2"]) == 2
    printed = capsys.readouterr()
    assert "no usable answer from http://127.0.0.1:1" in printed.err
    assert printed.out == ""


@pytest.mark.parametrize(
    ("url", "golden", "said"),
    [
        ("127.0.0.1:8000", "old", "is no address"),
        ("http://127.0.0.1:eight", "old", "is no address"),
        ("http://[", "old", "is no address"),
        ("http://127.0.0.1:1", "absent", "is not a golden file"),
    ],
)
def test_wrong_addresses_and_goldens(
    url: str, golden: str, said: str, goldens: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["canary", url, "--golden", str(tmp_path / f"{golden}.json")]) == 3
    assert said in capsys.readouterr().err


def test_goldens_of_other_prompts_are_refused(
    server: Server, goldens: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(server, "--golden", goldens["old"], "--golden-new", goldens["other_prompts"]) == 3
    assert "different prompts" in capsys.readouterr().err
    assert server.asked == []


# all of them


@pytest.mark.parametrize("name", sorted(GUARDS))
def test_help_and_wrong_calls(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended([name, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: harness {name}")
    assert ended([name, "--strange"]) == 3
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Traceback" not in printed.err


def ended(arguments: list[str]) -> int:
    """Return the exit code as a shell would see it."""
    try:
        return main(arguments)
    except SystemExit as end:
        return int(end.code or 0)


def test_every_guard_is_in_the_overview(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(["--help"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert set(SUMMARIES) == set(GUARDS)
    assert all(f"{name} {summary}" in printed for name, summary in SUMMARIES.items())


def test_guards_start_without_what_scenarios_need(checkpoint: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from harness.cli import main; "
        f"main(['publish', {str(checkpoint)!r}, {str(tmp_path)!r}]); main(['preflight', {str(checkpoint)!r}]); "
        "print([name for name in ('numpy', 'docker', 'locust', 'gevent', 'pytest', 'jinja2') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]"
