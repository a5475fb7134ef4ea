"""The scenarios that test modules declare, and the markers of the tests that run them."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from harness.errors import HarnessError, UsageError
from harness.scenario import Scenario

QUALIFICATION = "qualification"  # of the scenarios whose guarded runs every qualification requires


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """A scenario, where it is declared, and the pytest markers of the tests that run it."""

    scenario: Scenario
    file: Path
    markers: frozenset[str]

    def is_named(self, text: str) -> bool:
        """Say whether the name of the scenario, or of its module, holds a text."""
        return text in self.scenario.name or text in self.file.stem

    def is_marked(self, expression: str) -> bool:
        """Say whether its markers satisfy an expression as of pytest's -m, such as "core or not nightly"; empty: always.

        Raises: UsageError for anything but markers, and, or, not and parentheses.
        """
        if not expression.strip():
            return True
        try:
            return _holds(ast.parse(expression.strip(), mode="eval").body, self.markers)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise UsageError(
                f'"{expression}" cannot be read as markers; expected words with and, or, not, such as "core or not nightly"'
            ) from None


def collect_marked(paths: Sequence[Path]) -> list[Collected]:
    """Return every scenario that test modules at these paths declare, alone or in tuples, each once.

    Raises: UsageError naming a module that cannot be imported.
    """
    found: dict[str, Collected] = {}
    for each in _collected(paths):
        before = found.get(each.scenario.name, each)
        found[each.scenario.name] = replace(each, markers=each.markers | before.markers)
    return list(found.values())


def collect(paths: Sequence[Path], *, select: str = "") -> list[Scenario]:
    """Return the scenarios at these paths; with `select` only those whose name, or whose module's name, holds that text.

    Raises: UsageError naming a module that cannot be imported.
    """
    return [each.scenario for each in collect_marked(paths) if each.is_named(select)]


def collect_by_file(paths: Sequence[Path]) -> dict[Path, list[Scenario]]:
    """Return the scenarios of each test module at these paths that declares any.

    Raises: UsageError naming a module that cannot be imported.
    """
    by_file: dict[Path, list[Scenario]] = {}
    for each in _collected(paths):
        by_file.setdefault(each.file, []).append(each.scenario)
    return by_file


def _collected(paths: Sequence[Path]) -> Iterator[Collected]:
    for file in (file for path in paths for file in (sorted(path.glob("test_*.py")) if path.is_dir() else [path])):
        module = _imported(file)
        markers = _markers(module)
        for scenario in _declared(vars(module).values()):
            yield Collected(scenario=scenario, file=file, markers=frozenset(markers.get(scenario.name, ())))


def _imported(file: Path) -> ModuleType:
    sys.path.insert(0, str(file.absolute().parent.parent))  # scenarios import what they share as a package
    try:
        if not file.is_file():
            raise UsageError(f'"{file}" does not exist: name scenario files, or directories of them')
        spec = importlib.util.spec_from_file_location(file.stem, file)
        if spec is None or spec.loader is None:
            raise UsageError(f'"{file}" is not a Python module')
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # where a dataclass in it looks up its own module
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except (OSError, ImportError, SyntaxError, HarnessError) as error:
        raise UsageError(f'"{file}" cannot be imported: {error}') from error
    except BaseException as error:  # whatever is written in it, or pytest's own ways to leave a module
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise UsageError(f'"{file}" cannot be imported: {said}') from error
    finally:
        sys.path.pop(0)
    return module


def _declared(values: Iterable[object]) -> list[Scenario]:
    """Return the scenarios among these values and in the tuples among them, each once."""
    found: dict[str, Scenario] = {}
    for value in values:
        for scenario in value if isinstance(value, tuple) else (value,):
            if isinstance(scenario, Scenario):
                found.setdefault(scenario.name, scenario)
    return list(found.values())


def _markers(module: ModuleType) -> dict[str, set[str]]:
    """Return the markers of each scenario: of its module, of the tests that run it, and of its own parameters."""
    of_module = {mark.name for mark in _marks(module)}
    found: dict[str, set[str]] = {}
    for name, test in vars(module).items():
        if name.startswith("test") and inspect.isfunction(test):
            of_test = of_module | {mark.name for mark in _marks(test)}
            for scenario, own in _run_by(test):
                found.setdefault(scenario.name, set()).update(of_test, own)
    return found


def _run_by(test: FunctionType) -> Iterator[tuple[Scenario, set[str]]]:
    """Yield each scenario that a test names or is parametrised with, and the markers of that parameter."""
    for scenario in _declared(test.__globals__.get(name) for name in test.__code__.co_names):
        yield scenario, set()
    for mark in _marks(test):
        for given in mark.args[1] if mark.name == "parametrize" and len(mark.args) > 1 else ():
            values = getattr(given, "values", given)  # pytest.param(...) has marks of its own
            own = {each.name for each in getattr(given, "marks", ())}
            for scenario in _declared([tuple(values) if isinstance(values, list | tuple) else values]):
                yield scenario, own


def _marks(marked: object) -> list[Any]:
    marks = getattr(marked, "pytestmark", [])
    return list(marks) if isinstance(marks, list | tuple) else [marks]


def _holds(node: ast.expr, markers: frozenset[str]) -> bool:
    """Evaluate an expression of markers. Raises: ValueError for anything else."""
    match node:
        case ast.Name(id=name):
            return name in markers
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _holds(operand, markers)
        case ast.BoolOp(op=op, values=values):
            held = [_holds(value, markers) for value in values]
            return all(held) if isinstance(op, ast.And) else any(held)
    raise ValueError(ast.dump(node))
