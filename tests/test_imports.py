"""Imports go one way, and what is heavy or patches the world stays where it belongs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import harness

ROOT = Path(harness.__file__).parent
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "clock"),
    ("label", "settings"),
    ("checkpoint",),
    ("guards",),
    ("observe.history",),
    ("engine",),
    ("faults", "load", "observe"),
    ("judge",),
    ("scenario",),
    (
        "report",
        "sweep",
        "watchdog",
        "ground",
        "service",
        "under_way",
        "reload",
        "weight_update",
        "adapter_update",
        "in_place",
        "publication",
        "admission",
        "incident",
        "operations",
        "prediction",
        "reuse",
        "bare_start",
        "handover",
        "timeline",
        "play",
        "adapted",
        "goldens",
        "machine",
        "narrator",
        "requirements",
    ),
    ("run",),
    ("bench", "compare", "damage", "damage_command", "explain", "golden_command", "golden_sources", "suite"),
    (
        "plugin",
        "cli",
        "compare_command",
        "session",
        "recording",
        "listing",
        "agreement_command",
        "matrix_command",
        "expectations_command",
        "qualify",
        "qualify_command",
        "__main__",
    ),
)
# The engine chooser reads the settings, and the layers above read everything below: only upward imports are wrong.
HEAVY = ("locust", "gevent", "docker", "testcontainers", "numpy", "scipy", "pynvml", "hypothesis")


def layer_of(module: str) -> int:
    """Return the position of a module below `harness`; the longest name that fits decides."""
    names = [(name, number) for number, layer in enumerate(LAYERS) for name in layer]
    fitting = [(len(name), number) for name, number in names if module == name or module.startswith(f"{name}.")]
    assert fitting, f'"{module}" is in no layer: add it to LAYERS'
    return max(fitting)[1]


def modules() -> list[tuple[str, Path]]:
    """Return every module below `harness` with its file."""
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        relative = path.relative_to(ROOT).with_suffix("")
        if {"weight_cache_plugin", "weight_transfer_plugin"} & set(relative.parts) or relative.parts == ("__init__",):
            continue
        found.append((".".join(part for part in relative.parts if part != "__init__"), path))
    return found


def imported(path: Path) -> set[str]:
    """Return what a file imports, also inside functions, without what is for type checkers alone."""
    names: set[str] = set()
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize(("module", "path"), modules(), ids=lambda value: value if isinstance(value, str) else "")
def test_imports_go_one_way(module: str, path: Path) -> None:
    own = layer_of(module)
    known = {name for name, _ in modules()}
    for name in imported(path):
        inner = name.removeprefix("harness.")
        if name.startswith("harness.") and inner in known:
            assert layer_of(inner) <= own, f'"{module}" imports "{inner}", which is above it'
            assert not (module.startswith("judge") and inner.startswith("engine")), "judge never imports an engine"


def test_only_the_load_process_imports_locust_and_gevent() -> None:
    users = {
        module
        for module, path in modules()
        if any(name.split(".")[0] in ("locust", "gevent") for name in imported(path))
    }
    names = ("locustfile", "loader", "pulse", "client", "connections", "stamps", "timer")
    assert users == {f"load.{name}" for name in names}


@pytest.mark.parametrize(
    "module",
    [
        "harness.plugin",
        "harness.guards.preflight",
        "harness.guards.publish",
        "harness.guards.purge",
        "harness.guards.canary",
        "harness.guards.commands",
        "harness.guards.canary_command",
        "harness.guards.manifest_command",
        "harness.guards.purge_command",
    ],
)
def test_guards_and_plugin_import_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
