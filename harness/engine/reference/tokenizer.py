"""Turn token ids into text, and simple text into token ids, from a `tokenizer.json`.

Decoding follows the file. Encoding is exact for word-level vocabularies; for byte-level BPE the text is split into
words by an approximation of the usual rules, so whoever needs exact prompts sends token ids.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from harness.errors import CheckpointDefect

TOKENIZER_ABSENT = "tokenizer_absent"
TOKENIZER_INVALID = "tokenizer_invalid"
TOKENIZER_BEYOND_VOCABULARY = "tokenizer_beyond_vocabulary"

_FILE = "tokenizer.json"
_WORDS = re.compile(r" ?[^\W\d_]+| ?\d| ?[^\s\w]+| ?_+|\s+(?!\S)|\s+")


class NotEncodable(ValueError):
    """A text holds something that the vocabulary has no token for."""


def _byte_symbols() -> dict[str, int]:
    """Return the printable stand-in that byte-level vocabularies use for each of the 256 bytes."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    symbols = {chr(byte): byte for byte in plain}
    symbols.update({chr(256 + number): byte for number, byte in enumerate(others)})
    return symbols


@dataclass(frozen=True)
class Tokenizer:
    """A vocabulary with the little that is needed to use it."""

    ids: dict[str, int]
    special_ids: frozenset[int]
    merges: dict[tuple[str, str], int] = field(default_factory=dict)
    is_byte_level: bool = False
    unknown_id: int | None = None

    @classmethod
    def read(cls, directory: Path, *, vocabulary: int, allow_beyond: bool = False) -> Tokenizer:
        """Read `tokenizer.json`.

        Raises: CheckpointDefect when it is absent, is no tokenizer, or has ids beyond the embedding.
        """
        path = directory / _FILE
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            tokenizer = cls._from(document)
        except FileNotFoundError:
            raise CheckpointDefect(TOKENIZER_ABSENT, "no such file", path=path) from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            what = f"{type(error).__name__}: {str(error)[:200]}"
            raise CheckpointDefect(TOKENIZER_INVALID, what, path=path) from None
        beyond = sorted((token, text) for text, token in tokenizer.ids.items() if not 0 <= token < vocabulary)
        if beyond and not allow_beyond:
            what = f"{len(beyond)} ids do not fit a vocabulary of {vocabulary}, the first is {beyond[0][0]} ({beyond[0][1]!r})"
            raise CheckpointDefect(TOKENIZER_BEYOND_VOCABULARY, what, path=path)
        return tokenizer

    @classmethod
    def _from(cls, document: Any) -> Tokenizer:
        model = document["model"]
        vocabulary = model["vocab"]
        if isinstance(vocabulary, list):
            vocabulary = {text: number for number, (text, _) in enumerate(vocabulary)}
        ids = {str(text): int(token) for text, token in vocabulary.items()}
        added = document.get("added_tokens") or []
        ids.update({str(token["content"]): int(token["id"]) for token in added})
        pairs = [
            tuple(pair.split(" ", 1)) if isinstance(pair, str) else tuple(pair) for pair in model.get("merges", [])
        ]
        return cls(
            ids=ids,
            special_ids=frozenset(int(token["id"]) for token in added if token.get("special")),
            merges={(left, right): rank for rank, (left, right) in enumerate(pairs)},
            is_byte_level="ByteLevel" in json.dumps([document.get("pre_tokenizer"), document.get("decoder")]),
            unknown_id=ids.get(str(model.get("unk_token"))),
        )

    @cached_property
    def _texts(self) -> dict[int, str]:
        return {token: text for text, token in self.ids.items()}

    @cached_property
    def _bytes(self) -> dict[str, int]:
        return _byte_symbols()

    def decoded(self, token: int) -> str:
        """Return one token as it is shown beside its logprob; nothing for a part of a character, as vLLM does."""
        text = self.piece(token, is_shown=True).decode("utf-8", "replace")
        return "" if text.endswith("\ufffd") else text

    def piece(self, token: int, *, is_shown: bool = False) -> bytes:
        """Return what a token adds to a text; special tokens add nothing unless shown alone."""
        text = self._texts.get(token, "")
        if token in self.special_ids:
            return text.encode() if is_shown else b""
        if self.is_byte_level:
            return b"".join(
                bytes((self._bytes[symbol],)) if symbol in self._bytes else symbol.encode() for symbol in text
            )
        return text.encode() if is_shown else b" " + text.encode()

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text.

        Raises: NotEncodable naming the first part without a token.
        """
        tokens: list[int] = []
        if not self.is_byte_level:
            for word in text.split():
                tokens.append(self._id(word))
            return tokens
        symbols = {byte: symbol for symbol, byte in self._bytes.items()}
        for word in _WORDS.findall(text):
            parts = [symbols[byte] for byte in word.encode()]
            tokens.extend(self._id(part) for part in self._merged(parts))
        return tokens

    def _id(self, part: str) -> int:
        token = self.ids.get(part, self.unknown_id)
        if token is None:
            raise NotEncodable(f"no token for {part!r}; send token ids")
        return token

    def _merged(self, parts: list[str]) -> list[str]:
        while len(parts) > 1:
            ranks = [self.merges.get((left, right)) for left, right in pairwise(parts)]
            found = [(rank, place) for place, rank in enumerate(ranks) if rank is not None]
            if not found:
                break
            _, place = min(found)
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
        return parts
