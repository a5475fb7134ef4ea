"""A driver that is broken is a missing GPU with a reason, not a traceback: it skips, and fails where a GPU is required."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest_plugins = "pytester"
ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(("required", "outcome"), [("", "skipped"), ("gpu", "errors")])
def test_a_tool_of_the_driver_that_cannot_be_run_is_a_missing_gpu(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, required: str, outcome: str
) -> None:
    tool = pytester.mkdir("bin") / "nvidia-smi"
    tool.write_text("half of a file")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=os.pathsep)
    pytester.makeconftest((ROOT / "conftest.py").read_text())
    pytester.makepyfile("import pytest\n\n@pytest.mark.gpu\ndef test_on_a_gpu(): ...\n")
    done = pytester.runpytest_subprocess("-p", "no:locust", "-rs", f"--require={required}")
    done.assert_outcomes(**{outcome: 1})
    done.stdout.fnmatch_lines(["*nvidia-smi does not answer: *Exec format error*"])
    assert "subprocess.py" not in done.stdout.str()
