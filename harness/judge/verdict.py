"""The three answers and how they combine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from harness.errors import EXIT_BROKEN, EXIT_HELD, EXIT_UNKNOWN


class Verdict(StrEnum):
    """What was found about one claim, or about a whole scenario."""

    HELD = "held"
    BROKEN = "broken"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The answer to one claim, in a sentence, with the ids of the events and requests that prove it."""

    claim: str
    verdict: Verdict
    because: str
    evidence: tuple[str, ...] = ()
    is_precondition: bool = False


def combine(findings: Iterable[Finding]) -> Verdict:
    """Return the verdict of a scenario.

    A precondition that did not hold makes everything unknown: what was not injected proves nothing. Then broken beats
    unknown beats held, and no findings at all is unknown.
    """
    all_findings = tuple(findings)
    judged = [finding.verdict for finding in all_findings if not finding.is_precondition]
    if any(finding.is_precondition and finding.verdict is not Verdict.HELD for finding in all_findings):
        return Verdict.UNKNOWN
    if Verdict.BROKEN in judged:
        return Verdict.BROKEN
    if Verdict.UNKNOWN in judged or not judged:
        return Verdict.UNKNOWN
    return Verdict.HELD


def exit_code_of(verdicts: Sequence[str]) -> int:
    """Return the exit code of these verdicts: broken before unknown before held; none at all is unknown."""
    if Verdict.BROKEN in verdicts:
        return EXIT_BROKEN
    return EXIT_UNKNOWN if Verdict.UNKNOWN in verdicts or not verdicts else EXIT_HELD
