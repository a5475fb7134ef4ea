"""Untrusted text made safe to look at: model output, log lines and names come from outside."""

from __future__ import annotations

import re

# C0 and C1 controls but tab and line feed, lone surrogates, and the marks that reorder text on the screen.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufeff\ufffe\uffff]"
)


def printable(text: object, *, limit: int = 4000) -> str:
    """Return `text` with control characters written out and at most `limit` characters of it; not HTML-escaped."""
    whole = str(text)
    shown = whole[:limit]
    shown = _UNPRINTABLE.sub(lambda found: f"\\x{ord(found.group()):02x}", shown)
    return shown if len(whole) <= limit else f"{shown} … ({len(whole) - limit:,} more characters)"
