"""Old and new files in one directory: a sync that brought only some of them, or left the old ones behind.

Source: incident write-up (config and weights do not belong together; the sync was late); taxonomy rows D12, D19.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from harness.faults.facts import (
    CONFIG_NAME,
    INDEX_NAME,
    digest_of,
    file_facts,
    loaded_weights_id,
    read_json,
    read_shards,
    weight_files,
)
from harness.faults.fault import Injected, parameters_of
from harness.faults.target import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class NewConfigOldWeights:
    """The small files arrived, the weights did not: everything is new but shards and weight index."""

    name: ClassVar[str] = "new_config_old_weights"
    fault_id: ClassVar[str] = "D19"

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def damage(self, target: Path, *, old: Path, random: Random) -> Injected:
        own = Target.open(target, old=old)
        before, wanted = loaded_weights_id(target), loaded_weights_id(old)
        for name in own.weight_files():
            own.remove(name)
        if (target / INDEX_NAME).exists():
            own.remove(INDEX_NAME)
        for name in weight_files(old):
            own.bring(old / name, name)
        if (old / INDEX_NAME).exists():
            own.bring(old / INDEX_NAME, INDEX_NAME)
        after = loaded_weights_id(target)
        is_config_new = file_facts(target / "config.json") != file_facts(old / "config.json")
        return Injected.of(
            self,
            proved=after == wanted and after not in (None, before),
            because=f"an engine would load {after}; the old checkpoint is {wanted}, the new one {before}; "
            f"config.json {'differs from' if is_config_new else 'equals'} the old one",
            before={"weights_id": before, "old_weights_id": wanted},
            after={"weights_id": after, "config_differs_from_old": is_config_new},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OldConfigNewWeights:
    """The weights arrived, the config did not."""

    name: ClassVar[str] = "old_config_new_weights"
    fault_id: ClassVar[str] = "D19"

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def damage(self, target: Path, *, old: Path, random: Random) -> Injected:
        own = Target.open(target, old=old)
        new_config, old_config = read_json(target / CONFIG_NAME), read_json(old / CONFIG_NAME)
        own.bring(old / CONFIG_NAME, CONFIG_NAME)
        seen = read_json(target / CONFIG_NAME)
        keys = sorted(key for key in {*new_config, *old_config} if new_config.get(key) != old_config.get(key))
        weights, old_weights = loaded_weights_id(target), loaded_weights_id(old)
        is_old = seen == old_config
        return Injected.of(
            self,
            proved=is_old and bool(keys) and weights != old_weights,
            because=f"config.json {'is' if is_old else 'is not'} the old checkpoint's, which differs from the new one's in "
            f"{', '.join(keys) or 'nothing'}; an engine would load {weights}, the old checkpoint is {old_weights}",
            before={"config": digest_of(new_config), "differing_keys": keys},
            after={"config": digest_of(seen), "weights_id": weights, "old_weights_id": old_weights},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleIndex:
    """The old shards and their weight index left beside the new weights: the index wins and names only the old."""

    name: ClassVar[str] = "stale_index"
    fault_id: ClassVar[str] = "D12"

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def damage(self, target: Path, *, old: Path, random: Random) -> Injected:
        own = Target.open(target, old=old)
        before, wanted = loaded_weights_id(target), loaded_weights_id(old)
        old_names = weight_files(old)
        new_names = []
        count = len(own.weight_files())
        for number, name in enumerate(own.weight_files(), start=1):
            new_name = f"model-new-{number:05}-of-{count:05}.safetensors" if name in old_names else name
            if new_name != name:
                own.rename(name, new_name)
            new_names.append(new_name)
        for name in old_names:
            own.bring(old / name, name)
        own.write(INDEX_NAME, _index_of(old))
        after = loaded_weights_id(target)
        new_there = [name for name in new_names if (target / name).exists()]
        named = list(weight_files(target)) if (target / INDEX_NAME).exists() else []
        proved = after == wanted and after not in (None, before) and new_there == new_names
        return Injected.of(
            self,
            proved=proved,
            because=f"the weight index names {', '.join(named) or 'nothing'}, the new weights are in {', '.join(new_there)}; "
            f"an engine would load {after}; the old checkpoint is {wanted}, the new one {before}",
            before={"weights_id": before, "old_weights_id": wanted},
            after={"weights_id": after, "named_in_index": named, "new_weight_files": new_there},
        )


def _index_of(path: Path) -> bytes:
    if (path / INDEX_NAME).exists():
        return json.dumps(read_json(path / INDEX_NAME), indent=2).encode()
    tensors = [tensor for shard in read_shards(path) for tensor in shard.tensors]
    total = sum(tensor.size_bytes for tensor in tensors)
    weight_map = {tensor.name: tensor.shard for tensor in tensors}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2).encode()


def new_config_old_weights() -> NewConfigOldWeights:
    """Put the old shards and weight index under the new config. Source: taxonomy row D19."""
    return NewConfigOldWeights()


def old_config_new_weights() -> OldConfigNewWeights:
    """Leave the old config beside the new weights; not proved where both checkpoints have the same config.

    Source: taxonomy row D19.
    """
    return OldConfigNewWeights()


def stale_index() -> StaleIndex:
    """Leave the old shards and their weight index beside the new weights, renamed where the names are the same.

    Source: taxonomy row D12.
    """
    return StaleIndex()
