"""Minutes of coverage-guided mutation: whatever becomes of headers and JSON, pre-flight names it, in bounded memory.

In a child process, since a finding of libFuzzer ends the process. What is planted must end a run: else nothing was tried.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness.checkpoint import models
from harness.faults.rows import ROWS

PROGRAM = Path(__file__).with_name("fuzz_preflight.py")
FUZZ_S = 120  # each of headers and JSON
PLANTED_LIMIT_S = 60
INPUT_LIMIT_S = 20
RUNS_MIN = 1000  # a machine that does less is not fuzzing: one input takes milliseconds

both = pytest.mark.parametrize("what", ["headers", "json"])
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("atheris") is None:
        pytest.skip('the package "atheris" is not installed: install the extra "fuzz"')
    source = models.tiny_llama(hidden=8, heads=2, kv_heads=1, layers=1, intermediate=8, vocabulary=259)
    return source.build(tmp_path_factory.mktemp("cache"))


def fuzzed(what: str, sound: Path, place: Path, *more: str, limit_s: int) -> subprocess.CompletedProcess[str]:
    """Fuzz for so long, or until something is found."""
    command = [sys.executable, PROGRAM, what, sound, ",".join(ROWS), *more]
    libfuzzer = [
        f"-max_total_time={limit_s}",
        f"-timeout={INPUT_LIMIT_S}",
        "-rss_limit_mb=0",  # the program limits its memory itself
        "-seed=1",
        f"-artifact_prefix={place}/",
    ]
    return subprocess.run([*command, *libfuzzer], capture_output=True, text=True, timeout=limit_s + 120, check=False)


@both
def test_whatever_mutation_makes_is_named(what: str, sound: Path, tmp_path: Path) -> None:
    done = fuzzed(what, sound, tmp_path, limit_s=FUZZ_S)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    runs = re.search(r"Done (\d+) (?:runs )?in", done.stderr)
    assert runs is not None, done.stderr[-2000:]
    assert int(runs[1]) >= RUNS_MIN
    assert not list(tmp_path.iterdir()), "an input was kept although nothing was found"


@both
@pytest.mark.parametrize(
    ("planted", "said"),
    [("traceback", "KeyError: 'planted'"), ("unnamed", 'the unknown id "X00"'), ("memory", "MemoryError")],
)
def test_what_is_planted_ends_a_run(what: str, planted: str, said: str, sound: Path, tmp_path: Path) -> None:
    done = fuzzed(what, sound, tmp_path, "--plant", planted, limit_s=PLANTED_LIMIT_S)
    assert done.returncode != 0, done.stderr[-2000:]
    assert said in done.stdout + done.stderr
    assert list(tmp_path.glob("crash-*")), "the input that did it is kept"
