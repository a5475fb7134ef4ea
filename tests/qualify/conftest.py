"""Every test here has a suite of its own in an empty directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.qualify.asked import SUITE
from tests.suites import NO_DOCKER


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a suite of one scenario in an empty directory, without a Docker engine."""
    folder = tmp_path / "rollouts"
    folder.mkdir()
    (folder / "test_missing.py").write_text(SUITE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DOCKER_HOST", NO_DOCKER)
    return folder
