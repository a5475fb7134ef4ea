"""The canaries of a comparison: what is right for each side, and what a side answers before, in and after a block."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from harness.compare.sides import Side
from harness.engine.engine import Engine
from harness.engine.launch import SERVED_MODEL_NAME
from harness.errors import GoldenUnusable
from harness.goldens import Goldens
from harness.guards.canary import Golden, TokenRows, largest_difference, of_pass
from harness.guards.canary_pass import ask
from harness.guards.engine_api import EngineApi
from harness.narrator import Progress
from harness.observe.history import Request, RequestResult

ASK_LIMIT_S = 60.0


class SideCanaries:
    """Asks the engines of both sides what is known of their weights, and judges what they answered in between.

    Both sides are asked the same prompts, so that a block is the same work for either.
    A side's golden comes from a cold start with its own flags, since these may change answers rightly; for small
    checkpoints of the Llama family our own forward pass has to agree, so that a side that is wrong from its start on
    cannot bless itself.
    """

    def __init__(
        self, sides: Mapping[str, Side], *, api_key: str, seed: int, vocabulary_size: int, progress: Progress
    ) -> None:
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
                self._goldens[side.name] = goldens.of(side.checkpoint, side.launch, vocabulary_size=vocabulary_size)
            except GoldenUnusable as error:
                self.problems.append(f'side "{side.name}" does not answer rightly: {error}')

    @property
    def prompts(self) -> TokenRows:
        """Return what both sides are asked; nothing when no side has a golden."""
        return next((golden.prompts for golden in self._goldens.values()), ())

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

    def differences(self, requests: Iterable[Request], arm: str) -> list[float | None]:
        """Return how far the answers to the canaries of a load are from the golden of a side; None for what has none."""
        golden = self._goldens[arm]
        return [
            largest_difference(of_pass(golden.prompt_logprobs, request.rotation), request.prompt_logprobs)
            if request.result is RequestResult.OK
            else None
            for request in requests
            if request.is_canary
        ]

    def counted(self, arm: str, beside: Sequence[float | None], under_load: Sequence[float | None]) -> dict[str, Any]:
        """Return what the answers before and after a load and those in it were, ready for JSON."""
        tolerance = self._goldens[arm].tolerance
        known = [difference for difference in (*beside, *under_load) if difference is not None]
        worst = max(known, default=0.0)
        return {
            "asked": len(beside) + len(under_load),
            "right": sum(difference <= tolerance for difference in known),
            "wrong": sum(difference > tolerance for difference in known),
            "difference_max": worst if math.isfinite(worst) else None,
            "tolerance": tolerance,
            "asked_under_load": len(under_load),
            "wrong_under_load": sum(difference is not None and difference > tolerance for difference in under_load),
        }
