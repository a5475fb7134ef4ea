"""A state that was saved rank by rank for another tensor parallel size. Source: taxonomy row D23."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from harness.checkpoint.copy import RawTensor
from harness.errors import FaultNotApplicable, ScenarioInvalid
from harness.faults.facts import INDEX_NAME, digest_of, facts_of, weight_facts
from harness.faults.fault import Injected, parameters_of
from harness.faults.target import Target
from harness.faults.values import from_float32, from_words, words

FUSED = {
    "self_attn.qkv_proj.": ("self_attn.q_proj.", "self_attn.k_proj.", "self_attn.v_proj."),
    "mlp.gate_up_proj.": ("mlp.gate_proj.", "mlp.up_proj."),
}
BY_COLUMNS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
SCALES = (
    "_k_scale",
    "_v_scale",
    "_q_scale",
    "_prob_scale",
)  # buffers of each attention layer, 1.0 without quantisation
WHOLE = ("norm.weight", *SCALES)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreshardedState:
    """The weights as `--load-format sharded_state` stores them for another number of ranks."""

    name: ClassVar[str] = "presharded_state"
    fault_id: ClassVar[str] = "D23"
    ranks: int

    def __post_init__(self) -> None:
        if self.ranks < 2:
            raise ScenarioInvalid(f"presharded_state: ranks={self.ranks}, expected at least 2")

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def damage(self, target: Path, *, old: Path, random: Random) -> Injected:
        own = Target.open(target, old=old)
        before, old_files = weight_facts(target), own.weight_files()
        wanted: dict[str, Any] = {}
        for part, (name, tensors) in enumerate(_fused(own)):
            for rank in range(self.ranks):
                file = f"model-rank-{rank}-part-{part}.safetensors"
                mine = _of_rank(name, tensors, rank, self.ranks)
                own.add_shard(file, {name: mine})
                wanted[f"{rank}: {name}"] = facts_of(mine)
        for name in (*old_files, *([INDEX_NAME] if (target / INDEX_NAME).exists() else ())):
            own.remove(name)
        files = own.weight_files()
        ranks = {name.split("-")[2] for name in files if name.startswith("model-rank-")}
        after = {
            f"{shard.name.split('-')[2]}: {tensor.name}": own.tensor_facts(tensor)
            for shard in own.shards()
            for tensor in shard.tensors
            if shard.name.startswith("model-rank-")
        }
        is_pure = all(name.startswith("model-rank-") for name in files)
        return Injected.of(
            self,
            proved=after == wanted and is_pure and len(ranks) == self.ranks,
            because=f"{len(files)} weight files hold a state for {len(ranks)} ranks, expected {self.ranks}"
            + ("" if is_pure else ", beside other weight files")
            + ("" if after == wanted else "; other tensors than expected"),
            before={"digest": digest_of(before), "weight_files": len(old_files)},
            after={"digest": digest_of(after), "weight_files": len(files), "ranks": len(ranks)},
        )


def _fused(own: Target) -> Iterator[tuple[str, list[RawTensor]]]:
    """Yield every parameter as the engine names it, with the tensors it is made of."""
    tensors = {tensor.name: tensor for shard in own.shards() for tensor in shard.tensors}
    done: set[str] = set()
    for layer in sorted(
        name.removesuffix("q_proj.weight") for name in tensors if name.endswith("self_attn.q_proj.weight")
    ):
        for scale in SCALES:  # a saved state has them, and one without is refused for that alone
            yield f"{layer}attn.{scale}", [from_float32(np.ones((), np.float32), "F32")]
    for name in tensors:
        if name in done:
            continue
        fused, parts = name, [name]
        for whole, pieces in FUSED.items():
            piece = next((piece for piece in pieces if piece in name), None)
            if piece is not None:
                fused, parts = name.replace(piece, whole), [name.replace(piece, other) for other in pieces]
        absent = [part for part in parts if part not in tensors]
        if absent:
            raise FaultNotApplicable(f'"{absent[0]}" is absent from "{own.path}": "{fused}" cannot be made')
        done.update(parts)
        yield fused, [own.read(tensors[part]) for part in parts]


def _of_rank(name: str, tensors: list[RawTensor], rank: int, ranks: int) -> RawTensor:
    if name.endswith(WHOLE):
        return tensors[0]
    dim = 1 if name.endswith(BY_COLUMNS) else 0
    pieces: list[NDArray[np.unsignedinteger]] = []
    for tensor in tensors:
        if len(tensor.shape) <= dim or tensor.shape[dim] % ranks:
            raise FaultNotApplicable(f'"{name}" {list(tensor.shape)} cannot be split over {ranks} ranks in dim {dim}')
        pieces.append(np.split(words(tensor), ranks, axis=dim)[rank])
    return from_words(np.concatenate(pieces, axis=dim), tensors[0].dtype)


def presharded_state(*, ranks: int = 2) -> PreshardedState:
    """Store the weights of a Llama as a state saved for `ranks` tensor parallel ranks; serve with another number.

    The launch needs `--load-format sharded_state`. Source: taxonomy row D23.
    """
    return PreshardedState(ranks=ranks)
