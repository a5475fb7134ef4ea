"""What is worth saying beside the answer of a comparison: what it could have found, and what to keep in mind."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median

from harness.judge.blocks import Block, Declaration
from harness.judge.paired import Evidence

ONE_START = "one start of each side: how much one start differs from the next is not in the intervals (--fresh has it)"


def power_remark(declared: Declaration, reported: Mapping[str, Evidence]) -> str:
    """Say which effect these pairs would have found, and how calm they would have to be for what the profile is made for."""
    known = {name: reported[name] for name in declared.gating if math.isfinite(reported[name].detectable)}
    if not known:
        return ""
    rule, metrics = declared.rule, len(declared.gating)
    pairs = max(found.pairs for found in known.values())
    found = ", ".join(f"{name} {seen.detectable:+.1%}" for name, seen in known.items())
    spread = ", ".join(f"{name} {seen.pair_sd:.1%}" for name, seen in known.items())
    return (
        f"smallest effect that could have been found with {pairs} pairs (95 % probability): {found}; pairs spread by {spread}. "
        f"{rule.looks[-1]} pairs find {rule.effect:+.0%} up to a spread of {rule.spread_to_find(rule.effect, metrics):.1%}, "
        f"and clear an unchanged engine up to {rule.spread_to_clear(metrics):.1%}"
    )


def price_of_one_start(declared: Declaration) -> str:
    """Say what it costs that each side was started once where the profile starts engines anew; empty where they were.

    Source: the model of `benchmarks/verdict_error_rates.py simulate`.
    """
    if declared.fresh or not declared.rule.fresh:
        return ""
    return (
        f'each side was started once: if starts scatter by 2 %, profile "{declared.profile}" then says yes in 14 % of the '
        "comparisons in which nothing changed, and no in 36 % of those that are slower by the margin"
    )


def remarks(
    declared: Declaration, blocks: Sequence[Block], void: Sequence[int], reported: Mapping[str, Evidence]
) -> tuple[str, ...]:
    """Return what a reader should know about how the blocks were measured."""
    notes = list(dict.fromkeys(note for block in blocks for note in block.notes))
    if not declared.fresh:
        notes.append(price_of_one_start(declared) or ONE_START)
    if not any(block.canaries for block in blocks):
        notes.append("whether the answers are right was not checked (no canaries)")
    silent = sum(seen.asked - seen.right - seen.wrong for block in blocks if (seen := block.canaries) is not None)
    if silent:
        notes.append(f"{silent} canaries were not answered")
    if void:
        notes.append(f"{len(void)} pairs are void and were left out: {', '.join(str(number) for number in void)}")
    if any(gate.name == "lag_of_margin" for block in blocks for gate in block.failed_gates):
        notes.append(
            "lag of the loaders moves what decides by too much of the margin: serve a larger model, which answers later, "
            "or take a profile with a wider margin"
        )
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
    better = [name for name in declared.gating if reported[name].is_improvement]
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
