"""Weights of the previous release left in the directory, in a place where the engine prefers them.

Source: taxonomy rows D11, D13, D14, D17, D22.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import numpy as np

from harness.checkpoint.copy import RawTensor
from harness.errors import FaultNotApplicable, ScenarioInvalid
from harness.faults.facts import (
    CONFIG_NAME,
    INDEX_NAME,
    digest_of,
    facts_of,
    file_facts,
    loaded_weights_id,
    read_shards,
    read_tensor,
    weight_facts,
    weight_files,
)
from harness.faults.fault import Injected, parameters_of
from harness.faults.target import Target
from harness.faults.torch_file import facts_in_torch_file, torch_file_facts
from harness.faults.values import from_float32, to_float32

BIN_NAME = "pytorch_model.bin"
NUMPY_DIRECTORY = "np"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftoverShards:
    """Old weight files beside the new ones and no weight index: every file is read, and of two equal names the last wins."""

    name: ClassVar[str] = "leftover_shards"
    fault_id: ClassVar[str] = "D11"
    prefix: str

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def damage(self, target: Path, *, old: Path, random: Random) -> Injected:
        own = Target.open(target, old=old)
        before, new_files = loaded_weights_id(target), own.weight_files()
        brought = {name: self.prefix + name for name in _old_files(old)}
        for name in brought.values():
            if Path(name).name != name or (target / name).exists():
                raise FaultNotApplicable(f'"{name}" is taken in "{target}", or no file name: choose another prefix')
        if (target / INDEX_NAME).exists():
            own.remove(INDEX_NAME)
        for name, new_name in brought.items():
            own.bring(old / name, new_name)
        after, files = loaded_weights_id(target), own.weight_files()
        has_index = (target / INDEX_NAME).exists()
        is_complete = set(files) == {*new_files, *brought.values()} and all(
            file_facts(old / name) == file_facts(target / new_name) for name, new_name in brought.items()
        )
        return Injected.of(
            self,
            proved=is_complete and not has_index and after not in (None, before),
            because=f"{len(files)} weight files lie side by side ({len(new_files)} are the new ones) "
            f"{'with' if has_index else 'without'} a weight index; an engine would load {after}, "
            f"the new checkpoint is {before}, the old one {loaded_weights_id(old)}",
            before={"weights_id": before, "weight_files": list(new_files)},
            after={"weights_id": after, "weight_files": list(files), "old_weights_id": loaded_weights_id(old)},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftoverConsolidated:
    """Old weights in `consolidated*.safetensors` beside the new ones: engines take that set and no other."""

    name: ClassVar[str] = "leftover_consolidated"
    fault_id: ClassVar[str] = "D14"

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def damage(self, target: Path, *, old: Path, random: Random) -> Injected:
        own = Target.open(target, old=old)
        before, wanted = loaded_weights_id(target), loaded_weights_id(old)
        names = _old_files(old)
        brought = (
            ["consolidated.safetensors"]
            if len(names) == 1
            else [f"consolidated-{number:05}-of-{len(names):05}.safetensors" for number in range(1, len(names) + 1)]
        )
        for name, new_name in zip(names, brought, strict=True):
            own.bring(old / name, new_name)
        after = loaded_weights_id(target)
        there = [name for name in brought if (target / name).exists()]
        return Injected.of(
            self,
            proved=there == brought and after == wanted and after not in (None, before),
            because=f"{len(there)} files {', '.join(there) or 'consolidated*.safetensors'} lie beside the new weights; "
            f"an engine would load {after}; the old checkpoint is {wanted}, the new one {before}",
            before={"weights_id": before, "old_weights_id": wanted},
            after={"weights_id": after, "consolidated_files": there},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NewWeightsAsBin:
    """The new weights were written as `.bin`, the old safetensors stayed: engines never look at the `.bin`."""

    name: ClassVar[str] = "new_weights_as_bin"
    fault_id: ClassVar[str] = "D13"

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def damage(self, target: Path, *, old: Path, random: Random) -> Injected:
        own = Target.open(target, old=old)
        before, wanted = loaded_weights_id(target), loaded_weights_id(old)
        facts = weight_facts(target)
        own.write_torch_file(BIN_NAME, _all_tensors(target))
        for name in (*own.weight_files(), *([INDEX_NAME] if (target / INDEX_NAME).exists() else ())):
            own.remove(name)
        for name in (*_old_files(old), *([INDEX_NAME] if (old / INDEX_NAME).exists() else ())):
            own.bring(old / name, name)
        after, in_bin = loaded_weights_id(target), torch_file_facts(target / BIN_NAME)
        is_whole = in_bin == facts_in_torch_file(facts)
        return Injected.of(
            self,
            proved=is_whole and after == wanted and after not in (None, before),
            because=f'"{BIN_NAME}" {"holds" if is_whole else "does not hold"} the new weights; an engine would load '
            f"{after}; the old checkpoint is {wanted}, the new one {before}",
            before={"weights_id": before, "old_weights_id": wanted, "digest": digest_of(facts_in_torch_file(facts))},
            after={"weights_id": after, "digest": None if in_bin is None else digest_of(in_bin)},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleNumpyCache:
    """`--load-format npcache`: `np/` was made from the old `.bin` and is not made anew for the new one."""

    name: ClassVar[str] = "stale_numpy_cache"
    fault_id: ClassVar[str] = "D22"

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def damage(self, target: Path, *, old: Path, random: Random) -> Injected:
        own = Target.open(target, old=old)
        old_facts = {name: facts_of(tensor) for name, tensor in _as_float32(old)}
        facts = {name: facts_of(tensor) for name, tensor in _as_float32(target)}
        before = {"np": _numpy_facts(target), "digest": digest_of(facts)}
        own.write_torch_file(BIN_NAME, _as_float32(target))
        for name in (*own.weight_files(), *([INDEX_NAME] if (target / INDEX_NAME).exists() else ())):
            own.remove(name)
        for name, tensor in _as_float32(old):
            own.write(f"{NUMPY_DIRECTORY}/{name}", _npy(tensor))
        own.write(f"{NUMPY_DIRECTORY}/weight_names.json", json.dumps(list(old_facts)).encode())
        cached, in_bin = _numpy_facts(target), torch_file_facts(target / BIN_NAME)
        is_old = cached == {name: fact["blake3"] for name, fact in old_facts.items()}
        is_new = in_bin == facts_in_torch_file(facts)
        return Injected.of(
            self,
            proved=is_old and is_new and old_facts != facts and not weight_files(target),
            because=f'"{NUMPY_DIRECTORY}/" {"holds" if is_old else "does not hold"} the tensors of the old checkpoint, '
            f'"{BIN_NAME}" {"holds" if is_new else "does not hold"} those of the new one'
            + ("" if old_facts != facts else ", which are the same"),
            before=before,
            after={"np": None if cached is None else digest_of(cached), "old_digest": digest_of(old_facts)},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NestedCheckpoint:
    """The new checkpoint in a directory inside the old one, as `mv new live` leaves it where `live` exists."""

    name: ClassVar[str] = "nested_checkpoint"
    fault_id: ClassVar[str] = "D17"
    directory: str

    def __post_init__(self) -> None:
        if Path(self.directory).name != self.directory:
            raise ScenarioInvalid(f'nested_checkpoint: "{self.directory}" is not the name of a directory')

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def damage(self, target: Path, *, old: Path, random: Random) -> Injected:
        own = Target.open(target, old=old)
        before, wanted = loaded_weights_id(target), loaded_weights_id(old)
        for name in sorted(file.name for file in target.iterdir() if file.is_file()):
            own.rename(name, f"{self.directory}/{name}")
        for name in sorted(file.name for file in old.iterdir() if file.is_file()):
            own.bring(old / name, name)
        after, nested = loaded_weights_id(target), loaded_weights_id(target / self.directory)
        is_old_config = file_facts(target / CONFIG_NAME) == file_facts(old / CONFIG_NAME)
        return Injected.of(
            self,
            proved=nested == before and after == wanted and after not in (None, before) and is_old_config,
            because=f"an engine would load {after}; the old checkpoint is {wanted}, the new one {before}, "
            f'"{self.directory}/" holds {nested}',
            before={"weights_id": before, "old_weights_id": wanted},
            after={"weights_id": after, "nested_weights_id": nested},
        )


def _old_files(old: Path) -> tuple[str, ...]:
    names = weight_files(old)
    if not names:
        raise FaultNotApplicable(f'no safetensors file in the old checkpoint "{old}": nothing could be left over')
    return names


def _all_tensors(path: Path) -> Iterator[tuple[str, RawTensor]]:
    for shard in read_shards(path):
        for tensor in shard.tensors:
            found = read_tensor(path, shard.name, tensor.name)
            if found is not None:
                yield tensor.name, found


def _as_float32(path: Path) -> Iterator[tuple[str, RawTensor]]:
    """Yield tensors as NumPy can hold them: bf16 has no NumPy dtype, so a checkpoint for npcache is never bf16."""
    for name, tensor in _all_tensors(path):
        yield name, from_float32(to_float32(tensor), "F32")


def _npy(tensor: RawTensor) -> bytes:
    file = BytesIO()
    np.save(file, np.frombuffer(tensor.data, dtype="<f4").reshape(tensor.shape))
    return file.getvalue()


def _numpy_facts(path: Path) -> dict[str, str] | None:
    """Return the digest of every array that npcache would load, by name; None when there is no cache."""
    try:
        names = json.loads((path / NUMPY_DIRECTORY / "weight_names.json").read_text(encoding="utf-8"))
        return {
            str(name): facts_of(RawTensor("F32", array.shape, np.ascontiguousarray(array, dtype="<f4").tobytes()))[
                "blake3"
            ]
            for name in names
            for array in [np.load(path / NUMPY_DIRECTORY / Path(str(name)).name, allow_pickle=False)]
        }
    except (OSError, ValueError):
        return None


def leftover_shards(*, prefix: str = "previous-") -> LeftoverShards:
    """Leave the old weight files beside the new ones, without a weight index; `prefix` stands before their names.

    With the default they are read last and win. With "" they keep their names, and the proof says which weights win.
    Source: taxonomy row D11.
    """
    return LeftoverShards(prefix=prefix)


def leftover_consolidated() -> LeftoverConsolidated:
    """Leave the old weights as `consolidated*.safetensors` beside the new ones. Source: taxonomy row D14."""
    return LeftoverConsolidated()


def new_weights_as_bin() -> NewWeightsAsBin:
    """Put the new weights into `pytorch_model.bin` beside the old safetensors. Source: taxonomy row D13."""
    return NewWeightsAsBin()


def stale_numpy_cache() -> StaleNumpyCache:
    """Put the new weights into a `.bin` (fp32) and the old ones into `np/`; serve it with `--load-format npcache`.

    An engine that loads it so writes into the directory: give it a copy that it may write to. Source: taxonomy row D22.
    """
    return StaleNumpyCache()


def nested_checkpoint(*, directory: str = "new") -> NestedCheckpoint:
    """Put the new checkpoint into a directory inside the old one. Source: taxonomy row D17."""
    return NestedCheckpoint(directory=directory)
