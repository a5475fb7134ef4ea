"""The canaries of a comparison: what is right for each side, and what a side answers before and after a block."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from harness.compare.sides import Side
from harness.engine.engine import Engine
from harness.engine.launch import SERVED_MODEL_NAME
from harness.errors import GoldenUnusable
from harness.goldens import Goldens
from harness.guards.canary import Golden, largest_difference, of_pass
from harness.guards.canary_pass import ask
from harness.guards.engine_api import EngineApi
from harness.narrator import Progress

ASK_LIMIT_S = 60.0


class SideCanaries:
    """Asks the engines of both sides what is known of their weights, outside the load: the load stays the same work.

    A side's golden comes from a cold start with its own flags, since these may change answers rightly; for small
    checkpoints of the Llama family our own forward pass has to agree, so that a side that is wrong from its start on
    cannot bless itself.
    """

    def __init__(self, sides: Mapping[str, Side], *, api_key: str, seed: int, progress: Progress) -> None:
        """Measure what is not known yet; a side without a golden is in `problems`.

        Raises: EngineNotReady when an engine does not start; HarnessError when it gives no usable answer.
        """
        self.problems: list[str] = []
        self._api_key = api_key
        self._goldens: dict[str, Golden] = {}
        self._passes = 0
        for side in sides.values():
            goldens = Goldens(side.starter, side.identity, api_key=api_key, seed=seed, progress=progress)
            try:
                self._goldens[side.name] = goldens.of(side.checkpoint, side.launch)
            except GoldenUnusable as error:
                self.problems.append(f'side "{side.name}" does not answer rightly: {error}')

    def ask(self, engine: Engine, arm: str) -> float | None:
        """Return how far the next answer of an engine is from the golden of its side; None when there was none."""
        golden = self._goldens[arm]
        rotation, self._passes = self._passes, self._passes + 1
        api = EngineApi(url=engine.endpoint, api_key=self._api_key, limit_s=ASK_LIMIT_S)
        try:
            rows = ask(api, SERVED_MODEL_NAME, golden.prompts, rotation=rotation).rows
        except (OSError, ValueError):
            return None
        return largest_difference(of_pass(golden.prompt_logprobs, rotation), rows)

    def counted(self, arm: str, differences: Sequence[float | None]) -> dict[str, Any]:
        """Return what these answers were, ready for JSON."""
        tolerance = self._goldens[arm].tolerance
        known = [difference for difference in differences if difference is not None]
        worst = max(known, default=0.0)
        return {
            "asked": len(differences),
            "right": sum(difference <= tolerance for difference in known),
            "wrong": sum(difference > tolerance for difference in known),
            "difference_max": worst if math.isfinite(worst) else None,
            "tolerance": tolerance,
        }
