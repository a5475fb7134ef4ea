"""What a qualification is asked for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from harness.errors import UsageError
from harness.judge.qualification import PARTS, STARTS_MIN
from harness.qualify.side import Side
from harness.settings import MODELS, Settings
from harness.suite import QUALIFICATION, Collected

HALVES = ("screen", "confirm")  # profiles whose answer needs another comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is to be qualified over what, from which scenarios, and what is there already."""

    candidate: Side
    baseline: Side
    scenarios: tuple[Path, ...]
    out: Path
    select: str = ""  # text in the names of the scenarios that are run
    marked: str = QUALIFICATION  # the markers of those that are run, as of pytest's -m; empty: any
    required: tuple[str, ...] = PARTS
    scenarios_runs: tuple[Path, ...] = ()  # finished runs of the candidate
    baseline_runs: tuple[Path, ...] = ()  # finished runs of the baseline
    matrix_runs: tuple[Path, ...] = ()  # of the candidate: directories of runs, or files as in scenarios/expectations
    comparison: Path | None = None
    may_run: bool = True  # run what is not given
    repeat: int = 1  # runs of each guarded scenario, per side
    starts: int = STARTS_MIN
    start_baseline: bool = False  # on the faults of which it has too few recorded starts
    profile: str = "release"  # of the comparison
    compare_model: str | None = None  # what both sides of the comparison serve; None: what the scenarios are given

    def __post_init__(self) -> None:
        unknown = [part for part in self.required if part not in PARTS]
        if not self.required:
            raise UsageError(f"no part is required; parts: {', '.join(PARTS)}")
        if unknown:
            raise UsageError(f'part "{", ".join(unknown)}" is unknown; parts: {", ".join(PARTS)}')
        if self.profile in HALVES:
            raise UsageError(f"a {self.profile} is half of a comparison and qualifies nothing: give another profile")
        if self.compare_model is not None and self.comparison is not None:
            raise UsageError("a comparison that is given has its model: give either it or a model to compare with")
        if self.compare_model is not None and self.compare_model not in MODELS:
            raise UsageError(f'model "{self.compare_model}" is unknown; models: {", ".join(MODELS)}')
        if self.repeat < 1 or self.starts < STARTS_MIN:
            raise UsageError(
                f"repeat must be at least 1 and starts at least {STARTS_MIN}, got {self.repeat} and {self.starts}"
            )

    def selects(self, each: Collected) -> bool:
        """Say whether a scenario is run.

        Raises: UsageError when the markers cannot be read.
        """
        return each.is_named(self.select) and each.is_marked(self.marked)

    def for_comparison(self, settings: Settings) -> Settings:
        """Return the settings with which a side is compared."""
        return (
            settings if self.compare_model is None else replace(settings, model=self.compare_model, old=None, new=None)
        )

    @property
    def selection(self) -> str:
        """Return how scenarios were selected, as on the command line."""
        words = [f'-k "{self.select}"'] if self.select else []
        words += [f'-m "{self.marked}"'] if self.marked else []
        return " ".join(words) or "--all"
