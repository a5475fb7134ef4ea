"""May this engine release replace that one? Four questions, each with what was required, what ran, and what could not.

Pure: everything here is judged from records, so a stored qualification can be judged anew. What is required and missing makes
the verdict unknown, never held.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from harness.judge.expectations import NOTHING_RECORDED, Expectation
from harness.judge.moments import Layer
from harness.judge.recovery import NONE, Recoveries, judge_recoveries
from harness.judge.verdict import Finding, Verdict

STARTS_MIN = 3  # recorded starts, of the baseline and of the candidate
SCENARIOS, DETECTION, RECOVERY, LATENCY = PARTS = ("scenarios", "detection", "recovery", "latency")
QUESTIONS = {
    SCENARIOS: "Do the guarded scenarios hold on the candidate?",
    DETECTION: "Does the candidate notice every fault no later than the baseline?",
    RECOVERY: "Does the candidate recover as fast as the baseline?",
    LATENCY: "Is the candidate no slower than the baseline?",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """Something that was required, and why it is not there."""

    name: str
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The answer to one of the questions, with what it stands on."""

    name: str  # one of PARTS
    is_required: bool
    required: int  # how many scenarios, faults, ... it was to be answered from
    findings: tuple[Finding, ...] = ()
    missing: tuple[Missing, ...] = ()

    @property
    def question(self) -> str:
        """Return the question in words."""
        return QUESTIONS[self.name]

    @property
    def ran(self) -> int:
        """Return how many of those that were required are there."""
        return self.required - len(self.missing)

    @property
    def verdict(self) -> Verdict:
        """Return the answer: broken by any finding; held only when all there is to say was said, and held."""
        seen = {finding.verdict for finding in self.findings}
        if Verdict.BROKEN in seen:
            return Verdict.BROKEN
        return Verdict.HELD if seen == {Verdict.HELD} and not self.missing else Verdict.UNKNOWN

    @property
    def because(self) -> str:
        """Say in a sentence what decided."""
        decisive = [finding for finding in self.findings if finding.verdict is self.verdict is not Verdict.HELD]
        if len(self.findings) == 1 and not self.missing:
            decisive = list(self.findings)  # "all 1 held" would say nothing
        said = [f"{finding.claim}: {finding.because}" for finding in decisive[:3]]
        if self.missing and self.verdict is not Verdict.BROKEN:
            said.append(f"{len(self.missing)} of {self.required} are missing, such as {self.missing[0].name}")
        elif len(decisive) > 3:
            said.append(f"and {len(decisive) - 3} more")
        return "; ".join(said) or (f"all {len(self.findings)} held" if self.findings else "nothing was judged")


@dataclass(frozen=True, slots=True, kw_only=True)
class Qualification:
    """The verdict on a candidate, and everything it stands on."""

    candidate: str  # engine labels
    baseline: str
    parts: tuple[Part, ...]
    sources: Mapping[str, tuple[str, ...]]  # of each part: the runs it was judged from
    builds: Mapping[str, Sequence[str]] = field(default_factory=dict)  # of each side, as far as it was asked or ran
    selection: str = ""  # of the scenarios that could be run, as on the command line
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """Return broken when any part is, unknown when a required one is (or none is required), else held."""
        if any(part.verdict is Verdict.BROKEN for part in self.parts):
            return Verdict.BROKEN
        required = [part.verdict for part in self.parts if part.is_required]
        return Verdict.HELD if required and set(required) == {Verdict.HELD} else Verdict.UNKNOWN

    @property
    def because(self) -> str:
        """Say in a sentence what decided."""
        decisive = [
            part
            for part in self.parts
            if part.verdict is self.verdict and (part.is_required or part.verdict is Verdict.BROKEN)
        ]
        return "; ".join(f"{part.name}: {part.because}" for part in decisive) or "no part is required"

    def as_json(self) -> dict[str, Any]:
        """Return everything that was found, ready for JSON."""
        return {
            "candidate": self.candidate,
            "baseline": self.baseline,
            "builds": {arm: list(builds) for arm, builds in self.builds.items()},
            "verdict": self.verdict,
            "because": self.because,
            "selection": self.selection,
            "parts": [
                {
                    "name": part.name,
                    "question": part.question,
                    "verdict": part.verdict,
                    "because": part.because,
                    "coverage": {
                        "is_required": part.is_required,
                        "required": part.required,
                        "ran": part.ran,
                        "missing": [asdict(each) for each in part.missing],
                    },
                    "findings": [asdict(finding) for finding in part.findings],
                }
                for part in self.parts
            ],
            "sources": {name: list(runs) for name, runs in self.sources.items()},
            "notes": list(self.notes),
        }


def judge_scenarios(
    names: Sequence[str],
    runs: Mapping[str, Sequence[Finding]],
    why: Mapping[str, str],
    *,
    repeat: int = 1,
    is_required: bool = True,
) -> Part:
    """Judge the guarded scenarios `names` from what each run of them came to, and say why others did not run.

    One broken run breaks a scenario. A run that could not tell is made good by one that held; `repeat` must have held.
    """
    findings, missing = [], []
    for name in names:
        seen = runs.get(name, ())
        if not seen:
            missing.append(Missing(name=name, because=why.get(name, "it was not run")))
            continue
        order = (Verdict.BROKEN, Verdict.HELD, Verdict.UNKNOWN)
        first = min(seen, key=lambda finding: order.index(finding.verdict))
        held = sum(finding.verdict is Verdict.HELD for finding in seen)
        verdict, because = first.verdict, first.because if len(seen) == 1 else f"{first.because} ({len(seen)} runs)"
        if verdict is Verdict.HELD and held < repeat:
            verdict, because = Verdict.UNKNOWN, f"{because}; but it held in {held} of at least {repeat} runs"
        findings.append(Finding(claim=name, verdict=verdict, because=because, evidence=_evidence(seen)))
    return Part(
        name=SCENARIOS,
        is_required=is_required,
        required=len(names),
        findings=tuple(findings),
        missing=tuple(missing),
    )


def judge_detection(
    names: Sequence[str],
    baseline: Mapping[str, Expectation],
    candidate: Mapping[str, Expectation],
    why: Mapping[str, str],
    *,
    starts: int = STARTS_MIN,
    is_required: bool = True,
) -> Part:
    """Judge whether each fault is noticed no later than in the recorded starts of the baseline.

    One start of the candidate is enough to be later, `starts` are needed to be no later.
    """
    findings, missing = [], []
    for name in names:
        old, new = baseline.get(name, NOTHING_RECORDED), candidate.get(name, NOTHING_RECORDED)
        if not new.layers:
            missing.append(Missing(name=name, because=why.get(name, "the candidate was not started on it")))
            continue
        verdict, because = _compared(old, new, starts)
        findings.append(Finding(claim=name, verdict=verdict, because=because, evidence=new.runs))
    return Part(
        name=DETECTION, is_required=is_required, required=len(names), findings=tuple(findings), missing=tuple(missing)
    )


def _compared(old: Expectation, new: Expectation, starts: int) -> tuple[Verdict, str]:
    """Compare the latest layers: where timing decides the layer, a user must reckon with the latest."""
    if len(old.layers) < STARTS_MIN:
        return (
            Verdict.UNKNOWN,
            f"the baseline has {len(old.layers)} recorded starts, at least {STARTS_MIN} are needed; the candidate "
            f"noticed at {new.latest}",
        )
    seen = f"candidate {new.latest}, baseline {old.latest}"
    if new.latest.rank > old.latest.rank:
        return Verdict.BROKEN, f"noticed later: {seen}: {new.seen}"
    if len(new.layers) < starts:
        return (
            Verdict.UNKNOWN,
            f"{seen}; but the candidate has {len(new.layers)} starts, at least {starts} are needed",
        )
    if Layer.HARMLESS in new.layers and Layer.HARMLESS not in old.layers:
        return Verdict.UNKNOWN, f"nobody noticed anything where {old.latest} was recorded: {new.seen}"
    earlier = "noticed earlier: " if new.latest.rank < old.latest.rank else ""
    return Verdict.HELD, f"{earlier}{seen}"


def judge_recovery(
    baseline: Recoveries,
    candidate: Recoveries,
    why: Mapping[str, str],
    *,
    baseline_beyond: Recoveries = NONE,
    candidate_beyond: Recoveries = NONE,
    is_required: bool = True,
) -> Part:
    """Judge recovery times, in seconds by scenario and mode; `why` says for an arm why it has none.

    Those `beyond` were watched for so long and had not ended.
    """
    missing = [
        Missing(name=f"recoveries of the {arm}", because=why.get(arm, "no scenario of it recovered, or none was run"))
        for arm, times in (
            ("baseline", (*baseline.values(), *baseline_beyond.values())),
            ("candidate", (*candidate.values(), *candidate_beyond.values())),
        )
        if not any(times)
    ]
    judged = (
        ()
        if missing
        else judge_recoveries(baseline, candidate, baseline_beyond=baseline_beyond, candidate_beyond=candidate_beyond)
    )
    findings = [Finding(claim=each.name, verdict=each.verdict, because=each.because) for each in judged]
    return Part(name=RECOVERY, is_required=is_required, required=2, findings=tuple(findings), missing=tuple(missing))


def judge_latency(comparison: Finding | None, why: str, *, is_required: bool = True) -> Part:
    """Judge latency by the verdict of a paired comparison, and say why there is none."""
    missing = () if comparison is not None else (Missing(name="paired comparison", because=why),)
    findings = () if comparison is None else (comparison,)
    return Part(name=LATENCY, is_required=is_required, required=1, findings=findings, missing=missing)


def _evidence(seen: Sequence[Finding]) -> tuple[str, ...]:
    return tuple(item for finding in seen for item in finding.evidence)
