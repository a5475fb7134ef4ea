"""What is compared, besides the settings of the old side, and how."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from harness.errors import UsageError
from harness.judge.gates import GateLimits
from harness.judge.profiles import profile_named
from harness.judge.slo import Slo


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of one comparison.

    Raises: UsageError naming what cannot be used.
    """

    profile: str = "nightly"
    same: bool = False  # the old checkpoint on both sides
    environment: tuple[tuple[str, str], ...] = ()  # of both sides
    new_arguments: tuple[str, ...] = ()  # launch arguments that only the new side has
    new_environment: tuple[tuple[str, str], ...] = ()
    new_image: str | None = None
    new_python: Path | None = None
    block_s: float = 20.0
    warm_s: float = 5.0
    prompt_tokens: int = 24
    output_tokens: int = 16
    fresh: bool | None = None  # engines of its own for every pair, or one start of each side; None: as the profile says
    blocks_per_arm: int | None = None  # in each pair; None: as the profile says
    blocks_per_start: int | None = None  # with fresh starts; None: as the profile says, or 1 with `blocks_per_arm`
    null_every: int = 4  # pairs, after which a pair of the negative control follows; 0: none
    spare_pairs: int = 4
    canaries: bool = True  # ask each side for answers that are known, before, in and after each block
    family: int = 1
    failure_budget: float = 0.01
    slo: Slo | None = None
    limits: GateLimits = field(default_factory=GateLimits)
    gating: tuple[str, ...] | None = None  # None: the medians, and each p95 that the old side's baseline finds steady
    baselines: Path | None = None
    confirms: Path | None = None

    def __post_init__(self) -> None:
        profile_named(self.profile)
        for name, value, least in (("block_s", self.block_s, 0.5), ("warm_s", self.warm_s, 0.0)):
            if not least <= value < 36_000:
                raise UsageError(f"{name} must be from {least:g} to 36000 s, got {value:g}")
        for name, number, least in (
            ("null_every", self.null_every, 0),
            ("spare_pairs", self.spare_pairs, 0),
            ("family", self.family, 1),
            ("blocks_per_arm", 1 if self.blocks_per_arm is None else self.blocks_per_arm, 1),
            ("blocks_per_start", 1 if self.blocks_per_start is None else self.blocks_per_start, 1),
        ):
            if number < least:
                raise UsageError(f"{name} must be at least {least}, got {number}")
        if self.blocks_per_start is not None and not self.is_fresh:
            raise UsageError("blocks_per_start needs fresh starts (--fresh): otherwise each side is started once")
        if self.arm_blocks % self.start_blocks:
            raise UsageError(
                f"blocks_per_arm is {self.arm_blocks} and blocks_per_start {self.start_blocks}: starts would be cut short"
            )
        if not 0 < self.failure_budget < 1:
            raise UsageError(f"failure_budget must be between 0 and 1, got {self.failure_budget:g}")
        if (self.profile == "confirm") != (self.confirms is not None):
            raise UsageError(
                "the profile confirm needs the run it confirms (--confirms RUN), and no other profile takes one"
            )

    @property
    def is_fresh(self) -> bool:
        """Say whether engines are started anew in every pair."""
        return profile_named(self.profile).fresh if self.fresh is None else self.fresh

    @property
    def start_blocks(self) -> int:
        """Return how many blocks each fresh start serves; 1 where each side is started once."""
        if self.blocks_per_start is not None:
            return self.blocks_per_start
        return profile_named(self.profile).blocks_per_start if self.is_fresh and self.blocks_per_arm is None else 1

    @property
    def arm_blocks(self) -> int:
        """Return how many blocks each arm has in a pair."""
        if self.blocks_per_arm is not None:
            return self.blocks_per_arm
        profile = profile_named(self.profile)
        return profile.starts_per_arm * self.start_blocks if self.is_fresh else profile.blocks_per_arm
