"""Hands the engine that one scenario leaves running to the next one: a start costs more than anything else in a run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from harness.checkpoint.manifest import layout_of, weights_id
from harness.checkpoint.models import default_cache
from harness.engine.engine import Engine, HandedOn
from harness.ground import Ground
from harness.guards.canary import Answer
from harness.judge.moments import recovery_at_ns
from harness.operations import Operations
from harness.scenario import Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class _Warm:
    """An engine that a scenario left running on an undamaged checkpoint."""

    engine: Engine
    log_path: Path  # where its log lies once the scenario has ended
    weights_id: str
    flags: tuple[str, ...]
    root: Path  # where it reads checkpoints


class Handover:
    """Holds at most one running engine between two scenarios of a run."""

    def __init__(self) -> None:
        self._warm: _Warm | None = None

    def parts(self) -> frozenset[str]:
        """Return what belongs to the engine that is held, as a sweep lists it."""
        return frozenset() if self._warm is None else self._warm.engine.parts()

    def in_the_fitting_direction(self, scenario: Scenario) -> Scenario:
        """Let the rollouts of a run go back and forth: what one leaves running is what the next one begins with."""
        if self._warm is None or scenario.old.name == scenario.new.name:
            return scenario
        old, new = scenario.old.build(default_cache()), scenario.new.build(default_cache())
        # Between checkpoints of different shapes a fault is another one in the other direction.
        if self._warm.weights_id == weights_id(new) and layout_of(old) == layout_of(new):
            return replace(scenario, old=scenario.new, new=scenario.old)
        return scenario

    def take(self, ground: Ground) -> HandedOn | None:
        """Return the engine that is held if it is what this scenario begins with; else end it."""
        warm, self._warm = self._warm, None
        if warm is None:
            return None
        fits = (
            warm.weights_id == weights_id(ground.old)
            and warm.flags == ground.launch.flags()
            and ground.launch.weight_cache is None
            and (not ground.scenario.reloads or warm.root == ground.launch.checkpoint_root)
            and warm.engine.exit_code() is None
        )
        if fits:
            return HandedOn(warm.engine, f"{Answer.OLD}-1", warm.log_path)
        warm.engine.stop()
        return None

    def keep(self, ground: Ground, operations: Operations) -> None:
        """Hold the engine that serves the undamaged new checkpoint, if recovery was seen to be complete."""
        if recovery_at_ns(ground.recorder.snapshot()) is None:
            return
        engine = operations.hand_on()
        if engine is not None:
            self.hold(engine, ground, source=ground.new)

    def hold(self, engine: Engine, ground: Ground, *, source: Path) -> None:
        """Hold an engine that serves `source` as it would be started for another scenario."""
        self._warm = _Warm(
            engine=engine,
            log_path=ground.recorder.path.parent / "logs" / engine.log_path.name,
            weights_id=weights_id(source),
            flags=ground.launch.flags(),
            root=ground.launch.checkpoint_root,
        )
