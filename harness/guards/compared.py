"""The tensors of a checkpoint beside those that its config promises."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from harness.checkpoint.header import Tensor
from harness.guards.expected import LAYER, Expected, ExpectedTensor

SHOWN_NAMES = 5  # of a kind; the others are counted
FIRST_NUMBER = re.compile(r"^(.*?\.\d+)\.")
NUMBER = re.compile(r"\.\d+(?=\.)")


@dataclass(frozen=True)
class Compared:
    """The tensors of a checkpoint beside what its config promises; `of_layer` by number, then by name within the layer."""

    expected: Expected
    of_layer: Mapping[int, Mapping[str, Tensor]]
    of_model: Mapping[str, Tensor]
    is_quantised: bool

    @cached_property
    def promised(self) -> Mapping[int, Mapping[str, ExpectedTensor]]:
        """Return what each layer that is there should hold, stored in the way in which it is."""
        return {
            number: self.expected.kind(number).stored_as(present)
            for number, present in sorted(self.of_layer.items())
            if number < self.expected.layers
        }

    @cached_property
    def absent_blocks(self) -> frozenset[str]:
        """Return the numbered blocks outside of `of_layer` ("transformer.h.3") that are promised and wholly absent."""
        return _blocks(self.expected.of_model) - _blocks(self.of_model)

    @cached_property
    def surplus_blocks(self) -> frozenset[str]:
        """Return the numbered blocks that are not promised, though others of that name are."""
        promised = _blocks(self.expected.of_model)
        alike = {block.rpartition(".")[0] for block in promised}
        return frozenset(b for b in _blocks(self.of_model) - promised if b.rpartition(".")[0] in alike)

    def pairs(self) -> Iterator[tuple[str, str, Tensor, ExpectedTensor]]:
        """Yield (name within its layer, whole name, tensor, what is expected) of every tensor that is promised."""
        for name, wanted in self.expected.of_model.items():
            if name in self.of_model:
                yield name, name, self.of_model[name], wanted
        for number, promised in self.promised.items():
            present = self.of_layer[number]
            for inner, wanted in promised.items():
                tensor = present.get(inner)
                if tensor is not None:
                    yield inner, tensor.name, tensor, wanted


def beside(expected: Expected, tensors: Mapping[str, Tensor], *, is_quantised: bool = False) -> Compared:
    """Sort the tensors of a checkpoint by layer, to be compared."""
    of_layer: dict[int, dict[str, Tensor]] = defaultdict(dict)
    of_model: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        match = LAYER.match(name)
        if match is None:
            of_model[name] = tensor
        else:
            of_layer[int(match[1])][match[2]] = tensor
    return Compared(expected, of_layer, of_model, is_quantised)


def block_of(name: str) -> str | None:
    """Return a name up to its first number; None when it has none."""
    match = FIRST_NUMBER.match(name)
    return None if match is None else match[1]


def numberless(name: str) -> str:
    """Return a name with `*` for every number, alike for all layers and experts."""
    return NUMBER.sub(".*", name)


def _blocks(names: Iterable[str]) -> frozenset[str]:
    return frozenset(block for name in names if (block := block_of(name)) is not None)
