"""Does pre-flight say beforehand what a release does? Predictions beside recorded starts, as one page for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby

from harness.guards.finding import PreflightFinding, Severity
from harness.judge.matrix import SHOWN, Release, quoted, title_of
from harness.judge.moments import Layer

REFUSED = frozenset({Layer.STARTUP, Layer.FIRST_REQUEST})
ORDER = (Severity.REFUSES, Severity.SILENT, Severity.RISK)
ONLY_IN_TEXT = frozenset({"C09", "C10", "C11"})  # canaries are token ids, with sampling of their own
WITHOUT_IT = frozenset({"D10"})  # the right answers here are those of the checkpoint before it was added
NOT_IN_FILES = frozenset({"D15", "D18", "K05"})  # right headers over other bytes, or bytes that lie elsewhere


class Agreement(StrEnum):
    """What a prediction was worth, from the best to the worst."""

    AGREE = "agree"
    STRICTER = "stricter"
    CONTRADICTS = "contradicts"
    MISSED = "missed"

    @property
    def rank(self) -> int:
        """Return the position from agree (0) to missed."""
        return list(Agreement).index(self)


RULE = """\
| pre-flight said | the engine did not start, or failed its first request | it served wrong answers | it served the right ones |
|---|---|---|---|
| refuses | agree | contradicts | stricter |
| silent | contradicts | agree | stricter |
| risk only | missed | missed | agree |
| nothing | missed | missed | agree |
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What pre-flight said about one damaged checkpoint and its launch line, for one release."""

    findings: tuple[PreflightFinding, ...]
    asked_with: str = ""  # the option without which it would have found nothing that stops a rollout
    is_moving: bool = False  # the files were still being written

    @property
    def worst(self) -> PreflightFinding | None:
        """Return the finding that decides: a refusal before a silent fault before a risk; None when there is none."""
        return min(self.findings, key=lambda finding: ORDER.index(finding.severity), default=None)

    @property
    def shown(self) -> str:
        """Return severity, ids and the option it took, such as `silent (D08)`."""
        worst = self.worst
        if worst is None:
            return "nothing"
        ids = dict.fromkeys(finding.id for finding in self.findings if finding.severity is worst.severity)
        return f"{worst.severity} ({', '.join(ids)}){f' with `{self.asked_with}`' if self.asked_with else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One fault on one release: what was foreseen, what was recorded, and whether the two agree."""

    scenario: str
    fault_ids: tuple[str, ...]
    release: str
    prediction: Prediction
    layers: tuple[Layer, ...]
    seen: str
    agreement: Agreement
    because: str

    @property
    def alike(self) -> tuple[object, ...]:
        """Return what releases that share a row have in common."""
        return self.prediction.shown, frozenset(self.layers), self.agreement, self.because


def compare(
    scenario: str, fault_ids: Sequence[str], release: str, prediction: Prediction, layers: Sequence[Layer], seen: str
) -> Compared:
    """Judge one prediction by the recorded starts; where starts differ, by the one it fits least."""
    verdicts = [_judged(prediction, layer, frozenset(fault_ids)) for layer in dict.fromkeys(layers)]
    agreement, because = max(verdicts, key=lambda verdict: verdict[0].rank)
    return Compared(
        scenario=scenario,
        fault_ids=tuple(fault_ids),
        release=release,
        prediction=prediction,
        layers=tuple(layers),
        seen=seen,
        agreement=agreement,
        because=because,
    )


def _judged(prediction: Prediction, layer: Layer, fault_ids: frozenset[str]) -> tuple[Agreement, str]:
    worst = prediction.worst
    said = Severity.RISK if worst is None else worst.severity
    if layer is Layer.HARMLESS:
        return _judged_harmless(prediction, said)
    if said is Severity.RISK:
        if fault_ids <= NOT_IN_FILES:
            return Agreement.MISSED, "no header, config or launch line shows it: this is what the canary is for"
        if worst is not None:
            return Agreement.MISSED, "named, but as a risk, which stops no rollout"
        return Agreement.MISSED, "nothing was found"
    if (said is Severity.REFUSES) == (layer in REFUSED):
        return Agreement.AGREE, ""
    if prediction.is_moving:
        return Agreement.AGREE, "the copy went on after pre-flight had looked"
    return Agreement.CONTRADICTS, "it is louder than that" if layer in REFUSED else "it starts, and answers wrongly"


def _judged_harmless(prediction: Prediction, said: Severity) -> tuple[Agreement, str]:
    if said is Severity.RISK:
        return Agreement.AGREE, ""
    ids = {finding.id for finding in prediction.findings if finding.severity is said}
    if ids <= ONLY_IN_TEXT:
        return Agreement.AGREE, "what is wrong shows in text, which canaries are not"
    if ids <= WITHOUT_IT:
        return Agreement.AGREE, "it is dropped, and the right answers here are those without it"
    return Agreement.STRICTER, "this damage does the answers no harm"


def as_markdown(compared: Sequence[Compared], releases: Sequence[Release]) -> str:
    """Return the page: the rule, how often it held per release, a row for every fault, and every difference in full."""
    counts = Counter((each.release, each.agreement) for each in compared)
    starts = {
        release.version: [len(c.layers) for c in compared if c.release == release.version] for release in releases
    }
    summary = [
        f"| {release.label} | {_starts(starts[release.version])} | "
        + " | ".join(str(counts[release.version, kind]) for kind in Agreement)
        + " |"
        for release in releases
    ]
    rows = [_row(group) for group in _grouped(compared)]
    return "\n".join(
        [
            "# What pre-flight says, and what vLLM does",
            "",
            "Generated by `make agreement` from the starts that are recorded in `scenarios/expectations/`; not edited by hand. "
            "Each fault was injected again, without any engine, and pre-flight was asked about that very checkpoint and launch "
            "line, for that release. It read all values (`--verify`); where it then found nothing that stops a rollout, it was "
            "asked again with the running checkpoint beside it (`--against`), and then with the manifest of the undamaged one "
            "(`--manifest`). Reloads in place, what strikes a running engine, and compile caches are not here: pre-flight is about "
            "starts. Nor is what only the host can show (`--check-host`).",
            "",
            RULE,
            f"| release | starts of each fault | {' | '.join(Agreement)} |",
            "|---|---|" + "---|" * len(Agreement),
            *summary,
            "",
            "## Every fault",
            "",
            "| fault | row | releases | pre-flight | vLLM | |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
            *_differences(compared),
        ]
    )


def _starts(counts: Sequence[int]) -> str:
    """Say how many starts the predictions of a release are judged by: one may differ from the next."""
    kinds = sorted(set(counts))
    return ", ".join(f"{counts.count(kind)} x {kind}" for kind in kinds)


def _grouped(compared: Sequence[Compared]) -> list[list[Compared]]:
    """Gather neighbouring releases of one fault of which the same is to be said, in the order in which faults first come."""
    groups: list[list[Compared]] = []
    for name in dict.fromkeys(each.scenario for each in compared):
        of_one = (each for each in compared if each.scenario == name)
        groups += [list(group) for _, group in groupby(of_one, key=lambda each: each.alike)]
    return groups


def _row(group: Sequence[Compared]) -> str:
    last = group[-1]
    did = " or ".join(SHOWN[layer] for layer in sorted(set(last.layers), key=lambda layer: layer.rank))
    verdict = str(last.agreement) if last.agreement is Agreement.AGREE else f"**{last.agreement}**"
    cells = (
        title_of(last.scenario),
        ", ".join(dict.fromkeys(last.fault_ids)),
        _span(group),
        last.prediction.shown,
        did,
        f"{verdict}: {last.because}" if last.because else verdict,
    )
    return f"| {' | '.join(cells)} |"


def _span(group: Sequence[Compared]) -> str:
    first, last = group[0].release, group[-1].release
    return first if first == last else f"{first} to {last}"


def _differences(compared: Sequence[Compared]) -> list[str]:
    lines: list[str] = []
    for kind in (Agreement.MISSED, Agreement.CONTRADICTS, Agreement.STRICTER):
        groups = [group for group in _grouped(compared) if group[-1].agreement is kind]
        if groups:
            lines += [f"## {kind.capitalize()}", ""]
        for group in groups:
            last = group[-1]
            worst = last.prediction.worst
            foreseen = "nothing" if worst is None else f"{worst.where}: {worst.seen}: {worst.consequence}"
            lines.append(
                f"- {title_of(last.scenario)} ({_span(group)}): {last.because}. Pre-flight: {quoted(foreseen)}. "
                f"vLLM: {quoted(last.seen)}"
            )
        if groups:
            lines.append("")
    return lines or ["No prediction differs from what was recorded.", ""]
