"""What pre-flight says about one thing that is wrong, and about a checkpoint as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

SHOWN_CHARACTERS = 300


class Severity(StrEnum):
    """What becomes of a rollout that goes on in spite of a finding."""

    REFUSES = "refuses"  # the engine does not start
    SILENT = "silent"  # the engine starts and serves wrong answers
    RISK = "risk"  # may be meant so; does not block by itself


BLOCKING = frozenset({Severity.REFUSES, Severity.SILENT})


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightFinding:
    """One fault found before any engine was started; `id` is its row in the fault taxonomy.

    `consequence` says what the release in question would do with it, and how that is known.
    """

    id: str
    severity: Severity
    seen: str
    expected: str
    where: str
    remedy: str
    consequence: str = ""

    @property
    def blocks(self) -> bool:
        """Say whether a rollout should stop here, by the severities that count when nothing else is asked for."""
        return self.severity in BLOCKING

    def as_json(self) -> dict[str, str]:
        """Return the finding's fields."""
        return asdict(self)

    def as_text(self) -> str:
        """Return the finding for people, one line per part; bytes that a terminal would act on are escaped."""
        parts = (
            f"{self.id}  {self.where}",
            f"seen      {self.seen}",
            f"expected  {self.expected}",
            *([f"engine    {self.consequence}"] if self.consequence else []),
            f"mend      {self.remedy}",
        )
        return "\n     ".join(printable(part) for part in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightReport:
    """Everything that one pre-flight found, and what it could not look at."""

    checkpoint: Path
    engine: str
    findings: tuple[PreflightFinding, ...]
    unchecked: tuple[str, ...]
    fail_on: frozenset[Severity] = BLOCKING

    @property
    def failing(self) -> tuple[PreflightFinding, ...]:
        """Return the findings that should stop the rollout."""
        return tuple(finding for finding in self.findings if finding.severity in self.fail_on)

    def as_json(self) -> Mapping[str, object]:
        """Return the report's fields."""
        return {
            "checkpoint": str(self.checkpoint),
            "engine": self.engine,
            "fail_on": sorted(self.fail_on),
            "failing": len(self.failing),
            "findings": [finding.as_json() for finding in self.findings],
            "unchecked": list(self.unchecked),
        }


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
