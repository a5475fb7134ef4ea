"""Names and shapes that a config promises, and what the engine's loader does with a tensor of another shape.

The engine itself is lax: it cuts a tensor that is longer than its layer and does not miss half of a fused parameter
(reference: fault taxonomy D05 and D08), so every dimension is compared for equality here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

LAYER = re.compile(r"^model\.layers\.(\d{1,6})\.(.+)$")
IGNORED = re.compile(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$")  # engines skip these buffers
MAX_EXPERTS = 10_000

Shape = tuple[int, ...]


class ConfigUnusable(ValueError):
    """A config value that decides shapes is absent or no usable number; the message says which."""


class Loading(Enum):
    """How vLLM's loader copies a tensor into its parameter, which decides what becomes of another shape."""

    WHOLE = "whole"  # norms, routers, replicated layers: equal or refused
    ROWS = "rows"  # column parallel: the first rows are taken, any others ignored
    COLUMNS = "columns"  # row parallel: the first columns are taken, any others ignored
    VOCABULARY = "vocabulary"  # embeddings and head: the number of rows is asserted
    EXPERT = "expert"  # fills the first rows and columns of its place; one that is too large is refused


class Fate(Enum):
    """What becomes of a tensor whose shape is not the layer's."""

    REFUSED = "refused"
    CUT = "cut"
    FILLED_IN_PART = "filled in part"


@dataclass(frozen=True, slots=True)
class ExpectedTensor:
    """One tensor that a config promises; those of one layer with the same `group` become one parameter of the engine."""

    shape: Shape
    loading: Loading = Loading.WHOLE
    group: str = ""

    def fate(self, seen: Shape) -> Fate:
        """Return what the engine does with a tensor of another shape under this name.

        Source: the linear, embedding and expert layers of vLLM 0.32.0; what is cut is so in every release since 0.2.5.
        """
        if len(seen) != len(self.shape):
            return Fate.REFUSED
        larger = [number for number, (one, other) in enumerate(zip(seen, self.shape, strict=True)) if one > other]
        smaller = any(one < other for one, other in zip(seen, self.shape, strict=True))
        if self.loading is Loading.EXPERT:
            return Fate.REFUSED if larger or not smaller else Fate.FILLED_IN_PART
        cut = {Loading.ROWS: [0], Loading.COLUMNS: [1]}.get(self.loading)
        return Fate.CUT if larger == cut and not smaller else Fate.REFUSED


@dataclass(frozen=True, slots=True)
class Fusion:
    """Another way to store the same parameters: `stored` in place of all of `usual` (one qkv_proj for three)."""

    usual: tuple[str, ...]
    stored: Mapping[str, ExpectedTensor]


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What one kind of layer holds, by name within the layer, and how else it may be stored."""

    tensors: Mapping[str, ExpectedTensor]
    fusions: tuple[Fusion, ...] = ()

    def stored_as(self, present: Collection[str]) -> Mapping[str, ExpectedTensor]:
        """Return what a layer should hold that stores its parameters in the way in which `present` does."""
        tensors = self.tensors
        for fusion in self.fusions:
            if any(name in present for name in fusion.stored) and not any(name in present for name in fusion.usual):
                tensors = {name: tensor for name, tensor in tensors.items() if name not in fusion.usual}
                tensors |= fusion.stored
        return tensors

    def is_stored_twice(self, name: str, present: Collection[str]) -> bool:
        """Say whether `name` holds in another way what is there in the usual way too."""
        return any(name in fusion.stored and any(usual in present for usual in fusion.usual) for fusion in self.fusions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a config promises: the tensors of every layer (by name within the layer) and of the rest."""

    layers: int
    dense: LayerKind
    sparse: LayerKind | None = None  # layers with experts, where the model has any
    sparse_step: int = 1  # every so many layers; the others are dense
    dense_layers: frozenset[int] = frozenset()
    experts: int = 0  # how many, where every layer with experts has as many and they are stored one by one
    has_experts: bool = False
    of_model: Mapping[str, ExpectedTensor]
    tied: bool
    dropped: frozenset[str] = frozenset()  # promised, but the engine's model has no such parameter
    passed_over: tuple[re.Pattern[str], ...] = (IGNORED,)  # names that may be there and mean nothing

    def kind(self, number: int) -> LayerKind:
        """Return what layer `number` is like."""
        if self.sparse is None or number in self.dense_layers or (number + 1) % self.sparse_step:
            return self.dense
        return self.sparse

    def of_any_layer(self, present: Collection[str]) -> Mapping[str, ExpectedTensor]:
        """Return what some layer may hold, of whatever kind."""
        dense = self.dense.stored_as(present)
        return dense if self.sparse is None else {**dense, **self.sparse.stored_as(present)}

    def shape(self, name: str) -> Shape | None:
        """Return the shape of a tensor by its whole name; None when the config does not promise it."""
        match = LAYER.match(name)
        if match is None:
            tensor = self.of_model.get(name)
        else:
            kind = self.kind(int(match[1]))
            tensor = kind.stored_as((match[2],)).get(match[2]) if int(match[1]) < self.layers else None
        return None if tensor is None else tensor.shape


def architecture(config: Mapping[str, Any]) -> str | None:
    """Return the first architecture that a config names."""
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None


def size(config: Mapping[str, Any], key: str, default: int | None = None, *, limit: int = 2**40) -> int:
    """Return a positive number of the config; `default` where it is absent or null.

    Raises: ConfigUnusable when it is neither.
    """
    value = config.get(key)
    if value is None and default is not None:
        return default
    if type(value) is not int or not 0 < value < limit:
        wanted = "a positive integer" if limit == 2**40 else f"a positive integer below {limit:,}"
        raise ConfigUnusable(f'"{key}" is {str(value)[:60]}, expected {wanted}')
    return value
