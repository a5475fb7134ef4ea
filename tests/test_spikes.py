"""A rollout whose load was not what was planned says nothing about the spike of rollouts."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import cli
from tests.test_compare import store_rollouts


@pytest.mark.parametrize(
    ("lag_ms", "code", "said"),
    [
        ("0.1", 0, "no: the peak of a rollout is 1.0"),
        ("900.0", 2, "invalid: 3 rollouts are there, at least 4 are needed"),
    ],
    ids=["as planned", "started late"],
)
def test_only_rollouts_under_the_planned_load_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lag_ms: str, code: int, said: str
) -> None:
    for number, during_ms in enumerate((101.0, 103.0, 102.0, 104.0)):
        store_rollouts(tmp_path / f"run-{number}", during_ms)
    late = tmp_path / "run-3" / "scenarios" / "rolled_out-unguarded" / "history.jsonl"
    late.write_text(late.read_text().replace('"lag_ms_p99": 0.1', f'"lag_ms_p99": {lag_ms}'))
    seen = cli.main(["verdict", *(str(tmp_path / f"run-{number}") for number in range(4))])
    told = capsys.readouterr().out
    assert seen == code, told
    assert said in told
    assert ("counts for nothing: the load was not what was planned" in told) is (code == 2)
