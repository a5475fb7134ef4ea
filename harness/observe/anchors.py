"""The fixed words of a pattern: a line that holds none of them cannot match, and looking for words is fast.

Reads the part of the regular expression language that signatures use: literals, classes, groups, alternatives, quantifiers.
"""

from __future__ import annotations

import re

Words = frozenset[str]
_SPECIAL_ESCAPES = "dDwWsSbBAZ"
_QUANTIFIER = re.compile(r"[*+?]|\{(\d*)(?:,(\d*))?\}")


def anchors(pattern: str) -> Words:
    """Return words of which every match of the pattern holds at least one.

    Raises: ValueError when there are none, or the pattern is written in a way that is not understood.
    """
    words, end = _alternatives(pattern, 0)
    if end != len(pattern) or words is None:
        raise ValueError(f'pattern "{pattern}" has no fixed words: it would have to be tried on every line')
    return words


def _alternatives(pattern: str, start: int) -> tuple[Words | None, int]:
    """Read up to a closing bracket or the end: the words of all alternatives together, None if one has none."""
    found: list[Words | None] = []
    position = start
    while True:
        words, position = _sequence(pattern, position)
        found.append(words)
        if position >= len(pattern) or pattern[position] == ")":
            break
        position += 1  # "|"
    return (None if None in found else frozenset(word for words in found if words for word in words)), position


def _sequence(pattern: str, start: int) -> tuple[Words | None, int]:
    """Read one alternative and return the words of its part whose shortest word is longest."""
    candidates: list[Words] = []
    run = ""
    position = start
    while position < len(pattern) and pattern[position] not in "|)":
        literal, words, position = _atom(pattern, position)
        least, position = _quantifier(pattern, position)
        if literal is not None and least is None:
            run += literal
            continue
        if literal is not None and least:
            run += literal * least
        candidates.append(frozenset([run]))
        run = ""
        if words and (least is None or least):
            candidates.append(words)
    candidates.append(frozenset([run]))
    best = max(candidates, key=lambda words: min(len(word) for word in words))
    return (best if all(best) else None), position


def _atom(pattern: str, position: int) -> tuple[str | None, Words | None, int]:
    """Read one piece: a literal character, or the words of a group; both None for what fits many characters."""
    character = pattern[position]
    if character == "(":
        if pattern.startswith("(?", position) and not pattern.startswith("(?:", position):
            raise ValueError(f'pattern "{pattern}": only plain groups are understood')
        words, end = _alternatives(pattern, position + (3 if pattern.startswith("(?:", position) else 1))
        return None, words, end + 1
    if character == "[":
        return None, None, pattern.index("]", position + 2) + 1
    if character == "\\":
        escaped = pattern[position + 1]
        return (None if escaped in _SPECIAL_ESCAPES else escaped), None, position + 2
    return (None if character in ".^$" else character), None, position + 1


def _quantifier(pattern: str, position: int) -> tuple[int | None, int]:
    """Return how often the piece before must occur at least; None when no quantifier stands here."""
    found = _QUANTIFIER.match(pattern, position)
    if found is None:
        return None, position
    text = found.group()
    least = {"*": 0, "+": 1, "?": 0}.get(text[0], int(found[1] or 0) if text[0] == "{" else 0)
    return least, found.end()
