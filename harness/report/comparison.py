"""A comparison as one HTML page and as JUnit XML, from its stored blocks; the page needs nothing else to be seen."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.errors import HarnessError
from harness.judge.blocks import KEY_FIELDS, Block
from harness.judge.comparison import Comparison
from harness.judge.paired import Evidence, Slower
from harness.observe.history import RequestResult
from harness.report.html import page_environment
from harness.report.junit import write_case
from harness.report.pairs import pairs_svg
from harness.report.store import MALFORMED, write_json

VERDICT, PAGE, JUNIT = "verdict.json", "report.html", "junit.xml"
ARMS = ("old", "new", "null")
ARM_WORDS = {"old": "old", "new": "new", "null": "old, started again"}


def write_comparison(run: Path, comparison: Comparison, blocks: Sequence[Block]) -> None:
    """Write verdict.json, junit.xml and report.html beside the blocks they were made from.

    Raises: HarnessError when what is stored cannot be shown.
    """
    write_json(run / VERDICT, comparison.as_json())
    finding = comparison.finding()
    figures = {
        name: f"{seen.effect:+.2%} ({_interval(seen)})"
        for name, seen in comparison.reported.items()
        if math.isfinite(seen.effect)
    }
    write_case(
        run / JUNIT,
        suite=f"comparison {comparison.declaration.name}",
        name=finding.claim,
        started_at=comparison.declaration.started_at,
        finding=finding,
        properties={
            "answer": str(comparison.answer),
            "because": comparison.because,  # also of a comparison that passes
            "power": comparison.power,
            **figures,
        },
    )
    try:
        page = render_comparison(comparison, blocks)
    except MALFORMED as error:
        raise HarnessError(f'the comparison in "{run}" cannot be shown: {type(error).__name__}: {error}') from error
    partial = run / ".report.partial"
    partial.write_text(page, encoding="utf-8")
    partial.replace(run / PAGE)


def render_comparison(comparison: Comparison, blocks: Sequence[Block]) -> str:
    """Return the page of a comparison."""
    declared = comparison.declaration
    finding = comparison.finding()
    return (
        page_environment()
        .get_template("comparison.html")
        .render(
            c=comparison,
            d=declared,
            verdict=finding.verdict,
            headline=_headline(comparison),
            margin=f"{declared.rule.margin:.0%}",
            engines=[(ARM_WORDS[name], declared.arm(name).key["engine"]) for name in ("old", "new")],
            metrics=[_metric(comparison, name) for name in comparison.reported],
            pictures=[
                pairs_svg(name, comparison.differences[name], comparison.reported[name], margin=declared.rule.margin)
                for name in declared.gating
                if comparison.differences[name]
            ],
            arms=[
                _arm(name, [b for b in blocks if b.arm == name and not (name == "old" and b.is_null)]) for name in ARMS
            ],
            gates=_gates(blocks),
            null=[
                (name, _signed(seen.effect) if seen.pairs > 1 else "too few to say", _interval(seen), seen.pairs)
                for name, seen in comparison.null.items()
            ],
            keys=[_key(comparison, name) for name in KEY_FIELDS],
            blocks=len(blocks),
        )
    )


def _headline(comparison: Comparison) -> str:
    margin = f"{comparison.declaration.rule.margin:.0%}"
    return {
        Slower.YES: f"Slower by more than {margin}, or failing more",
        Slower.NO: f"Not slower by more than {margin}",
        Slower.INCONCLUSIVE: f"Undecided: slower by more than {margin} or not",
        Slower.INVALID: "Invalid: nothing can be said",
    }[comparison.answer]


def _metric(comparison: Comparison, name: str) -> dict[str, Any]:
    seen, (old_ms, new_ms) = comparison.reported[name], comparison.medians_ms[name]
    decided = {} if comparison.decision is None else {m.metric: str(m.answer) for m in comparison.decision.metrics}
    return {
        "name": name,
        "old": _milliseconds(old_ms),
        "new": _milliseconds(new_ms),
        "effect": _signed(seen.effect),
        "interval": _interval(seen),
        "spread": _share(seen.pair_sd),
        "detectable": _signed(seen.detectable),
        "answer": decided.get(name, "not decided" if name in comparison.declaration.gating else "reported only"),
        "decides": name in comparison.declaration.gating,
    }


def _arm(name: str, blocks: Sequence[Block]) -> dict[str, Any]:
    counts: Counter[RequestResult] = Counter()
    for block in blocks:
        counts.update(block.counts)
    total = sum(counts.values())
    failed = {result: count for result, count in counts.items() if result is not RequestResult.OK and count}
    peaks = [block.peak_ratio for block in blocks if block.peak_ratio is not None]
    asked = [block.canaries for block in blocks if block.canaries is not None]
    return {
        "name": ARM_WORDS[name],
        "blocks": len(blocks),
        "requests": f"{total:,}",
        "failed": f"{sum(failed.values()):,}",
        "classes": ", ".join(f"{count:,} {result}" for result, count in sorted(failed.items())) or "none",
        "peak": f"{max(peaks):.2f} times" if peaks and math.isfinite(max(peaks)) else ("failed" if peaks else "-"),
        "outage": f"{max((block.availability.longest_outage_s for block in blocks), default=0.0):g} s",
        "canaries": (
            f"{sum(c.right for c in asked)} right, {sum(c.wrong for c in asked)} wrong of {sum(c.asked for c in asked)}, "
            f"{sum(c.asked_under_load for c in asked)} of them under load"
            if asked
            else "not asked"
        ),
    }


def _gates(blocks: Sequence[Block]) -> list[dict[str, Any]]:
    """Return the worst block of each gate, failed ones first."""
    worst: dict[str, tuple[float, dict[str, Any]]] = {}
    failed = Counter(gate.name for block in blocks for gate in block.failed_gates)
    for block in blocks:
        for gate in block.gates:
            seen = gate.seen if math.isfinite(gate.seen) else math.inf
            if gate.name not in worst or seen > worst[gate.name][0]:
                row = {
                    "name": gate.name,
                    "seen": f"{gate.seen:.4g}",
                    "limit": f"{gate.limit:g}",
                    "where": block.name,
                    "failed": failed[gate.name],
                }
                worst[gate.name] = (seen, row)
    return sorted((row for _, row in worst.values()), key=lambda row: -row["failed"])


def _key(comparison: Comparison, name: str) -> dict[str, Any]:
    old, new = (comparison.declaration.arm(arm).key[name] for arm in ("old", "new"))
    return {"name": name, "old": old, "new": new, "differs": old != new}


def _signed(value: float) -> str:
    return f"{value:+.1%}" if math.isfinite(value) else "-"


def _share(value: float) -> str:
    return f"{value:.1%}" if math.isfinite(value) else "-"


def _interval(seen: Evidence) -> str:
    is_known = math.isfinite(seen.effect) and math.isfinite(seen.low) and math.isfinite(seen.high)
    return f"{seen.low:+.1%} to {seen.high:+.1%}" if is_known else "-"


def _milliseconds(value: float) -> str:
    return f"{value:,.2f}" if math.isfinite(value) else "-"
