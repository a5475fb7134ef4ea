"""`harness list`: the faults and the scenarios that are there, what they need, and how long they took when last run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
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
CASE = re.compile(r'name="([\w.-]{1,200})\[(guarded|unguarded)\]" time="([\d.]{1,12})"')
JUNIT_CHARACTERS_MAX = 4_000_000
RUNS_MAX = 200  # of which the newest are read
SUPPLIED = ("old", "a rollout")  # by every scenario
RUNS = ("*/junit.xml", "qualifications/*/*/*/junit.xml")  # below the results
GUARDED_ON = "guarded on "

Times = dict[str, dict[str, float]]  # per scenario: seconds per engine and mode


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
        for name, mode, seconds in CASE.findall(text):
            engine = suite[1] if suite else "?"
            if float(seconds):  # no load began in the others
                times.setdefault(name, {}).setdefault(f"{mode} on {engine}", float(seconds))
    return times


def _begun(junit: Path) -> str:
    return junit.parent.name  # runs are named after when they began


def _scenario(each: Collected, times: dict[str, float]) -> Iterator[str]:
    names = [fault.name for fault in each.scenario.faults]
    tiers = [tier for tier in TIERS if tier in each.markers]
    marked = f" ({', '.join(tiers)})" if tiers else ""
    yield f"  {each.scenario.name}: {', '.join(names) or 'no fault'}{marked}"
    if needs := _needs([name for name in names if name in CATALOGUE], known=SUPPLIED):
        yield f"    needs {needs}"
    if times:
        yield "    took " + ", ".join(f"{seconds:.0f} s {how}" for how, seconds in sorted(times.items()))


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
        known = f"{len(took)} of them took {sum(took) / 60:.1f} min under load"
        rest = (
            ""
            if len(took) == len(names)
            else f"; all would, at that pace, {sum(took) / len(took) * len(names) / 60:.1f}"
        )
        yield f"  on {engine}: {known}{rest}"
    for name in names:
        took_s = ", ".join(
            f"{seconds:.0f} s on {how.removeprefix(GUARDED_ON)}"
            for how, seconds in sorted(times.get(name, {}).items())
            if how.startswith(GUARDED_ON)
        )
        yield f"  {name:42}{took_s or 'not timed'}"


def _needs(names: Sequence[str], *, known: Sequence[str]) -> str:
    needs = [need for name in names for need in CATALOGUE[name].needs if need not in known]
    return "; ".join(dict.fromkeys(needs))
