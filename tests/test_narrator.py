"""What is told while a scenario is played, line by line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from harness.narrator import narrator
from harness.observe.history import EventKind, Recorder

ABOUT = {"incarnation": "old-1", "how": "adapter", "call_ns": [0, 1], "calls": [], "weights": {}, "update": {}}


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({"succeeded": True, "because": ""}, "the adapter rollout of engine old-1 has ended"),
        (
            {"succeeded": False, "because": "load_lora_adapter answered 500: no"},
            "the adapter rollout of engine old-1 has ended: load_lora_adapter answered 500: no",
        ),
    ],
)
def test_an_exchange_in_a_running_engine_has_ended_and_why(tmp_path: Path, data: dict[str, Any], told: str) -> None:
    lines: list[str] = []
    recorder = Recorder(tmp_path / "history.jsonl")
    try:
        recorder.event("operator", EventKind.RELOAD_ENDED, was_answered=True, **ABOUT, **data)
        (event,) = recorder.snapshot().of(EventKind.RELOAD_ENDED)
    finally:
        recorder.close()
    narrator(lines.append, "some", "guarded")(event)
    assert [re.sub(r"^some \[guarded\] +[0-9.]+ s  ", "", line) for line in lines] == [told]
