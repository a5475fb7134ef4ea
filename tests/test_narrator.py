"""What is told while a scenario is played, line by line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from harness.narrator import narrator
from harness.observe.history import Event, EventKind, Recorder

ABOUT = {"incarnation": "old-1", "how": "adapter", "call_ns": [0, 1], "calls": [], "weights": {}, "update": {}}


def recorded(directory: Path, kind: EventKind, **data: Any) -> Event:
    recorder = Recorder(directory / "history.jsonl")
    try:
        recorder.event("operator", kind, **data)
        (event,) = recorder.snapshot().of(kind)
    finally:
        recorder.close()
    return event


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
    narrator(lines.append, "some", "guarded")(
        recorded(tmp_path, EventKind.RELOAD_ENDED, was_answered=True, **ABOUT, **data)
    )
    assert [re.sub(r"^some \[guarded\] +[0-9.]+ s  ", "", line) for line in lines] == [told]


def test_what_a_guard_did_is_told(tmp_path: Path) -> None:
    lines: list[str] = []
    event = recorded(tmp_path, EventKind.GUARD_ACTED, guard="purge_cache", did="removed 3 segments")
    narrator(lines.append, "some", "guarded")(event)
    assert lines[0].endswith("s  guard purge_cache: removed 3 segments")


def test_a_reader_who_has_gone_ends_nothing(tmp_path: Path) -> None:
    """As with `harness run | head -1`: the scenario goes on, and its history has what was not read."""
    asked: list[str] = []

    def gone(line: str) -> None:
        asked.append(line)
        raise BrokenPipeError

    narrator(gone, "some", "guarded")(recorded(tmp_path, EventKind.REMEDY_STARTED, what="restart"))
    assert len(asked) == 1
