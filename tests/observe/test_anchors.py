"""Fixed words of patterns: whatever matches holds one of them, so no line is overlooked for want of words."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.observe.anchors import anchors
from harness.observe.signatures import SIGNATURES, WEAK_SIGNATURES, Signature

ROWS = (*SIGNATURES, *WEAK_SIGNATURES)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("abc", {"abc"}),
        ("abc|de", {"abc", "de"}),
        ("abc.{0,9}defg", {"defg"}),
        (r"ab\.c\d+de", {"ab.c"}),
        ("x?abc", {"abc"}),
        ("abc*d", {"ab"}),
        ("abc+d", {"abc"}),
        ("(one|three)", {"one", "three"}),
        ("(one|t) four", {" four"}),
        ("(one)?two", {"two"}),
        (r"\bSIG(SEGV|BUS)\b", {"SIG"}),
        ("[Aa]ddress", {"ddress"}),
        ("!{8,}", {"!" * 8}),
        (r"^Killed$", {"Killed"}),
    ],
)
def test_words_of_a_pattern(pattern: str, words: set[str]) -> None:
    assert anchors(pattern) == words


@pytest.mark.parametrize("pattern", [r"\d+", "a?", "abc|.*", "(abc)?", "(?!abc)d", "a|", "abc)"])
def test_a_pattern_without_words_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"fixed words|plain groups"):
        anchors(pattern)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.pattern.pattern[:40])
def test_every_match_of_a_row_holds_one_of_its_words(row: Signature) -> None:
    @settings(max_examples=20, deadline=None)
    @given(st.from_regex(row.pattern))
    def check(line: str) -> None:
        found = row.pattern.search(line)
        assert found is not None
        assert any(word in found.group() for word in row.words)

    check()
