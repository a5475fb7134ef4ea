"""Whether the ids of a tokenizer.json have embeddings. It may be the largest file that pre-flight reads: 34 MB for some models.

Building it with Python's JSON reader would take most of pre-flight's time and memory. So the JSON reader of SQLite, which
comes with Python, says whether the text is JSON at all, while a search looks for a number that may be too large an id.
Python's reader decides whenever one of them has doubts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from threading import Thread
from typing import TYPE_CHECKING, Any

from harness.checkpoint.survey import parse_object

if TYPE_CHECKING:
    from sqlite3 import Connection

IS_JSON = "SELECT json_valid(CAST(? AS TEXT))"
VOCABULARY, LIST_BEGINS = b'"vocab"', re.compile(rb"\s*+:\s*+\[")


def id_without_embedding(raw: bytes, rows: int | None) -> int | None:
    """Return the largest id that a tokenizer.json can produce if there is no row of embeddings for it, else None.

    Raises: ValueError with the reason when it is no JSON object.
    """
    with _said_by_sqlite(raw) as answer:
        in_doubt = not _is_utf_8(raw) or (
            rows is not None and (rows < 1 or _has_list_vocabulary(raw) or _number_from(rows).search(raw))
        )
    if answer == [True] and not in_doubt:
        return None
    largest = largest_token_id(parse_object(raw))
    return largest if largest is not None and rows is not None and largest >= rows else None


def largest_token_id(tokenizer: Mapping[str, Any]) -> int | None:
    """Return the largest id that a tokenizer.json can produce; None when it holds no vocabulary that is understood."""
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids: list[int] = []
    if isinstance(vocabulary, dict):
        ids += [number for number in vocabulary.values() if type(number) is int]
    elif isinstance(vocabulary, list) and vocabulary:
        ids.append(len(vocabulary) - 1)
    added = tokenizer.get("added_tokens")
    for token in added if isinstance(added, list) else []:
        if isinstance(token, dict) and type(token.get("id")) is int:
            ids.append(token["id"])
    return max(ids, default=None)


@contextmanager
def _said_by_sqlite(raw: bytes) -> Iterator[list[bool]]:
    """Have SQLite read a text meanwhile; at the end the list holds True if it is a JSON object, of UTF-8 or not."""
    answer: list[bool] = []
    is_text = raw[:1] == b"{" and b"\0" not in raw  # SQLite would end there
    connection = _sqlite() if is_text else None
    if connection is None:
        yield answer
        return

    def read() -> None:
        with suppress(Exception):  # then Python's reader decides
            (is_valid,) = connection.execute(IS_JSON, (raw,)).fetchone()
            answer.append(is_valid == 1)

    thread = Thread(target=read, name="tokenizer.json")
    thread.start()
    try:
        yield answer
    finally:
        thread.join()
        connection.close()


def _sqlite() -> Connection | None:
    """Return a connection that has the statement prepared: then the thread that uses it gives way at once."""
    try:
        import sqlite3
    except ImportError:  # some Pythons are built without it
        return None
    connection = sqlite3.connect(":memory:", check_same_thread=False)
    try:
        connection.execute(IS_JSON, (b"{}",)).fetchone()
    except sqlite3.Error:  # some SQLites without JSON
        connection.close()
        return None
    return connection


def _has_list_vocabulary(raw: bytes) -> bool:
    at = raw.find(VOCABULARY)
    while at >= 0:
        if LIST_BEGINS.match(raw, at + len(VOCABULARY)):
            return True
        at = raw.find(VOCABULARY, at + 1)
    return False


def _is_utf_8(raw: bytes) -> bool:
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _number_from(smallest: int) -> re.Pattern[bytes]:
    """Return a pattern for numbers of at least `smallest` as values in a JSON object."""
    digits = str(max(1, smallest))
    larger = [rf"{digits}", rf"[1-9]\d{{{len(digits)},}}"]
    for place, digit in enumerate(digits):
        if digit != "9":
            larger.append(rf"{digits[:place]}[{int(digit) + 1}-9]\d{{{len(digits) - place - 1}}}")
    return re.compile(rf":\s*+(?:{'|'.join(larger)})".encode())
