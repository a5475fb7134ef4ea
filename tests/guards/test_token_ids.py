"""Whether tokenizer.json is JSON and its ids have embeddings: the quick way says what Python's JSON reader says."""

from __future__ import annotations

import json
import sqlite3
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from harness.checkpoint.survey import parse_object, read_small
from harness.errors import CheckpointDefect
from harness.guards.token_ids import (
    LISTS_MAX,
    Tokenizer,
    _is_utf_8,
    _list_or_number_from,
    _may_be_beyond,
    largest_token_id,
    tokenizer_of,
)


def id_without_embedding(raw: bytes, rows: int | None) -> int | None:
    with closing(Tokenizer(raw)) as text:
        return text.id_without_embedding(rows)


def tokenizer(vocabulary: object, added: object = ()) -> bytes:
    return json.dumps({"added_tokens": added, "model": {"vocab": vocabulary}}, ensure_ascii=False).encode()


@pytest.mark.parametrize(
    ("raw", "rows", "beyond"),
    [
        (tokenizer({"a": 0, "b": 9}), 10, None),
        (tokenizer({"a": 0, "b": 10}), 10, 10),
        (tokenizer({"a": 0}, [{"id": 12, "content": "<s>"}]), 10, 12),
        (tokenizer([["a", -1.5]] * 11), 10, 10),
        (tokenizer([["a", -1.5]] * 10), 10, None),
        (tokenizer({"a": 0, '": 9999': 3, ":77": 4}), 10, None),
        (tokenizer({"ü": 99}), 10, 99),
        (json.dumps({"truncation": {"max_length": 512}, "model": {"vocab": {"a": 1}}}).encode(), 10, None),
        (json.dumps({"model": {"vocab": {"a": 99}}}, indent=2).replace(": ", ":\n").encode(), 10, 99),
        (tokenizer({"a": 99}), None, None),
        (b"{}", 10, None),
        (tokenizer({"a": 1.0e9, "b": True, "c": "77", "d": None}), 10, None),
        (tokenizer({"a": 0}), 0, 0),
        (tokenizer({"a": 99}), 10**400, None),
        (tokenizer({"a": 10**401}), 10**400, 10**401),
        (tokenizer({"a": 10**9}), 10**9 + 1, None),
        (tokenizer([["a", -1.5]] * 11).replace(b'"vocab":', b'"vocab"\n:\t'), 10, 10),
        (tokenizer([["a", -1.5]] * 11).replace(b'"vocab":', b'"vocab"' + b" " * 99 + b":"), 10, 10),
        (tokenizer([["a", -1.5]] * 11).replace(b'"vocab":', b'"v\\u006fcab":'), 10, 10),
        (tokenizer({"a": 1}, [{"x": [1]}] * 2000), 10, None),
        (tokenizer([["a"]] * 11, [{"x": [1]}] * 2000), 10, 10),
        (tokenizer({"a": 1, "vocab": 2}).replace(b"{", b'{"pre": {"vocab": [1, 2]}, ', 1), 2, 2),
    ],
)
def test_ids_without_a_row_are_found(raw: bytes, rows: int | None, beyond: int | None) -> None:
    assert id_without_embedding(raw, rows) == beyond


@pytest.mark.parametrize(
    "raw",
    [b"", b"[]", b"3", b"{", b'{"a": 1,}', b"{'a': 1}", b"\xff{}", b'{"a": "\xc3"}', b"{}\0", b"{} {}", b"[" * 99_999],
)
def test_what_is_no_object_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        id_without_embedding(raw, 10)


def test_it_also_works_in_a_python_without_sqlite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sqlite3", None)
    assert id_without_embedding(tokenizer({"a": 99}), 10) == 99
    assert id_without_embedding(tokenizer({"a": 9}), 10) is None
    with pytest.raises(ValueError, match="Expecting"):
        id_without_embedding(b"{", 10)


@given(smallest=st.integers(1, 10**7), number=st.integers(0, 10**8))
@example(smallest=99, number=100)
@example(smallest=109, number=110)
def test_the_search_finds_exactly_the_numbers_from_the_smallest_on(smallest: int, number: int) -> None:
    found = _list_or_number_from(smallest).search(f'{{"a": {number}}}'.encode())
    assert (found is not None) == (number >= smallest)


TEXT = json.dumps(
    {"model": {"vocab": {'é\\"': 5, "\n": 31}, "merges": [["a", "b"]], "x": [1.5e3, None, True, -0]}}, indent=1
)


@settings(max_examples=500, deadline=None)
@given(
    at=st.integers(0, len(TEXT)),
    put=st.one_of(st.binary(max_size=3), st.sampled_from([b",", b"'", b"//", b"+1", b"0x1"])),
    cut=st.integers(0, 4),
)
@example(at=0, put=b"\xef\xbb\xbf", cut=0)
def test_what_the_quick_reader_accepts_is_json(at: int, put: bytes, cut: int) -> None:
    raw = TEXT.encode()
    raw = raw[:at] + put + raw[at + cut :]
    with closing(Tokenizer(raw)) as text:
        if text.is_surely_json() and _is_utf_8(raw):
            parse_object(raw)
    try:
        expected = largest_token_id(parse_object(raw))
    except ValueError:
        with pytest.raises(ValueError, match=r".+"):
            id_without_embedding(raw, 20)
        return
    assert id_without_embedding(raw, 20) == (expected if expected is not None and expected >= 20 else None)


def test_a_text_made_to_fill_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="values enough for"):
        parse_object(b'{"a":[' + b"[0]," * 1_000_000 + b"0]}")


def test_it_is_read_in_a_thread_that_ends_with_the_block(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(tokenizer({str(number): number for number in range(50_000)}))
    before = threading.active_count()
    with tokenizer_of(tmp_path) as text:
        assert text.id_without_embedding(50_000) is None
        assert text.id_without_embedding(49_999) == 49_999
    with pytest.raises(ZeroDivisionError), tokenizer_of(tmp_path) as text:
        _ = 1 / 0  # nobody asks: then nobody waits until it has been read
    assert threading.active_count() == before
    assert text._connection is not None
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        text._connection.execute("SELECT 1")


def test_many_lists_and_rows_beyond_measure_are_left_to_python() -> None:
    assert not _may_be_beyond(b'{"a":[]' + b',"a":[]' * (LISTS_MAX - 1) + b"}", 10)
    assert _may_be_beyond(b'{"a":[]' + b',"a":[]' * LISTS_MAX + b"}", 10)
    assert id_without_embedding(tokenizer({"a": 10**9}), 10**4000) is None


def test_a_file_that_grows_while_it_is_read_is_read_to_its_end() -> None:
    assert read_small(Path("/proc/version")).startswith(b"Linux")  # it has no size


def test_why_it_cannot_be_read_is_said_to_whoever_asks(tmp_path: Path) -> None:
    with tokenizer_of(tmp_path) as text, pytest.raises(CheckpointDefect, match="no such file"):
        text.id_without_embedding(10)
