"""Records at which layer an engine release notices each fault: from stored runs, or by bare starts without load."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from harness.errors import HarnessError, UsageError
from harness.judge.expectations import load_expectations, record_start
from harness.judge.matrix import as_markdown, load_releases
from harness.judge.moments import Layer, detection
from harness.report.store import load_run
from harness.run import Run
from harness.scenario import Scenario
from harness.settings import Settings

Tell = Callable[[str], None]


def accept_runs(runs: Sequence[Path], into: Path, tell: Tell) -> int:
    """Record what the unguarded scenarios of stored runs saw, where every precondition held; return how many.

    Raises: UsageError when a directory is not a run.
    """
    accepted = 0
    for directory in runs:
        run = load_run(directory)
        for record in run.scenarios:
            proved = all(finding.verdict == "held" for finding in record.findings if finding.is_precondition)
            if record.mode != "unguarded" or not proved:
                continue
            seen = detection(record.history)
            layer = Layer(record.layer)
            record_start(into, run.engine_label, record.name, layer=layer, run=run.name, seen=seen.because)
            tell(f"{run.engine_label}: {record.name}: {layer}: {seen.because}")
            accepted += 1
    return accepted


def measure_starts(
    paths: Sequence[Path], settings: Settings, into: Path, *, starts: int, select: str, tell: Tell
) -> tuple[int, list[str]]:
    """Start an engine on every faulty checkpoint until `starts` starts are recorded; return how many were made.

    Also returned is a sentence per start that failed: nothing is recorded of it.
    Raises: UsageError when there are no scenarios at the paths.
    """
    scenarios = collect(paths, select=select)
    if not scenarios:
        raise UsageError(f'no scenario whose name holds "{select}" at {", ".join(str(path) for path in paths)}')
    made, failed = 0, []
    with Run(settings, progress=tell, expectations=into) as run:
        for scenario in scenarios:
            known = load_expectations(into, run.identity.label).get(scenario.name)
            for number in range(1, starts + 1 - (0 if known is None else len(known.layers))):
                try:
                    seen, place = run.start_only(scenario, number)
                except HarnessError as error:
                    failed.append(f"{scenario.name}: {error}")
                    continue
                name = f"{run.directory.name}/{place.name}"
                record_start(into, run.identity.label, scenario.name, layer=seen.layer, run=name, seen=seen.because)
                tell(f"{scenario.name}: {seen.layer}: {seen.because}")
                made += 1
    return made, failed


def write_matrix(paths: Sequence[Path], expectations: Path, engine: str, page: Path) -> int:
    """Write the page that shows which release of an engine notices which fault; return how many releases it shows.

    Raises: HarnessError when nothing was recorded of this engine; UsageError when there are no scenarios at the paths.
    """
    families = {
        re.sub(r"^test_|_on_restart$", "", file.stem): [scenario.name for scenario in scenarios]
        for file, scenarios in collect_by_file(paths).items()
    }
    if not families:
        raise UsageError(f"no scenarios at {', '.join(str(path) for path in paths)}")
    releases = load_releases(expectations, engine)
    page.write_text(as_markdown(releases, families), encoding="utf-8")
    return len(releases)


def collect(paths: Sequence[Path], *, select: str = "") -> list[Scenario]:
    """Return the scenarios that test modules at these paths declare, alone or in tuples, each once.

    With `select` only those whose name, or whose module's name, holds that text.

    Raises: UsageError naming a module that cannot be imported.
    """
    found = {
        scenario.name: scenario
        for file, scenarios in collect_by_file(paths).items()
        for scenario in scenarios
        if select in scenario.name or select in file.stem
    }
    return list(found.values())


def collect_by_file(paths: Sequence[Path]) -> dict[Path, list[Scenario]]:
    """Return the scenarios of each test module at these paths that declares any.

    Raises: UsageError naming a module that cannot be imported.
    """
    files = [file for path in paths for file in (sorted(path.glob("test_*.py")) if path.is_dir() else [path])]
    return {file: scenarios for file in files if (scenarios := _declared_in(file))}


def _declared_in(file: Path) -> list[Scenario]:
    sys.path.insert(0, str(file.absolute().parent.parent))  # scenarios import what they share as a package
    try:
        spec = importlib.util.spec_from_file_location(file.stem, file)
        if spec is None or spec.loader is None:
            raise UsageError(f'"{file}" is not a Python module')
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # where a dataclass in it looks up its own module
        spec.loader.exec_module(module)
    except (OSError, ImportError, SyntaxError) as error:
        raise UsageError(f'"{file}" cannot be imported: {error}') from error
    finally:
        sys.path.pop(0)
    found: dict[str, Scenario] = {}
    for value in vars(module).values():
        for scenario in value if isinstance(value, tuple) else (value,):
            if isinstance(scenario, Scenario):
                found.setdefault(scenario.name, scenario)
    return list(found.values())
