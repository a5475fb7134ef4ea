"""Blocks that were accepted as how fast an engine is, kept by everything that decides its speed."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, stdev

from harness.errors import UsageError
from harness.judge.blocks import (
    BLOCKS,
    KEY_FIELDS,
    MALFORMED,
    Block,
    Declaration,
    difference,
    load_block,
    load_blocks,
    load_declaration,
)
from harness.judge.comparison import judge_run
from harness.judge.paired import Slower
from harness.judge.windows import FUNCTIONALS

BASELINE = "baseline.json"
BLOCK_FILES = ("block.json", "records.npz", "history.jsonl")
CALIBRATED_SD_MAX = 0.04  # of the differences of logarithms; a quantile that scatters more does not decide
CALIBRATION_PAIRS_MIN = 8
ALWAYS_GATING = ("ttft_ms_p50", "tpot_ms_p50")
GATING_IF_STEADY = ("ttft_ms_p95", "e2e_ms_p95")


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """An accepted set of blocks."""

    directory: Path
    key: Mapping[str, str]
    run: str
    arm: str
    blocks: tuple[Block, ...]

    def calibrated_sd(self, metric: str) -> float | None:
        """Return how much ln T differs between neighbouring blocks, as a standard deviation; None: too few blocks."""
        pairs = zip(self.blocks[0::2], self.blocks[1::2], strict=False)
        differences = [difference(first, second, metric) for first, second in pairs]
        if len(differences) < CALIBRATION_PAIRS_MIN or not all(math.isfinite(value) for value in differences):
            return None
        return stdev(differences)

    def gating(self) -> tuple[str, ...]:
        """Return the metrics that decide a comparison here: the medians, and each p95 that is steady enough."""
        steady = [
            name
            for name in GATING_IF_STEADY
            if (sd := self.calibrated_sd(name)) is not None and sd <= CALIBRATED_SD_MAX
        ]
        return (*ALWAYS_GATING, *steady)


def accept(run: Path, into: Path, *, arm: str) -> Path:
    """Keep the blocks of one arm of a comparison as the baseline of its key, in place of an earlier one.

    Raises: UsageError when the run is no comparison, has no such arm, or its verdict forbids it.
    """
    comparison = judge_run(run)
    declared = comparison.declaration
    if comparison.answer is Slower.INVALID or (arm == "new" and comparison.answer is Slower.YES):
        raise UsageError(f'"{run}" cannot be a baseline: slower is {comparison.answer} ({comparison.because})')
    if arm not in {each.name for each in declared.arms}:
        raise UsageError(f'"{run}" has no arm "{arm}"; arms: {", ".join(each.name for each in declared.arms)}')
    key = dict(declared.arm(arm).key)
    folders = [
        run / BLOCKS / block.name
        for block in load_blocks(run, declared)
        if block.arm == arm and not block.is_null and not block.failed_gates
    ]
    place = into / _slug(key)
    partial = into / f".{place.name}.{os.getpid()}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        for folder in folders:
            (partial / BLOCKS / folder.name).mkdir(parents=True)
            for name in BLOCK_FILES:
                shutil.copyfile(folder / name, partial / BLOCKS / folder.name / name)
        shutil.copyfile(run / "comparison.json", partial / "comparison.json")
        text = json.dumps({"key": key, "run": declared.name, "arm": arm}, indent=1)
        (partial / BASELINE).write_text(text, encoding="utf-8")
        earlier = into / f".{place.name}.{os.getpid()}.replaced"
        if place.exists():
            place.rename(earlier)
        partial.rename(place)
        shutil.rmtree(earlier, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return place


def find(baselines: Path, key: Mapping[str, str]) -> Baseline:
    """Return the baseline of a key.

    Raises: UsageError naming what differs from the nearest baseline, or that there is none at all.
    """
    known = _keys(baselines)
    if not known:
        raise UsageError(f'there is no baseline in "{baselines}"; make one: harness baseline accept RUN')
    differing = {place: _differences(key, other) for place, other in known.items()}
    nearest = min(known, key=lambda place: (len(differing[place]), place.name))
    if differing[nearest]:
        raise UsageError(
            f'no baseline in "{baselines}" has this key; the nearest, "{nearest.name}", differs in '
            + "; ".join(differing[nearest])
        )
    return load(nearest)


def load(place: Path) -> Baseline:
    """Read a baseline.

    Raises: UsageError when the directory does not hold one.
    """
    try:
        stored = json.loads((place / BASELINE).read_text(encoding="utf-8"))
        key = {name: str(stored["key"][name]) for name in KEY_FIELDS}
        run, arm = str(stored["run"]), str(stored["arm"])
    except (OSError, *MALFORMED) as error:
        raise UsageError(f'"{place}" is not a baseline: {error}') from error
    declared: Declaration = load_declaration(place)
    folders = sorted((place / BLOCKS).iterdir()) if (place / BLOCKS).is_dir() else []
    blocks = tuple(load_block(folder, declared) for folder in folders)
    return Baseline(directory=place, key=key, run=run, arm=arm, blocks=blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """How a metric stands to its baseline. Taken on different days: no verdict, since machines drift."""

    metric: str
    baseline_ms: float
    now_ms: float

    @property
    def ratio(self) -> float:
        """Return now over baseline."""
        return self.now_ms / self.baseline_ms


def changes(baseline: Baseline, blocks: Sequence[Block]) -> tuple[Change, ...]:
    """Compare the median blocks of a run with those of its baseline.

    Raises: UsageError when the baseline has no blocks, or a time in it is not above zero.
    """
    if not baseline.blocks:
        raise UsageError(f'the baseline "{baseline.directory}" has no blocks, so nothing can be compared with it')
    found = tuple(
        Change(
            metric=name,
            baseline_ms=median(block.values[name] for block in baseline.blocks),
            now_ms=median(block.values[name] for block in blocks),
        )
        for name in FUNCTIONALS
    )
    if wrong := [change for change in found if change.baseline_ms <= 0]:
        raise UsageError(
            f'the baseline "{baseline.directory}" has {wrong[0].baseline_ms:g} ms as {wrong[0].metric}, so nothing can be '
            "compared with it"
        )
    return found


def _keys(baselines: Path) -> dict[Path, dict[str, str]]:
    found = {}
    for file in sorted(baselines.glob(f"*/{BASELINE}")):
        try:
            stored = json.loads(file.read_text(encoding="utf-8"))
            found[file.parent] = {name: str(stored["key"][name]) for name in KEY_FIELDS}
        except (OSError, *MALFORMED):
            continue  # named when it is asked for
    return found


def _differences(key: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    return [f'{name}: "{other[name]}" there, "{key[name]}" here' for name in KEY_FIELDS if key[name] != other[name]]


def _slug(key: Mapping[str, str]) -> str:
    digest = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()[:12]
    return f"{re.sub(r'[^A-Za-z0-9_.-]', '_', key['engine'])}-{digest}"
