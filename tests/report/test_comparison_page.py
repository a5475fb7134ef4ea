"""The page of a comparison: it says the answer first, shows every metric, and what is hostile in it stays text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from harness import cli
from harness.judge.blocks import KEY_FIELDS, Arm, Block
from harness.judge.canaries import Canaries
from harness.judge.comparison import judge_blocks
from harness.report.comparison import render_comparison, write_comparison
from tests.judge.measured import blocks, declaration, failing_gate, noisy, with_failures
from tests.judge.stored import store_comparison
from tests.report.test_html import HOSTILE, Page, squeezed

SLOW, FAST = noisy(0.3, 16), noisy(0.0, 16)


def page_of(made: list[Block], **declared: Any) -> Page:
    comparison = judge_blocks(declaration(**declared), made)
    return Page(render_comparison(comparison, made))


@pytest.mark.parametrize(
    ("made", "headline"),
    [
        (blocks(SLOW[:4]), "Slower by more than 5%, or failing more"),
        (blocks(FAST[:4]), "Not slower by more than 5%"),
        (blocks(noisy(0.05, 16)), "Undecided: slower by more than 5% or not"),
        ([], "Invalid: nothing can be said"),
    ],
)
def test_it_says_the_answer_first_and_how_to_read_it(made: list[Block], headline: str) -> None:
    page = page_of(made)
    words = squeezed(page.words)
    assert page.open == []
    assert headline in words
    assert words.index(headline) < words.index("Metrics")
    assert "How to read it" in words
    assert ("mallest effect that could have been found" in words) is bool(made)


def test_every_metric_has_effect_interval_spread_and_what_could_be_found() -> None:
    made = [
        replace(b, canaries=Canaries(asked=2, right=2, wrong=0, difference_max=0, tolerance=1e-3))
        for b in blocks(SLOW[:4])
    ]
    made = with_failures(made, "new", reset=3)
    made += blocks(noisy(0.0, 3), is_null=True, first=8)
    words = squeezed(page_of(made).words)
    seen = judge_blocks(declaration(), made).reported["ttft_ms_p50"]
    for figure in (seen.effect, seen.low, seen.high, seen.detectable):
        assert f"{figure:+.1%}" in words
    assert f"{seen.pair_sd:.1%}" in words
    for said in ("12 reset", "8 right, 0 wrong of 8", "1.10 times", "Negative control", "old, started again"):
        assert said in words


def test_failed_gates_come_first_and_name_their_block() -> None:
    made = [replace(b, gates=(failing_gate(),)) if b.number == 1 else b for b in blocks(SLOW[:5])]
    assert "lag_ms_p99 9 5 001-new 1 blocks" in squeezed(page_of(made).words)


def test_pairs_are_drawn_with_the_margin_and_one_without_a_value_is_a_cross() -> None:
    made = [replace(b, values=dict.fromkeys(b.values, float("inf"))) if b.number == 3 else b for b in blocks(SLOW[:5])]
    comparison = judge_blocks(declaration(), made)
    text = render_comparison(comparison, made)
    pictures = re.findall(r"<svg.*?</svg>", text, flags=re.S)
    assert len(pictures) == 2
    assert pictures[0].count("h0") == 4  # one dot per pair that has a value
    assert 'class="failed"' in pictures[0]
    assert "margin +5%" in pictures[0]
    assert "5 pairs by ttft_ms_p50: in 4 the new side is slower" in pictures[0]


def test_hostile_words_stay_text() -> None:
    key = {name: f"{name} {HOSTILE}" for name in KEY_FIELDS}
    made = [replace(b, notes=(HOSTILE,), schedule_sha256=HOSTILE) for b in blocks(SLOW[:4])]
    declared = {"name": HOSTILE, "command": HOSTILE, "started_at": HOSTILE, "problems": (HOSTILE,)}
    comparison = judge_blocks(declaration(**declared, arms=tuple(Arm(name=n, key=key) for n in ("old", "new"))), made)
    text = render_comparison(comparison, made)
    page = Page(text)
    assert not {"script", "img"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert "alert" in page.words
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e]", text)
    assert "default-src 'none'" in text


def test_tables_have_scoped_headings_and_ids_are_used_once() -> None:
    text = render_comparison(judge_blocks(declaration(), blocks(SLOW[:4])), blocks(SLOW[:4]))
    assert len(re.findall(r"<th\b", text)) == len(re.findall(r"<th scope=", text))
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    for target in re.findall(r'aria-labelledby="([^"]+)"', text):
        assert set(target.split()) <= set(ids)


@pytest.mark.parametrize(
    ("factor", "pairs", "tag"), [(1.3, 4, "failure"), (1.0, 4, None), (1.0, 2, "error")], ids=["yes", "no", "invalid"]
)
def test_verdict_command_makes_page_and_junit_anew(
    tmp_path: Path, factor: float, pairs: int, tag: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    store_comparison(run, factor=factor, pairs=pairs)
    cli.main(["verdict", str(run)])
    capsys.readouterr()
    assert "How to read it" in (run / "report.html").read_text(encoding="utf-8")
    case = ElementTree.parse(run / "junit.xml").getroot().find("testsuite/testcase")
    assert case is not None
    assert [child.tag for child in case if child.tag != "properties"] == ([tag] if tag else [])
    told: Mapping[str, Any] = json.loads((run / "verdict.json").read_text())
    assert len(told["differences"]["ttft_ms_p50"]) == pairs


def test_page_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    made = blocks(SLOW[:4])
    write_comparison(tmp_path, judge_blocks(declaration(), made), made)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["junit.xml", "report.html", "verdict.json"]
