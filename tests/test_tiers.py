"""A missing resource skips with its reason, and fails where it is required, also when it is found missing late."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from harness.errors import RESOURCES

pytest_plugins = "pytester"
ROOT = Path(__file__).parent.parent
SUITE = """
import pytest
from harness.errors import EnvironmentMissing

@pytest.fixture(scope="module")
def image():
    raise EnvironmentMissing("image", "it could not be built")

def test_in_a_fixture(image): ...

def test_in_the_test():
    raise EnvironmentMissing("image", "it could not be built")
"""


@pytest.mark.parametrize(
    ("required", "outcome"),
    [("", "skipped"), ("gpu", "skipped"), ("docker", "failed"), ("image", "failed"), ("gpu, image", "failed")],
)
def test_image_that_cannot_be_built_is_decided_by_what_is_required(
    pytester: pytest.Pytester, required: str, outcome: str
) -> None:
    pytester.makeconftest((ROOT / "conftest.py").read_text())
    pytester.makepyfile(SUITE)
    done = pytester.runpytest_subprocess("-p", "no:locust", "-rs", f"--require={required}")
    counts = done.parseoutcomes()
    assert counts.get(outcome, 0) + (counts.get("errors", 0) if outcome == "failed" else 0) == 2
    done.stdout.fnmatch_lines(["*image is not available: it could not be built*"])


def test_what_nothing_can_lack_cannot_be_required(pytester: pytest.Pytester) -> None:
    pytester.makeconftest((ROOT / "conftest.py").read_text())
    pytester.makepyfile(SUITE)
    done = pytester.runpytest_subprocess("-p", "no:locust", "--require=docker,imgae")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines(['*nothing is called "imgae" that could be required; known: *docker*image*'])


def test_everything_that_can_be_missing_can_be_required() -> None:
    trees = (ast.parse(path.read_text()) for path in (ROOT / "harness").rglob("*.py"))
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    raised = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "EnvironmentMissing"]
    named = {call.args[0].value for call in raised if isinstance(call.args[0], ast.Constant)}
    assert len(named) >= 8
    assert named <= set(RESOURCES)
