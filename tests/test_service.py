"""What is recorded of an engine that is stopped."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.observe.history import EventKind, Recorder
from harness.service import Service


@pytest.mark.parametrize(
    ("was", "code", "is_named"),
    [
        (None, -signal.SIGKILL, True),
        (None, 0, False),
        (None, -signal.SIGTERM, False),
        (-signal.SIGKILL, -signal.SIGKILL, False),
    ],
    ids=["killed", "ended", "by SIGTERM", "was dead"],
)
def test_an_engine_that_had_to_be_killed_is_named(tmp_path: Path, was: int | None, code: int, is_named: bool) -> None:
    recorder = Recorder(tmp_path / "history.jsonl")
    engine: Any = SimpleNamespace(incarnation="old-1", exit_code=lambda: was, stop=lambda: code)
    ground: Any = SimpleNamespace(recorder=recorder)
    Service(ground, _engines=[engine], serving=engine).stop(engine, how="remedy")
    recorder.close()
    [stopped] = recorder.snapshot().of(EventKind.ENGINE_STOPPED)
    assert stopped.data["exit_code"] == code
    assert stopped.data["took_s"] >= 0
    assert ("was killed after" in stopped.data["because"]) is is_named
