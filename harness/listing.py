"""`harness list`: the faults and the scenarios that are there, what they need, and how long they took when last run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from harness.errors import UsageError
from harness.faults import FAULTS
from harness.faults.catalogue import CATALOGUE
from harness.faults.documents import gaps, is_damage, rows_of, summary_of
from harness.faults.rows import ROWS
from harness.suite import QUALIFICATION, Collected, collect_marked

SCENARIOS = Path("scenarios")
TIERS = ("core", "nightly", QUALIFICATION, "docker", "gpu", "slow")
SUITE = re.compile(r'<testsuite name="rollout on ([^"]{1,100})"')
CASE = re.compile(r'name="([\w.-]{1,200})\[(guarded|unguarded)\]" time="(\d{1,9}(?:\.\d{1,9})?)"')
WHOLE = re.compile(r'<property name="whole_s" value="(\d{1,9}(?:\.\d{1,9})?)"')
JUNIT_CHARACTERS_MAX = 4_000_000
RUNS_MAX = 200  # of which the newest are read
SUPPLIED = ("old", "a rollout", "a rollout of adapters, `rollout.update_adapter()`")  # by every scenario
RUNS = ("*/junit.xml", "qualifications/*/*/*/junit.xml")  # below the results
GUARDED_ON = "guarded on "


@dataclass(frozen=True, slots=True, kw_only=True)
class Took:
    """How long a scenario took."""

    load_s: float
    whole_s: float | None = None  # with the engines that were started before and after; None: it was not recorded

    @property
    def known_s(self) -> float:
        """Return as much of it as was recorded."""
        return self.load_s if self.whole_s is None else self.whole_s

    def __str__(self) -> str:
        if self.whole_s is None:
            return f"{self.load_s:.0f} s under load"
        return f"{self.whole_s:.0f} s ({self.load_s:.0f} s under load)"


Times = dict[str, dict[str, Took]]  # per scenario, by mode and engine


def listing(paths: Sequence[Path], results: Path) -> Iterator[str]:
    """Yield the lines of `harness list`; without paths the scenarios in `scenarios`, if there are any.

    Raises: UsageError for a path that does not exist.
    """
    for path in paths:
        if not path.exists():
            raise UsageError(f'"{path}" does not exist: no scenarios can be listed from it')
    yield f"faults ({len(FAULTS)}; harness damage --list tells parameters, docs/faults.md everything):"
    for name in sorted(FAULTS):
        where = "damage" if is_damage(name) else "scenario"
        yield f"  {name:26}{where:9} {', '.join(rows_of(name)):24} {summary_of(name)}"
        if needs := _needs((name,), known=("old",)):
            yield f"  {'':26}  needs {needs}"
    yield ""
    yield f"rows of the fault list that no fault injects ({len(gaps())} of {len(ROWS)}):"
    for row, why in gaps().items():
        yield f"  {row:4} {ROWS[row].what}: {why}"
    times = last_times(results)
    found = [each for path in paths or filter(Path.exists, [SCENARIOS]) for each in collect_marked([path])]
    for file, scenarios in groupby(found, key=lambda each: each.file):
        yield ""
        yield f"{file}:"
        for each in scenarios:
            yield from _scenario(each, times.get(each.scenario.name, {}))
    yield from _qualification([each.scenario.name for each in found if QUALIFICATION in each.markers], times)


def last_times(results: Path) -> Times:
    """Return how long each scenario took in the newest run that has it, from the JUnit files of stored runs."""
    times: Times = {}
    for junit in sorted((file for place in RUNS for file in results.glob(place)), key=_begun, reverse=True)[:RUNS_MAX]:
        try:
            with junit.open(encoding="utf-8", errors="replace") as file:
                text = file.read(JUNIT_CHARACTERS_MAX)
        except OSError:
            continue
        suite = SUITE.search(text)
        for case in text.split("<testcase")[1:]:
            found, whole = CASE.search(case), WHOLE.search(case)
            how = f"{found[2]} on {suite[1] if suite else '?'}" if found else ""
            if found and float(found[3]):  # no load began in the others
                took = Took(load_s=float(found[3]), whole_s=float(whole[1]) if whole else None)
                times.setdefault(found[1], {}).setdefault(how, took)
    return times


def _begun(junit: Path) -> str:
    return junit.parent.name  # runs are named after when they began


def _scenario(each: Collected, times: dict[str, Took]) -> Iterator[str]:
    names = [fault.name for fault in each.scenario.faults]
    tiers = [tier for tier in TIERS if tier in each.markers]
    marked = f" ({', '.join(tiers)})" if tiers else ""
    yield f"  {each.scenario.name}: {', '.join(names) or 'no fault'}{marked}"
    needs = [_needs([name for name in names if name in CATALOGUE], known=SUPPLIED)]
    needs += ["vLLM, which serves adapters"] if each.scenario.adapts else []
    if any(needs):
        yield f"    needs {'; '.join(filter(None, needs))}"
    if times:
        yield "    took " + ", ".join(f"{took} {how}" for how, took in sorted(times.items()))


def _qualification(names: Sequence[str], times: Times) -> Iterator[str]:
    """Yield who is required by `harness qualify`, and how long a side of it takes on each engine that was timed."""
    if not names:
        return
    yield ""
    yield f"qualification (the {len(names)} scenarios whose guarded runs harness qualify requires):"
    engines = {
        how.removeprefix(GUARDED_ON) for name in names for how in times.get(name, {}) if how.startswith(GUARDED_ON)
    }
    if not engines:
        yield "  how long they take is known once they were run here"
    for engine in sorted(engines):
        took = [times[name][how] for name in names if (how := f"{GUARDED_ON}{engine}") in times.get(name, {})]
        known_s, load_s = sum(each.known_s for each in took), sum(each.load_s for each in took)
        said = f"{len(took)} of them took {known_s / 60:.1f} min, {load_s / 60:.1f} of it under load"
        if len(took) < len(names):
            said += f"; all would, at that pace, {known_s / len(took) * len(names) / 60:.1f}"
        if without := sum(each.whole_s is None for each in took):
            said += f" (of {without} only the load is known, not the starts of their engines)"
        yield f"  on {engine}: {said}"
    for name in names:
        each = ", ".join(
            f"{took} on {how.removeprefix(GUARDED_ON)}"
            for how, took in sorted(times.get(name, {}).items())
            if how.startswith(GUARDED_ON)
        )
        yield f"  {name:42}{each or 'not timed'}"


def _needs(names: Sequence[str], *, known: Sequence[str]) -> str:
    needs = [need for name in names for need in CATALOGUE[name].needs if need not in known]
    return "; ".join(dict.fromkeys(needs))
