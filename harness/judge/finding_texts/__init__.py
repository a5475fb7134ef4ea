"""What a maintainer of vLLM should know about a fault that it serves, by the names of scenarios.

Written by hand, shown only where a recorded start says so. Reports are public threads about the same behaviour; that somebody
saw it does not mean that today's releases still do it.
"""

from __future__ import annotations

from harness.judge.finding_texts.exchanges import EXCHANGES
from harness.judge.finding_texts.operators import OPERATORS
from harness.judge.finding_texts.serving import SERVING
from harness.judge.finding_texts.starts import STARTS
from harness.judge.finding_texts.text import OPERATOR, Text

__all__ = ["OPERATOR", "TEXTS", "Text", "text_for"]

TEXTS: tuple[Text, ...] = (*EXCHANGES, *SERVING, *STARTS, *OPERATORS)  # the first that fits is what is said


def text_for(scenario: str, seen: str) -> Text | None:
    """Return what to say about a scenario in which that was seen; None where nothing was written."""
    return next((text for text in TEXTS if text.fits(scenario, seen)), None)
