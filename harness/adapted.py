"""A scenario as the settings of a run want it: other checkpoints, more patience, another rate."""

from __future__ import annotations

from dataclasses import replace

from harness.checkpoint.models import directory, smollm2
from harness.scenario import Scenario
from harness.settings import Settings

SMOLLM2_FINE_TUNE_SEED = 2
MODEL_RATE_RPS = 1.0  # a 135 M model on one core answers 28 tokens/s alone: more would be a queue, not a rollout


def adapted(scenario: Scenario, settings: Settings) -> Scenario:
    """Replace the declared checkpoints by those the user asked for, and with them the rate and the time limits."""
    rate_rps = settings.rate_rps
    if settings.old is not None and settings.new is not None:
        scenario = replace(scenario, old=directory(settings.old), new=directory(settings.new))
        rate_rps = rate_rps or MODEL_RATE_RPS
    elif settings.model == "smollm2":
        scenario = replace(scenario, old=smollm2(), new=smollm2(seed=SMOLLM2_FINE_TUNE_SEED))
        rate_rps = rate_rps or MODEL_RATE_RPS
    if settings.patience != 1:
        scenario = scenario.with_patience(settings.patience)
    return scenario if rate_rps is None else scenario.at_rate(rate_rps)
