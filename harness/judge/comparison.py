"""The verdict on a comparison, from its stored blocks alone: gates first, then pairs, failures and the negative control."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from harness.judge.blocks import Block, Declaration, difference, load_blocks, load_declaration
from harness.judge.claims import latency_not_regressed
from harness.judge.failures import FailureVerdict, judge_failures
from harness.judge.gates import Gate, gpu_gates
from harness.judge.multiplicity import holm
from harness.judge.paired import (
    LEVEL_FAMILY,
    LEVEL_YES,
    Decision,
    Evidence,
    Slower,
    decide,
    evidence,
)
from harness.judge.verdict import Finding, Verdict
from harness.judge.windows import FUNCTIONALS
from harness.observe.history import RequestResult

NULL_PAIRS_MIN = 3
NULL_LEVEL = 0.01
VERDICTS = {
    Slower.YES: Verdict.BROKEN,
    Slower.NO: Verdict.HELD,
    Slower.INCONCLUSIVE: Verdict.UNKNOWN,
    Slower.INVALID: Verdict.UNKNOWN,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A judged comparison; the answer is `yes` when B is slower or fails more, `invalid` when nothing can be said."""

    declaration: Declaration
    answer: Slower
    because: str
    decision: Decision | None
    failures: FailureVerdict | None
    reported: dict[str, Evidence]  # every metric, also those that do not decide
    medians_ms: dict[str, tuple[float, float]]  # of the blocks of A and of B
    null: dict[str, Evidence]  # the negative control, A against its second start
    failed_gates: tuple[Gate, ...]
    pairs: int
    void_pairs: int
    is_final: bool  # no further pair can change it
    notes: tuple[str, ...]

    def finding(self) -> Finding:
        """Return the answer as what was found about the claim that latency has not regressed."""
        claim = latency_not_regressed(profile=self.declaration.profile)
        return Finding(
            claim=str(claim), verdict=VERDICTS[self.answer], because=f"slower: {self.answer}: {self.because}"
        )

    def as_json(self) -> dict[str, Any]:
        """Return everything that was found, ready for JSON."""
        finding = self.finding()
        fields = {name: getattr(self, name) for name in self.__slots__ if name != "declaration"}
        plain = {name: asdict(value) if hasattr(value, "__slots__") else value for name, value in fields.items()}
        plain["reported"] = {name: asdict(found) for name, found in self.reported.items()}
        plain["null"] = {name: asdict(found) for name, found in self.null.items()}
        plain["failed_gates"] = [asdict(gate) for gate in self.failed_gates]
        told = {
            "comparison": self.declaration.name,
            "profile": self.declaration.profile,
            "claim": finding.claim,
            "verdict": finding.verdict,
            **plain,
        }
        return {name: _finite(value) for name, value in told.items()}


def judge_run(run: Path) -> Comparison:
    """Judge a stored comparison from disk.

    Raises: UsageError when the directory is no comparison; HarnessError when a block of it cannot be read.
    """
    declared = load_declaration(run)
    return judge_blocks(declared, load_blocks(run, declared))


def judge_blocks(declared: Declaration, blocks: Sequence[Block]) -> Comparison:
    """Judge a comparison from its blocks; pure, and the same while it runs and long after."""
    pairs, void = _pairs(blocks, is_null=False)
    nulls, _ = _pairs(blocks, is_null=True)
    used = [block for pair in (*pairs, *nulls) for block in pair]
    failed_gates = tuple(gate for block in blocks for gate in block.failed_gates)
    broken = [*_whole_gates(declared, pairs, used)]
    if len(void) > declared.spare_pairs:
        names = ", ".join(sorted({gate.name for gate in failed_gates}))
        first = failed_gates[0].sentence()
        broken.append(f"{len(void)} pairs are void, at most {declared.spare_pairs} may be ({names}; first: {first})")
    differences = {name: [difference(old, new, name) for old, new in pairs] for name in FUNCTIONALS}
    null = _null_evidence(declared, nulls)
    broken += _null_problems(declared, null)
    alpha = declared.rule.alpha_yes[0]
    fields: dict[str, Any] = {
        "declaration": declared,
        "reported": {n: evidence(d, declared.rule.margin, alpha_yes=alpha) for n, d in differences.items()},
        "medians_ms": {
            n: (_middle(o.values[n] for o, _ in pairs), _middle(b.values[n] for _, b in pairs)) for n in FUNCTIONALS
        },
        "null": null,
        "failed_gates": failed_gates,
        "pairs": len(pairs),
        "void_pairs": len(void),
        "notes": _notes(declared, blocks, void, pairs),
    }
    if broken or len(pairs) < declared.rule.looks[0]:
        because = "; ".join(broken) or f"{len(pairs)} valid pairs, the first look is at {declared.rule.looks[0]}"
        is_final = bool(broken)
        return Comparison(
            answer=Slower.INVALID, because=because, decision=None, failures=None, is_final=is_final, **fields
        )
    decision = decide({name: differences[name] for name in declared.gating}, declared.rule, family=declared.family)
    failures = judge_failures(
        _summed(old for old, _ in pairs),
        _summed(new for _, new in pairs),
        level=LEVEL_YES / len(declared.rule.looks),
        budget=declared.failure_budget,
    )
    answer, because = _together(decision, failures)
    is_final = answer in (Slower.YES, Slower.NO) or len(pairs) >= declared.rule.looks[-1]
    return Comparison(answer=answer, because=because, decision=decision, failures=failures, is_final=is_final, **fields)


def judge_together(comparisons: Sequence[Comparison]) -> tuple[Comparison, ...]:
    """Judge comparisons of one night or one release together, so that many questions do not make a false alarm likely.

    Of a release, a metric stays slower only when Holm's method over all comparisons and all their metrics agrees. A
    screening that said yes stays so only when the comparison that confirms it says yes as well.
    """
    p_values = {
        f"{number}/{metric.metric}": metric.p_yes
        for number, comparison in enumerate(comparisons)
        if comparison.declaration.profile == "release" and comparison.decision is not None
        for metric in comparison.decision.metrics
    }
    kept = holm(p_values, LEVEL_FAMILY)
    judged = []
    for number, comparison in enumerate(comparisons):
        if comparison.declaration.profile == "release" and comparison.decision is not None:
            comparison = _corrected(comparison, {n.partition("/")[2] for n in kept if n.startswith(f"{number}/")})
        elif comparison.declaration.profile == "screen" and comparison.answer is Slower.YES:
            comparison = _confirmed(comparison, comparisons)
        judged.append(comparison)
    return tuple(judged)


def _corrected(comparison: Comparison, kept: set[str]) -> Comparison:
    decision = comparison.decision
    assert decision is not None
    lost = [name for name in decision.slower if name not in kept]
    if not lost:
        return comparison
    metrics = tuple(
        replace(metric, answer=Slower.INCONCLUSIVE) if metric.metric in lost else metric for metric in decision.metrics
    )
    still = any(metric.answer is Slower.YES for metric in metrics)
    said = f"{', '.join(lost)} is no longer slower beyond doubt when all comparisons are judged together"
    if still:
        decision = replace(decision, metrics=metrics)
    else:
        decision = replace(decision, metrics=metrics, answer=Slower.INCONCLUSIVE, because=said)
    assert comparison.failures is not None
    answer, because = _together(decision, comparison.failures)
    return replace(comparison, decision=decision, answer=answer, because=because, notes=(*comparison.notes, said))


def _confirmed(screened: Comparison, comparisons: Sequence[Comparison]) -> Comparison:
    name = screened.declaration.name
    if screened.failures is not None and screened.failures.answer is Slower.YES:
        return screened  # a failure needs no second look
    again = [c for c in comparisons if c.declaration.profile == "confirm" and c.declaration.confirms == name]
    if not again:
        because = f'slower in the screening, not confirmed yet: harness compare --profile confirm --confirms "{name}"'
        return replace(screened, answer=Slower.INCONCLUSIVE, because=f"{because} ({screened.because})")
    other = again[-1]
    both = set(screened.decision.slower if screened.decision else ()) & set(
        other.decision.slower if other.decision else ()
    )
    if other.answer is Slower.YES and both:
        return replace(screened, because=f"slower twice: {', '.join(sorted(both))} ({other.because})")
    answer = Slower.INCONCLUSIVE if other.answer is Slower.YES else other.answer
    return replace(screened, answer=answer, because=f'not confirmed by "{other.declaration.name}": {other.because}')


def _pairs(blocks: Sequence[Block], *, is_null: bool) -> tuple[list[tuple[Block, Block]], list[int]]:
    """Return the whole pairs of old and new (or null) blocks in which no gate failed, and the numbers of the void ones."""
    of_pair: dict[int, list[Block]] = {}
    for block in blocks:
        if block.is_null is is_null:
            of_pair.setdefault(block.pair, []).append(block)
    whole, void = [], []
    for number, members in sorted(of_pair.items()):
        old = [block for block in members if block.arm == "old"]
        new = [block for block in members if block.arm == ("null" if is_null else "new")]
        if len(old) != 1 or len(new) != 1:
            continue  # interrupted between its blocks
        if old[0].failed_gates or new[0].failed_gates:
            void.append(number)
        else:
            whole.append((old[0], new[0]))
    return whole, void


def _whole_gates(declared: Declaration, pairs: Sequence[tuple[Block, Block]], used: Sequence[Block]) -> list[str]:
    gates = list(
        gpu_gates(
            [event for old, _ in pairs for event in old.events],
            [event for _, new in pairs for event in new.events],
            declared.limits,
        )
    )
    drifting = [block.name for block in used if block.is_drifting]
    gates.append(
        Gate(
            name="drifting_ratio",
            seen=len(drifting) / max(len(used), 1),
            limit=declared.limits.drifting_ratio,
            where=f"{len(used)} blocks ({', '.join(drifting[:3])})" if drifting else f"{len(used)} blocks",
        )
    )
    broken = [gate.sentence() for gate in gates if not gate.passed]
    other = [block.name for block in used if block.schedule_sha256 != declared.schedule_sha256]
    if other:
        broken.append(f"block {other[0]} had another schedule of arrivals than was declared: the work was not the same")
    return broken


def _null_evidence(declared: Declaration, nulls: Sequence[tuple[Block, Block]]) -> dict[str, Evidence]:
    if not nulls:
        return {}
    return {
        name: evidence(
            [difference(old, new, name) for old, new in nulls], declared.rule.margin, alpha_yes=NULL_LEVEL / 2
        )
        for name in declared.gating
    }


def _null_problems(declared: Declaration, null: dict[str, Evidence]) -> list[str]:
    """Say where two starts of the same engine differ by more than the margin: then so would any two."""
    level = NULL_LEVEL / (2 * max(len(null), 1))
    return [
        f"the negative control differs: {name} of the old engine's second start is {found.effect:+.1%} "
        f"({found.low:+.1%} to {found.high:+.1%}, {found.pairs} pairs), margin {declared.rule.margin:.0%}"
        for name, found in null.items()
        if found.pairs >= NULL_PAIRS_MIN and (found.p_slower <= level or _is_faster_than_margin(found, declared, level))
    ]


def _is_faster_than_margin(found: Evidence, declared: Declaration, level: float) -> bool:
    from scipy.stats import t as student  # type: ignore[import-untyped,unused-ignore]

    if not found.pair_sd > 0 or not math.isfinite(found.effect):
        return False
    distance = -math.log1p(declared.rule.margin) - math.log1p(found.effect)
    return float(student.sf(distance / (found.pair_sd / math.sqrt(found.pairs)), found.pairs - 1)) <= level


def _together(decision: Decision, failures: FailureVerdict) -> tuple[Slower, str]:
    both = f"{decision.because}; {failures.because}"
    answers = {decision.answer, failures.answer}
    for answer in (Slower.INVALID, Slower.YES, Slower.INCONCLUSIVE):
        if answer in answers:
            return answer, both
    return Slower.NO, both


def _notes(
    declared: Declaration, blocks: Sequence[Block], void: Sequence[int], pairs: Sequence[tuple[Block, Block]]
) -> tuple[str, ...]:
    notes = list(dict.fromkeys(note for block in blocks for note in block.notes))
    if not declared.fresh:
        notes.append(
            "one start of each side: how much one start differs from the next is not in the intervals (--fresh has it)"
        )
    if void:
        notes.append(f"{len(void)} pairs are void and were left out: {', '.join(str(number) for number in void)}")
    if any(block.is_coalesced for block in blocks):
        notes.append(
            "several tokens came in one event: gaps between tokens mean little here, time per token still does"
        )
    changed = {
        name: value
        for name, value in asdict(declared.limits).items()
        if value != getattr(type(declared.limits)(), name)
    }
    if changed:
        notes.append(f"gates were changed: {', '.join(f'{name}={value:g}' for name, value in changed.items())}")
    better = [
        name
        for name in declared.gating
        if len(pairs) > 1
        and evidence(
            [difference(*pair, name) for pair in pairs], declared.rule.margin, alpha_yes=LEVEL_YES
        ).is_improvement
    ]
    if better:
        notes.append(f"faster than before: {', '.join(better)}")
    outage = max((block.availability.longest_outage_s for block in blocks), default=0.0)
    if outage:
        notes.append(f"longest outage in a block: {outage:g} s")
    for arm in ("old", "new"):
        goodputs = [block.goodput for block in blocks if block.arm == arm and block.goodput is not None]
        if goodputs:
            notes.append(f"goodput of {arm}: {median(goodputs):.1%} of the planned arrivals in the median block")
    return tuple(notes)


def _summed(blocks: Iterable[Block]) -> Counter[RequestResult]:
    total: Counter[RequestResult] = Counter()
    for block in blocks:
        total.update(block.counts)
    return total


def _middle(values: Iterable[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return median(known) if known else math.nan


def _finite(value: Any) -> Any:
    """Return the same with null in place of what JSON has no number for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value
