"""A copied comparison is recognised by its blocks, named, and counted once."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from harness import cli
from harness.judge.blocks import Block, load_blocks, load_declaration
from harness.judge.comparison import judge_blocks
from harness.judge.copies import copies_among
from harness.judge.paired import Slower
from tests.judge.measured import blocks, declaration, noisy
from tests.judge.stored import store_comparison


def told(prefix: str, count: int) -> list[Block]:
    return [replace(block, digest=f"{prefix}{n}") for n, block in enumerate(blocks(noisy(0.3, count // 2)))]


def test_what_shares_blocks_is_a_copy_of_the_one_that_has_more() -> None:
    whole, other = told("a", 16), told("b", 16)
    assert copies_among({"one": whole, "two": other}) == {}
    assert copies_among({"early": whole[:8], "one": whole, "again": whole, "two": other}) == {
        "early": "one",
        "again": "one",
    }
    assert copies_among({"mixed": [*whole[:2], *other[2:16]], "one": whole}) == {"one": "mixed"}
    assert copies_among({"one": [], "two": []}) == {}  # invalid before the first block


def test_block_that_stands_twice_in_one_comparison_voids_it() -> None:
    made = told("a", 8)
    assert judge_blocks(declaration(), made).answer is Slower.YES
    twice = judge_blocks(declaration(), [*made[:6], replace(made[6], digest="a0"), made[7]])
    assert twice.answer is Slower.INVALID
    assert "block 006-new is a copy of block 000-old" in twice.because


def test_copy_is_named_and_counted_once_by_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    store_comparison(tmp_path / "one", factor=1.3, pairs=8, profile="screen", name="one")
    # The same blocks under another name would confirm what they say themselves.
    shutil.copytree(tmp_path / "one", tmp_path / "again")
    declared = json.loads((tmp_path / "again/comparison.json").read_text())
    changed = {"name": "again", "profile": "confirm", "confirms": "one"}
    (tmp_path / "again/comparison.json").write_text(json.dumps(declared | changed))
    assert cli.main(["verdict", "one", "again"]) == 2
    output = capsys.readouterr().out
    assert '"again" has blocks of "one": it is a copy of it and counts no second time' in output
    assert "slower in the screening, not confirmed yet" in output
    assert not (tmp_path / "again/verdict.json").exists()
    store_comparison(tmp_path / "other", factor=1.3, pairs=16, profile="confirm", name="other", confirms="one")
    assert cli.main(["verdict", "one", "other"]) == 1
    assert "slower twice" in capsys.readouterr().out


def test_digest_is_of_the_times_and_not_of_the_place(tmp_path: Path) -> None:
    for name in ("one", "two"):
        store_comparison(tmp_path / name, factor=1.0, pairs=1)
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    one, two, copy = (
        [block.digest for block in load_blocks(tmp_path / name, load_declaration(tmp_path / name))]
        for name in ("one", "two", "copy")
    )
    assert one == copy
    assert not set(one) & set(two)
    assert len(set(one)) == 2
