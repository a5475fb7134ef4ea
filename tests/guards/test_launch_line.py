"""The engine's arguments are found in whatever an operator has, and nothing of it is executed."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import UsageError
from harness.guards.launch import launch_of
from harness.guards.launch_line import line_in, line_of, read_line
from harness.guards.releases import newest

SCRIPT = r"""#!/bin/sh
# starts the engine; "not closed
set -e
export VLLM_LOGGING_LEVEL=DEBUG   # no; yes
echo "vllm serve is next"
HF_HUB_OFFLINE=1 exec /opt/venv/bin/vllm serve /models/live \
    --dtype bfloat16 --served-model-name a#b "two words" \
    --hf-overrides '{"rope_theta": 1e6, "x": "y # z; w"}' \
    --tensor-parallel-size $(nproc) --port "$PORT" >/var/log/vllm.log 2>&1 &
wait
"""


def test_a_script_that_starts_the_engine(tmp_path: Path) -> None:
    (tmp_path / "start.sh").write_text(SCRIPT)
    line = read_line(tmp_path / "start.sh")
    assert line.is_serve
    assert dict(line.variables) == {"VLLM_LOGGING_LEVEL": "DEBUG", "HF_HUB_OFFLINE": "1"}
    assert line.arguments == (
        "/models/live",
        "--dtype",
        "bfloat16",
        "--served-model-name",
        "a#b",
        "two words",
        "--hf-overrides",
        '{"rope_theta": 1e6, "x": "y # z; w"}',
        "--tensor-parallel-size",
        "$(...)",
        "--port",
        "$PORT",
    )


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("vllm serve /m --dtype half", ("/m", "--dtype", "half")),
        ("--dtype half", ("--dtype", "half")),
        ("serve /m", ("/m",)),
        ("python3 -m vllm.entrypoints.openai.api_server --model m", ("--model", "m")),
        ("docker run --gpus all image vllm serve m -tp 4 | tee log", ("m", "-tp", "4")),
        ("vllm serve m --a 'it''s' \\\n  --b \"x\\\"y\"", ("m", "--a", "its", "--b", 'x"y')),
        ("vllm serve m\r\nvllm serve n", ("m",)),
        ("sleep 5; vllm serve m && true", ("m",)),
    ],
)
def test_lines(text: str, arguments: tuple[str, ...]) -> None:
    assert line_in(text).arguments == arguments


def test_words_as_they_come_from_the_command_line() -> None:
    assert line_of([]).arguments == ()
    assert line_of(["vllm", "serve", "m", "--x", "a b"]).arguments == ("m", "--x", "a b")
    assert line_of(["vllm serve m --dtype half"]).arguments == ("m", "--dtype", "half")
    assert line_of(["A=1", "vllm", "serve", "m"]).variables == (("A", "1"),)


@pytest.mark.parametrize("text", ["vllm serve 'm", "", "a; b", "# only a comment", "vllm serve m \\"])
def test_what_is_no_launch_is_said_so(text: str) -> None:
    with pytest.raises(UsageError, match="launch text"):
        line_in(text)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent", Path("/dev/zero"), Path("\0")):
        with pytest.raises(UsageError, match=r"is not a file|cannot be read"):
            read_line(path)
    (tmp_path / "long").write_bytes(b"#" * (1024 * 1024 + 1))
    with pytest.raises(UsageError, match="longer than"):
        read_line(tmp_path / "long")


@given(st.text(max_size=80), st.lists(st.text(max_size=12), max_size=8))
def test_any_text_gives_a_launch_or_a_sentence(text: str, words: list[str]) -> None:
    for read in (lambda: line_in(f"vllm serve {text}"), lambda: line_in(text), lambda: line_of(words)):
        with contextlib.suppress(UsageError):
            assert launch_of(read(), newest()).release == newest()


def test_options_in_a_yaml_file_come_before_those_on_the_line(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    file = tmp_path / "serve.yaml"
    file.write_text(
        "dtype: float16\nenforce-eager: true\nenable-prefix-caching: false\nhf-overrides: {rope_theta: 5}\n"
    )
    launch = launch_of(line_of(["vllm", "serve", "/m", "--config", str(file), "-tp", "2"]), newest())
    assert (launch.text("--dtype"), launch.model, launch.number("--tensor-parallel-size")) == ("float16", "/m", 2)
    assert launch.flags == {"--enforce-eager": True, "--enable-prefix-caching": False}
    assert launch.json("--hf-overrides") == {"rope_theta": 5}
    assert (launch.problems, launch.unchecked) == ([], [])
    later = launch_of(line_of(["--config", str(file), "--dtype", "half"]), newest())
    assert later.text("--dtype") == "half"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "no such file"),
        ("- a\n", "holds no options"),
        ("a: &x [1]\nb: *x\n", "aliases"),
        ("a: [\n", "not read"),
        ("[" * 5000, "not read"),
    ],
)
def test_a_yaml_file_that_cannot_be_used_is_named(tmp_path: Path, content: str | None, reason: str) -> None:
    pytest.importorskip("yaml")
    file = tmp_path / "serve.yaml"
    if content is not None:
        file.write_text(content)
    launch = launch_of(line_of(["--config", str(file)]), newest())
    (said,) = launch.unchecked
    assert str(file) in said
    assert reason in said


def test_config_with_an_equals_sign_is_not_read_by_the_engine() -> None:
    launch = launch_of(line_of(["--config=serve.yaml"]), newest())
    (problem,) = launch.problems
    assert (problem.id, problem.severity) == ("L01", "silent")


def test_values_that_a_shell_would_put_in_are_not_guessed() -> None:
    launch = launch_of(line_of(["-tp", "$TP", "--dtype", "$DTYPE", "--max-model-len", "${LEN}"]), newest())
    assert launch.problems == []
    assert (launch.number("--tensor-parallel-size", 1), launch.text("--dtype")) == (None, None)
    assert any("$" in what for what in launch.unchecked)
