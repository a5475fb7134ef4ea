"""What pre-flight says about one thing that is wrong."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum

SHOWN_CHARACTERS = 300


class Severity(StrEnum):
    """What becomes of a rollout that goes on in spite of a finding."""

    REFUSES = "refuses"  # the engine does not start
    SILENT = "silent"  # the engine starts and serves wrong answers
    RISK = "risk"  # may be meant so; does not block by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightFinding:
    """One fault found before any engine was started; `id` is its row in the fault taxonomy."""

    id: str
    severity: Severity
    seen: str
    expected: str
    where: str
    remedy: str

    @property
    def blocks(self) -> bool:
        """Say whether a rollout should stop here."""
        return self.severity is not Severity.RISK

    def as_json(self) -> dict[str, str]:
        """Return the finding's fields."""
        return asdict(self)

    def as_text(self) -> str:
        """Return the finding for people, one line per part; bytes that a terminal would act on are escaped."""
        parts = (
            f"{self.id}  {self.where}",
            f"seen      {self.seen}",
            f"expected  {self.expected}",
            f"mend      {self.remedy}",
        )
        return "\n     ".join(printable(part) for part in parts)


def printable(text: str) -> str:
    """Escape what is not printable: names in checkpoints are untrusted."""
    return "".join(
        character if character.isprintable() else ascii(character)[1:-1]  # "\\x1b", "\\ud800"
        for character in text
    )


def shortened(text: object) -> str:
    """Return a value's text, cut where a report would drown in it."""
    shown = str(text)
    return shown if len(shown) <= SHOWN_CHARACTERS else f"{shown[:SHOWN_CHARACTERS]}... ({len(shown):,} characters)"
