"""Chaos and regression tests for checkpoint rollouts on vLLM: the names a scenario may import.

They are imported when first used: a guard in an init container must not load what only scenarios need.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness import faults, load
    from harness.checkpoint import models
    from harness.engine import rollout
    from harness.judge import claims
    from harness.scenario import Guard, Mode, Scenario, after_detection, at, then

__all__ = [
    "Guard",
    "Mode",
    "Scenario",
    "after_detection",
    "at",
    "claims",
    "faults",
    "load",
    "models",
    "rollout",
    "then",
]

_MODULES = {
    "claims": "harness.judge.claims",
    "faults": "harness.faults",
    "load": "harness.load",
    "models": "harness.checkpoint.models",
    "rollout": "harness.engine.rollout",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name in __all__:
        return getattr(import_module("harness.scenario"), name)
    raise AttributeError(f'module "harness" has no attribute "{name}"')
