"""Adapters that do not belong to the engine or to its base checkpoint, or are not the ones that were meant.

They distort an adapter's directory, not a checkpoint's. Source: fault taxonomy rows U05, U06.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from harness.checkpoint.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from harness.checkpoint.copy import RawTensor
from harness.checkpoint.lora import PREFIX
from harness.checkpoint.manifest import read_checkpoint
from harness.errors import FaultNotApplicable, ScenarioInvalid
from harness.faults.facts import facts_of, read_json, weight_facts
from harness.faults.fault import Injected, parameters_of
from harness.faults.target import Target
from harness.faults.values import from_words, words

FACTORS = (".lora_A.", ".lora_B.")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRank:
    """An adapter of a higher rank than an engine was started for; it computes the same."""

    name: ClassVar[str] = "adapter_rank"
    fault_id: ClassVar[str] = "U05"
    rank: int

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ScenarioInvalid(f"adapter_rank: rank={self.rank}, expected at least 1")

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def distort(self, adapter: Path, *, base: Path) -> Injected:
        own = Target.open(adapter, old=base)
        config = read_json(adapter / ADAPTER_CONFIG)
        was, was_alpha = _rank_and_alpha(adapter, config)
        if self.rank <= was:
            raise FaultNotApplicable(f'"{adapter}" has rank {was}: {self.rank} is not higher')

        def padded(name: str, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            more = self.rank - was  # zeros in both factors add nothing to their product
            return np.pad(values, ((0, more), (0, 0)) if ".lora_A." in name else ((0, 0), (0, more)))

        alpha = was_alpha * self.rank / was
        changed = {**config, "r": self.rank, "lora_alpha": alpha}
        return _rewritten(self, own, padded, changed, f"rank {was}, is of rank {self.rank}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterWidth:
    """An adapter of a base with a larger hidden size."""

    name: ClassVar[str] = "adapter_width"
    fault_id: ClassVar[str] = "U05"
    by: int

    def __post_init__(self) -> None:
        if self.by < 1:
            raise ScenarioInvalid(f"adapter_width: by={self.by}, expected at least 1")

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def distort(self, adapter: Path, *, base: Path) -> Injected:
        own = Target.open(adapter, old=base)

        def wider(name: str, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            axis = 1 if ".lora_A." in name else 0
            return np.concatenate([values, np.take(values, range(self.by), axis=axis, mode="wrap")], axis=axis)

        config = read_json(adapter / ADAPTER_CONFIG)
        return _rewritten(self, own, wider, config, f"its base's widths, is of widths that are {self.by} larger")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterPrefix:
    """An adapter whose tensors are named after modules that the base has not: it changes nothing."""

    name: ClassVar[str] = "adapter_prefix"
    fault_id: ClassVar[str] = "U06"
    prefix: str
    to: str

    def __post_init__(self) -> None:
        if self.prefix == self.to:
            raise ScenarioInvalid(f'adapter_prefix: "{self.prefix}" to itself changes nothing')

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def distort(self, adapter: Path, *, base: Path) -> Injected:
        own = Target.open(adapter, old=base)
        before = weight_facts(adapter)
        names = {name: name.replace(self.prefix, self.to, 1) for name in before if self.prefix in name}
        if not names:
            raise FaultNotApplicable(f'no tensor of "{adapter}" has "{self.prefix}" in its name')
        known = {tensor.name.removesuffix(".weight") for tensor in read_checkpoint(base).tensors}
        modules = {name.removeprefix(PREFIX).partition(".lora_")[0] for name in names.values()}
        if known & modules:
            raise FaultNotApplicable(f'"{base}" has a module "{min(known & modules)}": its name is no unknown one')
        own.rename_tensors(ADAPTER_WEIGHTS, names)
        after = weight_facts(adapter)
        wanted = {names.get(name, name): facts for name, facts in before.items()}
        there = sum(name in after for name in names.values())
        return Injected.of(
            self,
            proved=after == wanted,
            because=f'{there} of {len(names)} tensors with "{self.prefix}" in their names have "{self.to}" there',
            before={"tensors": sorted(names)},
            after={"tensors": sorted(after)},
        )


def _rank_and_alpha(adapter: Path, config: Mapping[str, Any]) -> tuple[int, float]:
    """Return the rank of an adapter and the factor that its product is multiplied with, times its rank.

    Raises: FaultNotApplicable when the product is scaled otherwise, or they are no numbers.
    """
    for name in ("use_rslora", "rank_pattern", "alpha_pattern"):
        if config.get(name):
            raise FaultNotApplicable(
                f'"{adapter}" has "{name}": {config[name]!r}: of a higher rank it would compute another thing'
            )
    for name in ("r", "lora_alpha"):
        if isinstance(config.get(name), bool) or not isinstance(config.get(name), int | float) or config[name] <= 0:
            raise FaultNotApplicable(f'"{adapter}" has "{name}": {config.get(name)!r}, expected a number above 0')
    return int(config["r"]), float(config["lora_alpha"])


def _rewritten(
    fault: AdapterRank | AdapterWidth,
    own: Target,
    change: Any,
    config: Mapping[str, Any],
    became: str,
) -> Injected:
    """Write every tensor and the config anew, and prove it by reading all of it back."""
    before = weight_facts(own.path)
    changes: dict[str, RawTensor | None] = {}
    wanted = dict(before)
    for shard in own.shards():
        for tensor in shard.tensors:
            if len(tensor.shape) != 2 or not any(factor in tensor.name for factor in FACTORS):
                raise FaultNotApplicable(
                    f'"{own.path}" has a tensor "{tensor.name}" of shape {list(tensor.shape)}, expected both factors of '
                    f"matrices alone: {', '.join(FACTORS)}"
                )
            made = from_words(change(tensor.name, words(own.read(tensor))), tensor.dtype)
            changes[tensor.name], wanted[tensor.name] = made, facts_of(made)
    own.replace_tensors(ADAPTER_WEIGHTS, changes)
    own.write(ADAPTER_CONFIG, json.dumps(dict(config), indent=2).encode())
    after = weight_facts(own.path)
    is_told = read_json(own.path / ADAPTER_CONFIG) == config
    return Injected.of(
        fault,
        proved=after == wanted and after != before and is_told,
        because=f"the adapter was of {became}: {sum(after[name] != before.get(name) for name in after)} of {len(after)} "
        f"tensors are other ones, its config {'says so' if is_told else 'does not'}",
        before={"shapes": sorted({str(facts["shape"]) for facts in before.values()})},
        after={"shapes": sorted({str(facts["shape"]) for facts in after.values()}), "rank": config["r"]},
    )


def adapter_rank(rank: int = 64) -> AdapterRank:
    """Pad an adapter with zeros to a higher rank, in which it computes the same. Source: taxonomy row U05."""
    return AdapterRank(rank=rank)


def adapter_width(*, by: int = 32) -> AdapterWidth:
    """Give both factors of an adapter more columns and rows, as of a wider base. Source: taxonomy row U05."""
    return AdapterWidth(by=by)


def adapter_prefix(prefix: str = "model.layers.", *, to: str = "model.language_model.layers.") -> AdapterPrefix:
    """Name an adapter's tensors after modules that the base has not. Source: taxonomy row U06."""
    return AdapterPrefix(prefix=prefix, to=to)
