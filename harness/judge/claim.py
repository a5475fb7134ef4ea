"""What a claim is: a name with parameters, so that it is stored with the run and can be judged anew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.judge.moments import Layer
from harness.judge.verdict import Verdict

Judgement = tuple[Verdict, str, tuple[str, ...]]  # verdict, sentence, evidence
PAIRED_ONLY = "latency_not_regressed"
WHY_PAIRED_ONLY = (
    f"{PAIRED_ONLY} needs paired, interleaved blocks (harness compare): within one scenario the old checkpoint runs before "
    "the new one, and a machine that drifts in between looks like a regression; claim latency_back_in_band(factor, windows) here"
)


@dataclass(frozen=True, slots=True)
class Claim:
    """A statement about a history, by name and parameters."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def with_patience(self, factor: float) -> Claim:
        """Return the same claim with its time limits multiplied."""
        limits = {name: value * factor for name, value in self.parameters.items() if name in ("within_s", "limit_s")}
        return Claim(self.name, {**self.parameters, **limits})

    def __str__(self) -> str:
        shown = ", ".join(f"{key}={value!r}" for key, value in self.parameters.items())
        return f"{self.name}({shown})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What a claim needs besides the history; stored with the run."""

    scenario: str
    engine_label: str
    expected_layers: tuple[Layer, ...] = ()  # one per recorded start of this scenario on this engine release
    faults: tuple[str, ...] = ()  # the declared ones: each has to prove itself
    replaced: tuple[
        str, ...
    ] = ()  # what this run replaced of what the scenario declares: recorded starts are without that
