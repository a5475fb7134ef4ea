"""A missing resource skips with its reason, and fails where it is required, also when it is found missing late."""

from __future__ import annotations

from pathlib import Path

import pytest

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
    ("required", "outcome"), [("", "skipped"), ("gpu", "skipped"), ("docker", "failed"), ("image", "failed")]
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
