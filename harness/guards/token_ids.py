"""Whether the ids of a tokenizer.json have embeddings. It may be the largest file that pre-flight reads: 34 MB for some models.

Building it with Python's JSON reader would take most of pre-flight's time and memory. So the JSON reader of SQLite, which
comes with Python, says whether the text is JSON at all, in a thread, while weights and config are looked at; after that a
search looks for a number that may be too large an id. Python's reader decides whenever one of them has doubts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

from harness.checkpoint.survey import parse_object, read_small
from harness.errors import CheckpointDefect

if TYPE_CHECKING:
    from sqlite3 import Connection

IS_JSON = "SELECT json_valid(CAST(? AS TEXT))"
VOCABULARY = b'"vocab"'
NAME_BYTES = 24  # before its colon, with space between them that no writer puts there
LISTS_MAX = 1000  # a tokenizer.json has a dozen
NUMBER_MAX = 10**9  # no vocabulary is as large, and the pattern stays short


class Tokenizer:
    """The text of a tokenizer.json, or why it cannot be read; SQLite reads the text until it is asked about, or closed."""

    def __init__(self, text: bytes | CheckpointDefect | ValueError) -> None:
        self._text = text
        self._is_json = False
        self._thread: Thread | None = None
        self._connection: Connection | None = None
        if isinstance(text, bytes) and text[:1] == b"{" and b"\0" not in text:  # SQLite would end there
            self._connection = _sqlite()
        if self._connection is not None:
            self._thread = Thread(target=self._read, args=(self._connection,), name="tokenizer.json")
            self._thread.start()

    def id_without_embedding(self, rows: int | None) -> int | None:
        """Return the largest id that it can produce if there is no row of embeddings for it, else None.

        Raises: CheckpointDefect when it cannot be read; ValueError with the reason when it is no JSON object.
        """
        if not isinstance(self._text, bytes):
            raise self._text
        in_doubt = not _is_utf_8(self._text) or (rows is not None and _may_be_beyond(self._text, rows))
        if not in_doubt and self.is_surely_json():
            return None
        largest = largest_token_id(parse_object(self._text))
        return largest if largest is not None and rows is not None and largest >= rows else None

    def is_surely_json(self) -> bool:
        """Wait for SQLite to say whether it is a JSON object, be it of UTF-8 or not; False where nobody could be asked."""
        if self._thread is not None:
            self._thread.join()
        return self._is_json

    def close(self) -> None:
        """End the reading."""
        if self._connection is not None:
            with suppress(Exception):  # one that has ended already
                self._connection.interrupt()
            self.is_surely_json()
            self._connection.close()

    def _read(self, connection: Connection) -> None:
        with suppress(Exception):  # then Python's reader decides
            (is_valid,) = connection.execute(IS_JSON, (self._text,)).fetchone()
            self._is_json = is_valid == 1


@contextmanager
def tokenizer_of(path: Path) -> Iterator[Tokenizer]:
    """Begin to read the tokenizer.json of a checkpoint; whoever asks about it gets what is wrong with it, if anything."""
    try:
        tokenizer = Tokenizer(read_small(path / "tokenizer.json"))
    except (CheckpointDefect, ValueError) as error:
        tokenizer = Tokenizer(error)
    try:
        yield tokenizer
    finally:
        tokenizer.close()


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


def _may_be_beyond(raw: bytes, rows: int) -> bool:
    """Say whether a JSON text may hold an id for which there is no row: as a number, or as an item of a vocabulary that is a list."""
    if rows < 1:
        return True
    for lists, match in enumerate(_list_or_number_from(min(rows, NUMBER_MAX)).finditer(raw)):
        if match[0][-1:] != b"[" or lists == LISTS_MAX:
            return True
        name = raw[max(0, match.start() - NAME_BYTES) : match.start()].rstrip()
        if name.endswith(VOCABULARY) or b"\\" in name or not name:  # a name may be spelled with escapes
            return True
    return False


def _is_utf_8(raw: bytes) -> bool:
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _list_or_number_from(smallest: int) -> re.Pattern[bytes]:
    """Return a pattern for lists, and for numbers of at least `smallest`, as values in a JSON object."""
    digits = str(smallest)
    return re.compile(rf":\s*+(?:\[|[1-9]\d{{{len(digits)}}}|{_at_least(digits)})".encode())


def _at_least(digits: str) -> str:
    """Return a pattern for numbers of as many digits that are not smaller."""
    first, rest = digits[0], digits[1:]
    alike = first + (_at_least(rest) if rest else "")
    return alike if first == "9" else rf"(?:[{int(first) + 1}-9]\d{{{len(rest)}}}|{alike})"
