"""`harness expectations measure`: what an engine said is shown, and steers no terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness import cli
from harness.recording import Measured

HOSTILE = "it said \x1b]0;title\x07 \u202e"


def test_what_an_engine_said_cannot_steer_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(*_: object, tell: Any, **__: object) -> Measured:
        tell(f"missing: startup: {HOSTILE}")
        return Measured(label="reference-1.0", made=1, failed=(("missing", HOSTILE),))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("harness.recording.measure_starts", measured)
    assert cli.main(["expectations", "measure", "--engine", "reference"]) == 2
    told = capsys.readouterr()
    assert "startup: it said " in told.out
    assert "missing: it said " in told.err
    assert all(line.isprintable() for text in told for line in text.splitlines())
