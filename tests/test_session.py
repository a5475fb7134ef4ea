"""`harness run` is a success only where something was run."""

from __future__ import annotations

from pathlib import Path

from tests.suites import RUN_LIMIT_S, start

SKIPS = """import pytest

@pytest.mark.core
def test_needs_what_is_not_here(rollout_run):
    pytest.skip("an engine in a container has ports of its own")
"""


def test_a_run_whose_tests_all_skipped_themselves_is_no_success(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "test_skips.py").write_text(SKIPS)
    process = start(["run", "rollouts", "--engine", "reference"], scratch=tmp_path / "scratch", cwd=tmp_path)
    said, _ = process.communicate(timeout=RUN_LIMIT_S)
    assert process.returncode == 3, said
    assert "nothing was run" in said
