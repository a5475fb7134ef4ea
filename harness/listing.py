"""`harness list`: the faults and the scenarios that are there, what they need, and how long they took when last run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from harness.errors import UsageError
from harness.faults import FAULTS
from harness.faults.catalogue import CATALOGUE
from harness.faults.documents import gaps, is_damage, rows_of, summary_of
from harness.faults.rows import ROWS
from harness.recording import collect_by_file
from harness.scenario import Scenario

SCENARIOS = Path("scenarios")
TIERS = ("docker", "gpu", "slow", "nightly", "qualification")
MARK = re.compile(r"\bpytest\.mark\.(\w+)")
SUITE = re.compile(r'<testsuite name="rollout on ([^"]{1,100})"')
CASE = re.compile(r'name="([\w.-]{1,200})\[(guarded|unguarded)\]" time="([\d.]{1,12})"')
JUNIT_CHARACTERS_MAX = 4_000_000
RUNS_MAX = 200  # of which the newest are read
SUPPLIED = ("old", "a rollout")  # by every scenario

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
    for path in paths or filter(Path.exists, [SCENARIOS]):
        for file, scenarios in collect_by_file([path]).items():
            yield ""
            yield f"{file}{_tiers(file)}:"
            for scenario in scenarios:
                yield from _scenario(scenario, times.get(scenario.name, {}))


def last_times(results: Path) -> Times:
    """Return how long each scenario took in the newest run that has it, from the JUnit files of stored runs."""
    times: Times = {}
    for junit in sorted(results.glob("*/junit.xml"), reverse=True)[:RUNS_MAX]:
        try:
            with junit.open(encoding="utf-8", errors="replace") as file:
                text = file.read(JUNIT_CHARACTERS_MAX)
        except OSError:
            continue
        suite = SUITE.search(text)
        for name, mode, seconds in CASE.findall(text):
            engine = suite[1] if suite else "?"
            times.setdefault(name, {}).setdefault(f"{mode} on {engine}", float(seconds))
    return times


def _scenario(scenario: Scenario, times: dict[str, float]) -> Iterator[str]:
    names = [fault.name for fault in scenario.faults]
    yield f"  {scenario.name}: {', '.join(names) or 'no fault'}"
    if needs := _needs([name for name in names if name in CATALOGUE], known=SUPPLIED):
        yield f"    needs {needs}"
    if times:
        yield "    took " + ", ".join(f"{seconds:.0f} s {how}" for how, seconds in sorted(times.items()))


def _needs(names: Sequence[str], *, known: Sequence[str]) -> str:
    needs = [need for name in names for need in CATALOGUE[name].needs if need not in known]
    return "; ".join(dict.fromkeys(needs))


def _tiers(file: Path) -> str:
    """Return the tiers that tests of a file are marked with: they are skipped, with a reason, where those are absent."""
    try:
        marks = set(MARK.findall(file.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f'"{file}" cannot be read: {error}') from error
    tiers = [tier for tier in TIERS if tier in marks]
    return f" (some need {', '.join(tiers)})" if tiers else ""
