"""Blocks of load on disk: what was declared of a comparison, and what each block of it shows.

results/<run>/comparison.json
results/<run>/blocks/<number>-<arm>/{block.json, records.npz, history.jsonl, load/}
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from harness.errors import HarnessError, UsageError
from harness.judge.canaries import Canaries
from harness.judge.gates import RETIRED_GATES, Gate, GateLimits, block_gates, is_drifting, lag_of_margin
from harness.judge.profiles import Profile, profile_named
from harness.judge.records import Records
from harness.judge.slo import Slo
from harness.judge.windows import (
    FUNCTIONALS,
    Availability,
    availability,
    goodput_ratio,
    is_coalesced,
    latencies,
    spike,
)
from harness.observe.history import Event, RequestResult, load_history

DECLARATION = "comparison.json"
BLOCKS = "blocks"
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
KEY_FIELDS = ("engine", "build", "model", "flags", "hardware", "driver", "load")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One of the two sides of a comparison, or the second start of the old one (`null`), and what decides its speed."""

    name: str  # "old", "new" or "null"
    key: Mapping[str, str]  # KEY_FIELDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """What was decided before the first block; nothing of it depends on what was seen."""

    name: str
    profile: str
    gating: tuple[str, ...]  # the metrics that decide; all others are reported
    arms: tuple[Arm, ...]
    schedule_sha256: str
    fresh: bool  # engines of its own for every pair
    started_at: str
    command: str = ""
    family: int = 1  # comparisons of a release that are judged together
    spare_pairs: int = 4  # pairs that may be void and repeated
    failure_budget: float = 0.01
    slo: Slo | None = None
    confirms: str = ""  # the run whose `yes` this one confirms or not
    limits: GateLimits = field(default_factory=GateLimits)
    blocks_per_arm: int = 1  # in each pair
    blocks_per_start: int = 1  # with fresh starts
    problems: tuple[str, ...] = ()  # what made it invalid before its first block, such as a side with wrong answers

    @property
    def rule(self) -> Profile:
        """Return the profile."""
        return profile_named(self.profile)

    def arm(self, name: str) -> Arm:
        """Return an arm.

        Raises: HarnessError when there is none of that name.
        """
        for arm in self.arms:
            if arm.name == name:
                return arm
        raise HarnessError(f'comparison "{self.name}" has no arm "{name}", only {", ".join(a.name for a in self.arms)}')

    def as_json(self) -> dict[str, Any]:
        """Return everything for `comparison.json`."""
        return {**asdict(self), "slo": None if self.slo is None else self.slo.as_json()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One block and what it shows; `pair` counts from 0, and `is_null` marks the negative control."""

    number: int
    arm: str
    pair: int
    is_null: bool
    values: Mapping[str, float]  # of every functional, milliseconds
    counts: Mapping[RequestResult, int]
    gates: tuple[Gate, ...]
    events: tuple[Event, ...]
    is_drifting: bool
    is_coalesced: bool
    availability: Availability
    goodput: float | None
    peak_ratio: float | None  # highest 2 s median of the time to first token, as a multiple of the block median
    canaries: Canaries | None
    schedule_sha256: str
    notes: tuple[str, ...]
    digest: str = ""  # of when its arrivals were due and ended: no other block has it

    @property
    def name(self) -> str:
        """Return the name of its directory."""
        return block_name(self.number, self.arm)

    @property
    def failed_gates(self) -> tuple[Gate, ...]:
        """Return the gates that void it."""
        return tuple(gate for gate in self.gates if not gate.passed)


def block_name(number: int, arm: str) -> str:
    """Return the name of a block's directory."""
    return f"{number:03d}-{arm}"


def is_comparison(run: Path) -> bool:
    """Say whether a run is a comparison of blocks, and not one of scenarios."""
    return (run / DECLARATION).is_file()


def load_declaration(run: Path) -> Declaration:
    """Read what was declared of a comparison.

    Raises: UsageError when the directory does not hold one.
    """
    try:
        stored = json.loads((run / DECLARATION).read_text(encoding="utf-8"))
        arms = tuple(
            Arm(name=str(arm["name"]), key={name: str(arm["key"][name]) for name in KEY_FIELDS})
            for arm in stored["arms"]
        )
        stored = {"blocks_per_arm": 1, "blocks_per_start": 1, "problems": [], **stored}  # of earlier releases
        known = {name: stored[name] for name in Declaration.__slots__}
        declared = Declaration(
            **{
                **known,
                "arms": arms,
                "gating": tuple(str(name) for name in stored["gating"]),
                "problems": tuple(str(problem) for problem in stored["problems"]),
                "slo": None if stored["slo"] is None else Slo(**stored["slo"]),
                "limits": GateLimits().with_changes(
                    {name: limit for name, limit in stored["limits"].items() if name not in RETIRED_GATES}
                ),
            }
        )
        _require_usable(declared)
        return declared
    except OSError as error:
        raise UsageError(f'"{run}" is not a comparison: {error.strerror}: {error.filename}') from error
    except (HarnessError, *MALFORMED) as error:
        raise UsageError(f'"{run / DECLARATION}" does not declare a comparison: {error}') from error


def load_blocks(run: Path, declared: Declaration) -> tuple[Block, ...]:
    """Measure every block of a comparison that came to its end, in the order they were run.

    Raises: HarnessError naming the block that cannot be read.
    """
    folders = sorted((run / BLOCKS).iterdir()) if (run / BLOCKS).is_dir() else []
    return tuple(load_block(folder, declared) for folder in folders if (folder / "block.json").is_file())


def load_block(folder: Path, declared: Declaration) -> Block:
    """Measure one stored block.

    Raises: HarnessError when it cannot be read.
    """
    try:
        stored = json.loads((folder / "block.json").read_text(encoding="utf-8"))
        records = Records.load(folder / "records.npz")
        events = load_history(folder / "history.jsonl").events
        window = records.between(int(stored["window_ns"][0]), int(stored["window_ns"][1]))
        users = window.of_users()
        seen = latencies(users)
        peak, canaries = spike(users, users), stored.get("canaries")
        return Block(
            number=int(stored["number"]),
            arm=str(stored["arm"]),
            pair=int(stored["pair"]),
            is_null=bool(stored["is_null"]),
            values={name: measure(seen) for name, measure in FUNCTIONALS.items()},
            counts=users.counts(),
            gates=block_gates(
                records,
                events,
                stored["report"],
                lag_of_margin=lag_of_margin(users, declared.gating, declared.rule.margin),
                limits=declared.limits,
                where=f"block {folder.name}",
            ),
            events=events,
            is_drifting=is_drifting(users),
            is_coalesced=is_coalesced(users),
            availability=availability(users),
            goodput=None if declared.slo is None else goodput_ratio(users, declared.slo),
            peak_ratio=None if peak is None else peak.peak_ratio,
            canaries=None if canaries is None else Canaries.from_json(canaries),
            schedule_sha256=str(stored["schedule_sha256"]),
            notes=tuple(str(note) for note in stored["notes"]),
            digest=records.digest(),
        )
    except (OSError, *MALFORMED) as error:
        raise HarnessError(f'block "{folder}" cannot be read: {type(error).__name__}: {error}') from error


def difference(old: Block, new: Block, metric: str) -> float:
    """Return ln T(B) - ln T(A) of one pair; not finite when a quantile is infinite or nothing was measured."""
    before, after = old.values[metric], new.values[metric]
    if not (math.isfinite(before) and math.isfinite(after) and before > 0 and after > 0):
        return math.nan
    return math.log(after) - math.log(before)


def _require_usable(declared: Declaration) -> None:
    _ = declared.rule
    unknown = [name for name in declared.gating if name not in FUNCTIONALS]
    if unknown or not declared.gating:
        raise ValueError(
            f"it decides by {', '.join(declared.gating) or 'no metric'}; metrics: {', '.join(FUNCTIONALS)}"
        )
    if {"old", "new"} - {arm.name for arm in declared.arms}:
        raise ValueError('it has no arm "old" or no arm "new"')
    for name, kind in (
        ("name", str),
        ("schedule_sha256", str),
        ("confirms", str),
        ("started_at", str),
        ("family", int),
        ("blocks_per_arm", int),
        ("blocks_per_start", int),
    ):
        if not isinstance(getattr(declared, name), kind):
            raise ValueError(f"{name} is {getattr(declared, name)!r}")
    if (
        min(declared.family, declared.blocks_per_arm, declared.blocks_per_start) < 1
        or declared.spare_pairs < 0
        or not 0 < declared.failure_budget < 1
    ):
        raise ValueError("family, blocks_per_arm, blocks_per_start, spare_pairs or failure_budget is out of range")
