"""The verdict on a comparison, from its stored blocks alone: gates first, then pairs, failures and the negative control."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from harness.judge.blocks import Block, Declaration, load_blocks, load_declaration
from harness.judge.canaries import canary_gates
from harness.judge.claims import latency_not_regressed
from harness.judge.failures import FailureVerdict, judge_failures
from harness.judge.gates import Gate, gpu_gates
from harness.judge.paired import Decision, Evidence, Slower, decide, evidence
from harness.judge.pairs import Pair, pairs_of
from harness.judge.profiles import LEVEL_YES
from harness.judge.remarks import power_remark, price_of_one_start, remarks
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
    differences: dict[str, list[float]]  # ln T(B) - ln T(A) of every pair, for every metric
    medians_ms: dict[str, tuple[float, float]]  # of the blocks of A and of B
    null: dict[str, Evidence]  # the negative control, A against its second start
    failed_gates: tuple[Gate, ...]
    pairs: int
    void_pairs: int
    is_final: bool  # no further pair can change it
    power: str  # which effect these pairs could have found, in words
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
    pairs, void = pairs_of(blocks, is_null=False, blocks_per_arm=declared.blocks_per_arm)
    nulls, _ = pairs_of(blocks, is_null=True, blocks_per_arm=declared.blocks_per_arm)
    failed_gates = tuple(gate for block in blocks for gate in block.failed_gates)
    broken = [*declared.problems, *_whole_gates(declared, blocks, pairs, nulls)]
    if len(void) > declared.spare_pairs:
        names = ", ".join(sorted({gate.name for gate in failed_gates}))
        first = failed_gates[0].sentence()
        broken.append(f"{len(void)} pairs are void, at most {declared.spare_pairs} may be ({names}; first: {first})")
    differences = {name: [pair.difference(name) for pair in pairs] for name in FUNCTIONALS}
    null = _null_evidence(declared, nulls)
    broken += _null_problems(declared, null)
    alpha = declared.rule.alpha_at(len(pairs)) / len(declared.gating)
    reported = {n: evidence(d, declared.rule.margin, alpha_yes=alpha) for n, d in differences.items()}
    fields: dict[str, Any] = {
        "declaration": declared,
        "reported": reported,
        "differences": differences,
        "medians_ms": {
            n: (
                _middle(block.values[n] for pair in pairs for block in pair.old),
                _middle(block.values[n] for pair in pairs for block in pair.new),
            )
            for n in FUNCTIONALS
        },
        "null": null,
        "failed_gates": failed_gates,
        "pairs": len(pairs),
        "void_pairs": len(void),
        "power": power_remark(declared, reported),
        "notes": remarks(declared, blocks, void, reported),
    }
    if broken or len(pairs) < declared.rule.looks[0]:
        because = "; ".join(broken) or f"{len(pairs)} valid pairs, the first look is at {declared.rule.looks[0]}"
        is_final = bool(broken)
        return Comparison(
            answer=Slower.INVALID, because=because, decision=None, failures=None, is_final=is_final, **fields
        )
    decision = decide({name: differences[name] for name in declared.gating}, declared.rule, family=declared.family)
    failures = judge_failures(
        _summed(block for pair in pairs for block in pair.old),
        _summed(block for pair in pairs for block in pair.new),
        level=LEVEL_YES / len(declared.rule.looks),
        budget=declared.failure_budget,
    )
    answer, because = combined(declared, decision, failures)
    is_final = answer in (Slower.YES, Slower.NO) or len(pairs) >= declared.rule.looks[-1]
    return Comparison(answer=answer, because=because, decision=decision, failures=failures, is_final=is_final, **fields)


def combined(declared: Declaration, decision: Decision, failures: FailureVerdict) -> tuple[Slower, str]:
    """Return one answer for latency and failures together, and why, with what it costs to have started each side once."""
    both = "; ".join(filter(None, (decision.because, failures.because, price_of_one_start(declared))))
    answers = {decision.answer, failures.answer}
    for answer in (Slower.INVALID, Slower.YES, Slower.INCONCLUSIVE):
        if answer in answers:
            return answer, both
    return Slower.NO, both


def _whole_gates(
    declared: Declaration, blocks: Sequence[Block], pairs: Sequence[Pair], nulls: Sequence[Pair]
) -> list[str]:
    used = [block for pair in (*pairs, *nulls) for block in pair.blocks]
    gates = list(
        gpu_gates(
            [event for pair in pairs for block in pair.old for event in block.events],
            [event for pair in pairs for block in pair.new for event in block.events],
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
    gates += canary_gates({block.name: block.canaries for block in blocks}, declared.limits)
    broken = [gate.sentence() for gate in gates if not gate.passed]
    other = [block.name for block in used if block.schedule_sha256 != declared.schedule_sha256]
    if other:
        broken.append(f"block {other[0]} had another schedule of arrivals than was declared: the work was not the same")
    first: dict[str, str] = {}
    for block in blocks:
        name = first.setdefault(block.digest or block.name, block.name)
        if name != block.name:
            broken.append(f"block {block.name} is a copy of block {name}")
    return broken


def _null_evidence(declared: Declaration, nulls: Sequence[Pair]) -> dict[str, Evidence]:
    if not nulls:
        return {}
    return {
        name: evidence([pair.difference(name) for pair in nulls], declared.rule.margin, alpha_yes=NULL_LEVEL / 2)
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
    from scipy.special import stdtr  # type: ignore[import-untyped,unused-ignore]

    if not found.pair_sd > 0 or not math.isfinite(found.effect):
        return False
    distance = -math.log1p(declared.rule.margin) - math.log1p(found.effect)
    return float(stdtr(found.pairs - 1, -distance / (found.pair_sd / math.sqrt(found.pairs)))) <= level


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
