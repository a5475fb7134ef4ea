"""`harness explain`: real logs, logs of other things, and logs that were made to hurt."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tracemalloc
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import cli
from harness.explain import LINE_BYTES_MAX, bounded_lines, explain
from harness.observe.logs import classify

LOGS = Path(__file__).parent / "observe" / "logs"
NEGATIVE = Path(__file__).parent / "observe" / "negative"
LIMIT_S = 60.0


def tell(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["explain", *arguments])
    told = capsys.readouterr()
    return code, told.out, told.err


@pytest.mark.parametrize(
    ("log", "kind", "words"),
    [
        ("truncated", "file; D01", "incomplete metadata"),
        ("wider", "load; D07, C02", "The size of tensor a"),
        ("tokenizer_absent", "file; D19, C12", "Couldn't instantiate the backend tokenizer"),
        ("big_tokenizer", "request; C09", "index out of range in self"),
        ("argparse", "config; L01", "invalid choice: 'fp16'"),
    ],
)
def test_a_real_log_is_explained(log: str, kind: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = LOGS / f"{log}.log"
    code, output, _ = tell(capsys, str(path))
    number = int(output.split(",", 2)[1].split()[1])
    assert code == 1
    assert output.startswith("cause, line ")
    assert kind in output.splitlines()[0]
    assert words in output.splitlines()[1]
    assert words in path.read_text(encoding="utf-8").split("\n")[number - 1]
    assert output.splitlines()[2].endswith(".")


def test_json_names_the_cause_and_counts_every_kind(capsys: pytest.CaptureFixture[str]) -> None:
    code, output, _ = tell(capsys, str(LOGS / "big_tokenizer.log"), "--json")
    told = json.loads(output)
    assert code == 1
    assert told["cause"]["class"] == "request"
    assert told["cause"]["fault_ids"] == ["C09"]
    counts = {(line["class"], line["weight"]): line["count"] for line in told["lines"]}
    assert counts["request", "error"] == 3


def test_a_healthy_log_and_one_of_other_things_have_no_cause(capsys: pytest.CaptureFixture[str]) -> None:
    assert tell(capsys, str(LOGS / "good.log"))[:2] == (
        0,
        "no line of this log names a failure. That is no pass: many faults that serve wrong answers leave nothing in a log.\n",
    )
    assert "worth knowing:" in tell(capsys, str(LOGS / "good.log"), "--all")[1]
    for corpus in NEGATIVE.glob("*.log"):
        code, output, _ = tell(capsys, str(corpus), "--all")
        assert code == 0
        assert output.startswith("nothing in this log is known. That is no pass")


def test_a_failure_without_a_known_cause_is_unknown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log").write_text("RuntimeError: Engine core initialization failed. See root cause above.\n")
    code, output, _ = tell(capsys, str(tmp_path / "log"))
    assert code == 2
    assert "no line that is known says why" in output


@pytest.mark.parametrize(
    ("log", "shown"),
    [
        (
            "Traceback (most recent call last):\n  f()\nRuntimeError: failed to allocate memory for it\n",
            "line 3:\n  Runtime",
        ),
        (
            "(W pid=1) ERROR 11-30 01:58:12 [x.py:1] our_plugin.ShapeError: [1, 2]\n",
            "line 1:\n  our_plugin.ShapeError: [1, 2]",
        ),
        ("RuntimeError: a\nEngine core initialization failed.\n", "line 1:\n  RuntimeError: a"),
    ],
)
def test_an_exception_that_is_not_known_is_shown_and_is_no_pass(
    log: str, shown: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log").write_text(log)
    code, output, _ = tell(capsys, str(tmp_path / "log"))
    assert code == 2
    assert f"the last exception that it names, {shown}" in output
    told = json.loads(tell(capsys, str(tmp_path / "log"), "--json")[1])
    assert told["unknown_exception"]["text"] in log


@pytest.mark.parametrize(
    "log",
    [
        "WARNING 11-30 01:58:12 [x.py:1] RuntimeError: tried, and went on\n",
        "INFO 11-30 01:58:12 [x.py:1] Received request 1: prompt: 'ValueError: what is that'\n",
        "    raise ValueError: not the line itself\n",
        "the words ValueError: in a sentence\n",
        "(A pid=1) INFO 11-30 01:58:12 [x.py:1] [shutdown] API server received signal=15\nRuntimeError: cancelled\n",
    ],
)
def test_what_only_speaks_of_an_exception_is_none(log: str) -> None:
    explanation = explain(log.splitlines())
    assert (explanation.raised, explanation.exit_code) == (None, 0)


def test_an_exception_that_is_known_is_not_shown_as_unknown() -> None:
    explanation = explain(["RuntimeError: Engine core initialization failed. See root cause above."])
    assert (explanation.raised, explanation.exit_code) == (None, 2)
    assert explain(["RuntimeError: what", "KeyError: 'lm_head.weight'"]).exit_code == 1


def test_an_empty_log_says_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Such as that of a unit whose name was mistyped."""
    (tmp_path / "log").touch()
    code, output, _ = tell(capsys, str(tmp_path / "log"))
    assert (code, output) == (2, "the log is empty: nothing was read, so nothing can be said.\n")


def test_a_log_comes_through_a_pipe() -> None:
    text = (
        "Nov 30 01:58:12 gpu-1 vllm[9]: (EngineCore pid=9) ERROR 11-30 01:58:12 [x.py:1] KeyError: 'lm_head.weight'\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "harness.cli", "explain", "-"],
        input=text,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout.startswith("cause, line 1 (load; C04):\n  KeyError: 'lm_head.weight'\n")


@pytest.mark.parametrize("path", ["absent.log", "."])
def test_a_log_that_cannot_be_read_is_one_sentence(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, output, errors = tell(capsys, path)
    assert (code, output) == (3, "")
    assert f'the log "{path}" cannot be read' in errors
    assert errors.count("\n") == 1


def test_what_a_log_holds_cannot_steer_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log").write_text("KeyError: 'lm_head.weight' \x9b2J \u202e \x1b]0;title\x07\n")
    output = tell(capsys, str(tmp_path / "log"))[1]
    assert all(character.isprintable() for line in output.splitlines() for character in line)


class Endless(io.RawIOBase):
    """A log of this many bytes that is made while it is read."""

    def __init__(self, piece: bytes, size_bytes: int) -> None:
        self.piece = piece
        self.left = size_bytes

    def read(self, size: int = -1) -> bytes:
        taken = min(size, self.left)
        self.left -= taken
        return (self.piece * (taken // len(self.piece) + 1))[:taken]


@pytest.mark.parametrize(
    "piece",
    [b"x", b"\0", b"\n", b"INFO 11-30 01:58:51 [x.py:1] ready\n", b"KeyError: 'lm_head.weight'\n", bytes(range(256))],
    ids=["one line", "zeros", "empty lines", "lines", "errors", "binary"],
)
def test_memory_does_not_grow_with_the_log(piece: bytes) -> None:
    size = 16 * 2**20 if piece in (b"x", b"\0") else 2**18
    tracemalloc.start()
    try:
        explanation = explain(bounded_lines(Endless(piece, size)))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # One chunk of line feeds is a list of 65,536 empty lines, which is the most that is held at a time.
    assert peak < 5 * 2**20
    assert len(explanation.seen) == (1 if b"KeyError" in piece else 0)


@settings(deadline=None)
@given(
    pieces=st.lists(st.sampled_from([b"a", b"\n", b"KeyError: 'x'\n", b"\xff\xfe", b"y" * 9000, "\u20ac".encode()])),
    chunk_bytes=st.integers(1, 40_000),
)
def test_lines_are_the_same_however_they_are_read(pieces: list[bytes], chunk_bytes: int) -> None:
    log = b"".join(pieces)

    class Dripping(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            return super().read(chunk_bytes)

    lines = [line[:LINE_BYTES_MAX].decode("utf-8", "replace") for line in log.split(b"\n")]
    assert list(bounded_lines(Dripping(log))) == (lines if lines[-1] else lines[:-1])


HOSTILE = (
    "Model architectures " * 200,
    "Attempted to load weight " * 200,
    "loading tensor of shape into parameter " * 200,
    "KeyError: '" * 400,
    "LoRA rank " + "9" * 4000,
    "start (" * 500,
    "!" * 7 + " " + ("!" * 7 + " ") * 500,
    "a-" * 2000 + "Warning: ",
    "(" * 4000,
    "(a " * 1500,
    "[pod/" * 800,
    "a.b-" * 1000 + "| ",
    " " * 4000 + "|",
    "\x1b[" + "0;" * 2000,
    "INFO 01-01 00:00:00 [" + "a" * 4000,
    "Request " + "x" * 4000,
    "Weight cache daemon at " * 200,
    "2026-11-30T01:58:12Z " + "a" * 2000 + " " + "b" * 2000,
)


def test_lines_made_to_hurt_take_no_time_to_speak_of() -> None:
    """A pattern that backtracks without end would run into the limit of the child."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from test_explain import HOSTILE; from harness.observe.logs import classify\n"
        "for _ in range(20): classify('\\n'.join(HOSTILE))\n"
    )
    subprocess.run([sys.executable, "-c", code, str(Path(__file__).parent)], check=True, timeout=LIMIT_S)


def test_random_bytes_are_harmless() -> None:
    noise = Random(5).randbytes(200_000)
    assert explain(bounded_lines(io.BytesIO(noise))).cause is None
    assert classify(noise.decode("latin-1")) == ()


UNKNOWN = "FooKernelError: no kernel image"
KNOWN_NOTE = "(EngineCore pid=2) ERROR RuntimeError: Engine core initialization failed. See root cause above."
STOPPING = "(APIServer pid=7) INFO 11-30 19:48:11 [launcher.py:1] [shutdown] API server: received signal=15"
STARTING = (
    "(APIServer pid=7) INFO 11-30 19:47:48 [api_utils.py:286] non-default args: {'model_tag': '/checkpoints/live'}"
)


def test_an_unknown_exception_is_shown_though_a_known_one_follows() -> None:
    explanation = explain([UNKNOWN, KNOWN_NOTE, KNOWN_NOTE])
    assert explanation.raised is not None
    assert (explanation.raised.number, explanation.exit_code) == (1, 2)


def test_what_an_engine_that_starts_after_a_stop_raises_is_no_part_of_the_stop() -> None:
    assert explain([STARTING, STOPPING, UNKNOWN]).exit_code == 0
    explanation = explain([STARTING, STOPPING, STARTING, UNKNOWN])
    assert explanation.raised is not None
    assert (explanation.raised.number, explanation.exit_code) == (4, 2)


def test_empty_lines_alone_are_no_log() -> None:
    assert explain(["", "  "]).exit_code == 2
