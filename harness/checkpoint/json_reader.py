"""Walk over a JSON text without building it: as strict as the JSON reader of the safetensors library, in constant memory.

Python's own reader makes an object of every value, thirty bytes for one byte of a text made for that.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from json import decoder
from typing import Any

MAX_DEPTH = 127  # how deep the library lets containers nest
MAX_UNSIGNED = 2**64 - 1
SURELY_FINITE_DIGITS = 18

# reads a string from behind its opening quote, returns it and the position behind the closing one
READ_STRING: Callable[[str, int, bool], tuple[str, int]] = decoder.scanstring  # type: ignore[attr-defined]
SPACE = re.compile(r"[ \t\n\r]*+")
SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*+)(\.[0-9]++)?([eE][+-]?[0-9]++)?|true|false|null")


class JsonReader:
    """A position in a JSON text; every method reads one thing and moves behind it.

    Raises everywhere: ValueError saying what is wrong and at which character.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self._depth = 0
        self._has_escapes = "\\u" in text

    def peek(self) -> str:
        """Return the next character that is not space, without moving behind it; empty at the end."""
        match = SPACE.match(self.text, self.position)
        if match is not None:
            self.position = match.end()
        return self.text[self.position : self.position + 1]

    def expect(self, character: str) -> None:
        """Read one character."""
        if self.peek() != character:
            raise self._wrong(f"expected {character!r}")
        self.position += 1

    def string(self) -> str:
        """Read a string; a lone surrogate is refused, as the library does."""
        self.expect('"')
        value, self.position = READ_STRING(self.text, self.position, True)
        if self._has_escapes:
            value.encode("utf-8")
        return value

    def members(self) -> Iterator[str]:
        """Read an object and yield each name; whoever asks for the next one has read the value before."""
        self._enter("{")
        if self.peek() != "}":
            while True:
                name = self.string()
                self.expect(":")
                yield name
                if self.peek() != ",":
                    break
                self.position += 1
        self._leave("}")

    def items(self) -> Iterator[int]:
        """Read an array and yield the number of each item; whoever asks for the next one has read the item before."""
        self._enter("[")
        number = 0
        if self.peek() != "]":
            while True:
                yield number
                number += 1
                if self.peek() != ",":
                    break
                self.position += 1
        self._leave("]")

    def skip(self) -> None:
        """Read one value of any kind and keep nothing of it."""
        character = self.peek()
        if character == '"':
            self.string()
        elif character == "{":
            for _ in self.members():
                self.skip()
        elif character == "[":
            for _ in self.items():
                self.skip()
        else:
            self._scalar()

    def value(self, *, limit_characters: int) -> Any:
        """Read one value and return it, an object as a tuple of pairs; what is longer than the limit is returned as None."""
        self.peek()
        begin = self.position
        self.skip()
        if self.position - begin > limit_characters:
            return None
        return json.loads(
            self.text[begin : self.position], object_pairs_hook=tuple, parse_int=_integer, parse_float=_finite
        )

    def end(self) -> None:
        """Make sure that nothing but space follows."""
        if self.peek():
            raise self._wrong("expected the end")

    def _scalar(self) -> None:
        match = SCALAR.match(self.text, self.position)
        if match is None:
            raise self._wrong("expected a value")
        begin, self.position = match.span()
        if match[2] or self.position - begin > SURELY_FINITE_DIGITS:
            (_finite if match[1] or match[2] else _integer)(match[0])

    def _enter(self, bracket: str) -> None:
        self.expect(bracket)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._wrong("nested too deeply")

    def _leave(self, bracket: str) -> None:
        self.expect(bracket)
        self._depth -= 1

    def _wrong(self, what: str) -> ValueError:
        return ValueError(f"{what} at character {self.position:,}")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError("number out of range")
    return value


def _integer(text: str) -> int | float:
    value = -0.0 if text == "-0" else int(text)
    return value if -(2**63) <= value <= MAX_UNSIGNED else _finite(text)
