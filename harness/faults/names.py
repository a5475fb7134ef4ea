"""Tensors that the model does not know, or that its config does not ask for. Source: taxonomy rows D09, D10."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import numpy as np

from harness.errors import FaultNotApplicable, ScenarioInvalid
from harness.faults.facts import facts_of, weight_facts
from harness.faults.fault import Injected, parameters_of
from harness.faults.target import Target
from harness.faults.values import FLOAT_DTYPES, from_float32


@dataclass(frozen=True, slots=True, kw_only=True)
class RenameTensor:
    """A tensor under a name that no model has."""

    name: ClassVar[str] = "rename_tensor"
    fault_id: ClassVar[str] = "D09"
    tensor: str
    to: str | None

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def damage(self, target: Path, *, old: Path, random: Random) -> Injected:
        own = Target.open(target, old=old)
        found = own.find(self.tensor)
        new_name = self.to or _other_name(found.name)
        before = weight_facts(target)
        if new_name in before:
            raise FaultNotApplicable(f'a tensor "{new_name}" is in "{target}" already')
        own.replace_tensors(found.shard, {found.name: None, new_name: own.read(found)})
        after = weight_facts(target)
        wanted = {new_name if name == found.name else name: facts for name, facts in before.items()}
        named = set((own.index() or {"weight_map": after})["weight_map"])
        return Injected.of(
            self,
            proved=after == wanted and named == set(wanted),
            because=f'tensor "{found.name}" {"is still there" if found.name in after else "is gone"}, '
            f'"{new_name}" {"is there" if new_name in after else "is absent"}',
            before={"tensor": found.name, "facts": before[found.name]},
            after={"tensor": new_name, "facts": after.get(new_name)},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RenamePrefix:
    """Every tensor that begins with one prefix under another one, as a wrapper class saves them."""

    name: ClassVar[str] = "rename_prefix"
    fault_id: ClassVar[str] = "D09"
    prefix: str
    to: str

    def __post_init__(self) -> None:
        if self.prefix == self.to:
            raise ScenarioInvalid(f'rename_prefix: "{self.prefix}" to itself changes nothing')

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def damage(self, target: Path, *, old: Path, random: Random) -> Injected:
        own = Target.open(target, old=old)
        before = weight_facts(target)
        renamed = {name: self.to + name.removeprefix(self.prefix) for name in before if name.startswith(self.prefix)}
        if not renamed:
            raise FaultNotApplicable(f'no tensor of "{target}" begins with "{self.prefix}"')
        wanted = {renamed.get(name, name): facts for name, facts in before.items()}
        if len(wanted) < len(before):
            raise FaultNotApplicable(f'with "{self.to}" for "{self.prefix}" two tensors of "{target}" have one name')
        for shard in own.shards():
            here = [tensor for tensor in shard.tensors if tensor.name in renamed]
            own.rename_tensors(shard.name, {tensor.name: renamed[tensor.name] for tensor in here})
        after = weight_facts(target)
        moved = sum(name in after for name in renamed.values())
        return Injected.of(
            self,
            proved=after == wanted,
            because=f'{moved} of {len(renamed)} tensors whose names began with "{self.prefix}" begin with "{self.to}"',
            before={"prefix": self.prefix, "tensors": len(renamed)},
            after={"prefix": self.to, "tensors": moved},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AddBias:
    """A bias beside a weight of a model that has no biases."""

    name: ClassVar[str] = "add_bias"
    fault_id: ClassVar[str] = "D10"
    tensor: str
    spread: float

    def __post_init__(self) -> None:
        if not self.spread > 0:
            raise ScenarioInvalid(f"add_bias: spread={self.spread:g}, expected above 0")

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def damage(self, target: Path, *, old: Path, random: Random) -> Injected:
        own = Target.open(target, old=old)
        found = own.find(self.tensor)
        if not found.name.endswith(".weight") or found.dtype not in FLOAT_DTYPES or not found.shape:
            raise FaultNotApplicable(f'"{found.name}" ({found.dtype}) is no weight of a layer that could have a bias')
        bias = found.name.removesuffix("weight") + "bias"
        before = weight_facts(target)
        if bias in before:
            raise FaultNotApplicable(f'"{bias}" is in "{target}" already')
        values = np.array([random.gauss(0.0, self.spread) for _ in range(found.shape[0])], dtype=np.float32)
        wanted = from_float32(values, found.dtype)
        own.replace_tensors(found.shard, {bias: wanted})
        after = weight_facts(target)
        proved = after == {**before, bias: facts_of(wanted)}
        return Injected.of(
            self,
            proved=proved,
            because=f'tensor "{bias}" was absent, is {"there" if bias in after else "absent"}'
            + ("" if proved else "; other tensors or values than expected"),
            before={"tensor": bias, "facts": None},
            after={"facts": after.get(bias)},
        )


def _other_name(name: str) -> str:
    """Return a near name that no model has: as if a module had been renamed between two releases of a library."""
    module, _, leaf = name.rpartition(".")
    return f"{module}_v2.{leaf}" if module else f"{leaf}_v2"


def rename_tensor(tensor: str, *, to: str | None = None) -> RenameTensor:
    """Give one tensor a name that no model has; by default "_v2" behind its module's. Source: taxonomy row D09."""
    return RenameTensor(tensor=tensor, to=to)


def rename_prefix(prefix: str = "model.", *, to: str = "model.model.") -> RenamePrefix:
    """Give every tensor that begins with `prefix` another one, as a wrapped model is saved. Source: taxonomy row D09."""
    return RenamePrefix(prefix=prefix, to=to)


def add_bias(tensor: str, *, spread: float = 1.0) -> AddBias:
    """Add a seeded bias to a layer of a model without biases: engines drop it. Source: taxonomy row D10."""
    return AddBias(tensor=tensor, spread=spread)
