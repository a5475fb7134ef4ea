"""Whether tokenizer.json is JSON and its ids have embeddings: simdjson says what Python's JSON reader says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from harness.checkpoint.side_file import parse_object, read_small
from harness.errors import CheckpointDefect
from harness.guards.token_ids import LARGE_BYTES, _quick_ids, id_beyond, id_without_embedding, largest_token_id

needs_simdjson = pytest.mark.skipif(sys.version_info >= (3, 14), reason="simdjson is not installed on Python 3.14")


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
    assert id_beyond(raw, rows) == beyond


@pytest.mark.parametrize(
    "raw",
    [b"", b"[]", b"3", b"{", b'{"a": 1,}', b"{'a': 1}", b"\xff{}", b'{"a": "\xc3"}', b"{}\0", b"{} {}", b"[" * 99_999],
)
def test_what_is_no_object_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        id_beyond(raw, 10)


def test_it_also_works_in_a_python_without_simdjson(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "simdjson", None)
    assert _quick_ids(tokenizer({"a": 9})) is None
    assert id_beyond(tokenizer({"a": 99}), 10) == 99
    assert id_beyond(tokenizer({"a": 9}), 10) is None
    with pytest.raises(ValueError, match="Expecting"):
        id_beyond(b"{", 10)


@needs_simdjson
@pytest.mark.parametrize(
    ("raw", "ids"),
    [
        (tokenizer({"a": 3, "b": 9}, [{"id": 12}, {"content": "x"}]), [12, 9]),
        (tokenizer([["a", -1.5]] * 11), [10]),
        (tokenizer({}), [-1]),
        (b"{}", [-1]),
        (b'{"model": {"vocab": {"a": 3}}, "model": {"vocab": {"a": 5}}}', None),
        (b'{"model": {"vocab": {"a": 3}, "vocab": {"a": 5}}}', None),
        (b'{"added_tokens": [{"id": 3, "id": 5}]}', None),
        (tokenizer({"a": 3}).replace(b"{", b'{"x": 1, "x": 2, ', 1), [3]),
        (tokenizer({"a": "many"}), None),
        (tokenizer({"a": 1, "b": None}), None),
        (tokenizer({"a": [1]}), None),
        (b'{"model": 3}', None),
        (b'{"added_tokens": [3]}', None),
        (b'{"model": {"vocab": {"a": 99999999999999999999}}}', None),
        (b" {}", None),
    ],
)
def test_what_it_sees_is_never_smaller_than_the_largest_id(raw: bytes, ids: list[int] | None) -> None:
    assert _quick_ids(raw) == ids
    largest = largest_token_id(parse_object(raw))
    assert ids is None or largest is None or max(ids) >= largest


@needs_simdjson
def test_python_is_not_asked_about_a_tokenizer_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("harness.guards.token_ids.parse_object", lambda raw: asked.append(raw) or {})
    assert id_beyond(tokenizer({"a": 9}), 10) is None
    assert not asked
    id_beyond(tokenizer({"a": 10}), 10)
    assert len(asked) == 1


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
    if _quick_ids(raw) is not None:
        parse_object(raw)
    try:
        expected = largest_token_id(parse_object(raw))
    except ValueError:
        with pytest.raises(ValueError, match=r".+"):
            id_beyond(raw, 20)
        return
    assert id_beyond(raw, 20) == (expected if expected is not None and expected >= 20 else None)


def test_a_text_made_to_fill_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="values enough for"):
        parse_object(b'{"a":[' + b"[0]," * 1_000_000 + b"0]}")


MEASURED = """
import resource, sys
from harness.guards.token_ids import id_beyond
raw = b'{"a":[' + b"0," * (int(sys.argv[1]) // 2) + b"0]}"
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    id_beyond(raw, 10)
except ValueError:
    pass
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.parametrize("size_bytes", [LARGE_BYTES - 100, LARGE_BYTES + 100, 50_000_000])
def test_a_text_made_for_simdjson_takes_no_more_memory_than_any_header(size_bytes: int) -> None:
    done = subprocess.run([sys.executable, "-c", MEASURED, str(size_bytes)], capture_output=True, text=True, check=True)
    assert 0 <= int(done.stdout) <= 100_000_000 + 10 * size_bytes


def test_a_file_that_grows_while_it_is_read_is_read_to_its_end() -> None:
    assert read_small(Path("/proc/version")).startswith(b"Linux")  # it has no size


def test_why_it_cannot_be_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointDefect, match="no such file"):
        id_without_embedding(tmp_path / "tokenizer.json", 10)
    (tmp_path / "tokenizer.json").write_bytes(tokenizer({"a": 99}))
    assert id_without_embedding(tmp_path / "tokenizer.json", 10) == 99
