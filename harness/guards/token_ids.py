"""Whether the ids of a tokenizer.json have embeddings. It may be the largest file that pre-flight reads: 34 MB for some models.

Building it with Python's JSON reader would take most of pre-flight's time and memory. simdjson reads it in a twentieth of
the time and builds nothing; Python's reader decides wherever that one refuses, or sees an id without embedding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from harness.checkpoint.side_file import parse_object, read_small, refuse_made_for_memory

LARGE_BYTES = 8_000_000  # simdjson takes up to 16 times the size of a text that is made for that


def id_without_embedding(path: Path, rows: int | None) -> int | None:
    """Return the largest id that a tokenizer.json can produce if there is no row of embeddings for it, else None.

    Raises: CheckpointDefect when it cannot be read; ValueError with the reason when it is no JSON object.
    """
    return id_beyond(read_small(path), rows)


def id_beyond(raw: bytes, rows: int | None) -> int | None:
    """Return the same for the text of a tokenizer.json."""
    if len(raw) > LARGE_BYTES:
        refuse_made_for_memory(raw)
    quick = _quick_ids(raw)
    if quick is not None and (rows is None or max(quick) < rows):
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


def _quick_ids(raw: bytes) -> list[int] | None:
    """Return ids of which none is smaller than the largest one; None when Python's reader has to decide."""
    if raw[:1] != b"{":  # what may stand before it, only Python's reader knows
        return None
    try:
        import simdjson
    except ImportError:  # no wheel for this Python
        return None
    try:
        document = simdjson.Parser().parse(raw)
        ids = [
            int(number) for token in _only(document, "added_tokens", ()) if (number := _only(token, "id")) is not None
        ]
        vocabulary = _only(_only(document, "model", simdjson.Parser().parse(b"{}")), "vocab", ())
        if isinstance(vocabulary, simdjson.Object):
            values: Iterable[Any] = vocabulary.values()
            return [*ids, int(max(values, default=-1))]
        return [*ids, len(vocabulary) - 1]
    except (ValueError, TypeError, AttributeError, RuntimeError):  # not JSON, numbers too long, or another layout
        return None


def _only(parent: Any, name: str, default: Any = None) -> Any:
    """Return the value of that name, and refuse one that is there twice: Python takes the last, simdjson the first."""
    count = list(parent.keys()).count(name)
    if count > 1:
        raise ValueError(f"{name} is there {count} times")
    return parent[name] if count else default
