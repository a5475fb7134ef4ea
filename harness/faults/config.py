"""A config that belongs to another model than the weights beside it.

Source: incident write-up (newer architecture; config and weights do not belong together); taxonomy rows C01 to C08, D19.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from harness.errors import FaultNotApplicable, ScenarioInvalid
from harness.faults.facts import CONFIG_NAME, read_json
from harness.faults.fault import Injected
from harness.faults.target import Target

ROW_OF_KEY = {
    "num_hidden_layers": "C01",
    "vocab_size": "C03",
    "tie_word_embeddings": "C04",
    "rope_theta": "C05",
    "rope_scaling": "C05",
    "rope_parameters": "C05",
    "rms_norm_eps": "C05",
    "sliding_window": "C05",
    "hidden_act": "C05",
    "architectures": "C06",
    "model_type": "C06",
    "auto_map": "C06",
    "torch_dtype": "C07",
    "dtype": "C07",
    "quantization_config": "C08",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchedConfig:
    """A config with other values than the weights were trained with."""

    name: ClassVar[str] = "mismatched_config"
    changes: tuple[tuple[str, Any], ...]

    def __post_init__(self) -> None:
        if not self.changes:
            raise ScenarioInvalid("mismatched_config: changes is empty, expected at least one config key")

    @property
    def fault_id(self) -> str:
        return _row(self.changes[0][0])

    def parameters(self) -> Mapping[str, Any]:
        return {"changes": dict(self.changes)}

    def damage(self, target: Path, *, old: Path, random: Random) -> Injected:
        own = Target.open(target, old=old)
        config = read_json(target / CONFIG_NAME)
        before = {key: _value(config, key) for key, _ in self.changes}
        for key, value in self.changes:
            if before[key] == value:
                raise FaultNotApplicable(f'config key "{key}" is {value!r} already')
            *parents, last = key.split(".")
            inner = config
            for parent in parents:
                inner = inner[parent]
            inner[last] = value
        own.write(CONFIG_NAME, json.dumps(config, indent=2).encode())
        seen = read_json(target / CONFIG_NAME)
        after = {key: _value(seen, key) for key, _ in self.changes}
        return Injected(
            fault=self.name,
            fault_id=self.fault_id,
            proved=seen == config,  # and each key had another value before, or it was refused
            because="; ".join(f'config key "{key}" was {before[key]!r}, is {after[key]!r}' for key in before),
            before=before,
            after=after,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedConfig:
    """A config with keys that the weights know nothing of: a quantisation, code of its own, a rope scaling."""

    name: ClassVar[str] = "added_config"
    changes: tuple[tuple[str, Any], ...]

    def __post_init__(self) -> None:
        if not self.changes:
            raise ScenarioInvalid("added_config: changes is empty, expected at least one config key")

    @property
    def fault_id(self) -> str:
        return _row(self.changes[0][0])

    def parameters(self) -> Mapping[str, Any]:
        return {"changes": dict(self.changes)}

    def damage(self, target: Path, *, old: Path, random: Random) -> Injected:
        own = Target.open(target, old=old)
        before = read_json(target / CONFIG_NAME)
        for key, _ in self.changes:
            if before.get(key) is not None:
                raise FaultNotApplicable(f'config has a key "{key}" already, which is mismatched_config')
        wanted = before | dict(self.changes)
        own.write(CONFIG_NAME, json.dumps(wanted, indent=2).encode())
        after = read_json(target / CONFIG_NAME)
        return Injected(
            fault=self.name,
            fault_id=self.fault_id,
            proved=after == wanted,  # and no key had a value before, or it was refused
            because="; ".join(f'config key "{key}" was absent, is {after.get(key)!r}' for key, _ in self.changes),
            before={key: before.get(key) for key, _ in self.changes},
            after={key: after.get(key) for key, _ in self.changes},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovedConfig:
    """A config without a key that the weights need, such as the quantisation that they were made with."""

    name: ClassVar[str] = "removed_config"
    key: str

    @property
    def fault_id(self) -> str:
        return _row(self.key)

    def parameters(self) -> Mapping[str, Any]:
        return {"key": self.key}

    def damage(self, target: Path, *, old: Path, random: Random) -> Injected:
        own = Target.open(target, old=old)
        before = read_json(target / CONFIG_NAME)
        value = _value(before, self.key)
        wanted = {key: other for key, other in before.items() if key != self.key}
        own.write(CONFIG_NAME, json.dumps(wanted, indent=2).encode())
        after = read_json(target / CONFIG_NAME)
        return Injected(
            fault=self.name,
            fault_id=self.fault_id,
            proved=after == wanted and self.key not in after,
            because=f'config key "{self.key}" was {value!r}, is {"absent" if self.key not in after else "still there"}',
            before={self.key: value},
            after={"is_there": self.key in after},
        )


def _row(key: str) -> str:
    """Return the row of the taxonomy that a config key belongs to; sizes are the rest."""
    return ROW_OF_KEY.get(key.split(".")[0], "C02")


def _value(config: Mapping[str, Any], key: str) -> Any:
    inner: Any = config
    for part in key.split("."):
        if not isinstance(inner, Mapping) or part not in inner:
            near = get_close_matches(part, list(inner) if isinstance(inner, Mapping) else [], n=3, cutoff=0.4)
            raise FaultNotApplicable(f'config has no key "{key}"; nearest: {", ".join(near) or "none"}')
        inner = inner[part]
    return inner


def mismatched_config(*, changes: Mapping[str, Any]) -> MismatchedConfig:
    """Give config keys that are there other values; "a.b" names key "b" inside "a".

    Source: taxonomy rows C01 (layers), C02 (sizes), C03 (vocabulary), C04 (tied embeddings), C05 (no shape shows it),
    C06 (architecture), C07 (dtype), C08 (quantisation).
    """
    return MismatchedConfig(changes=tuple(changes.items()))


def added_config(*, changes: Mapping[str, Any]) -> AddedConfig:
    """Give the config keys that are not there: "quantization_config" (C08), "auto_map" (C06), "rope_scaling" (C05).

    Source: taxonomy rows C05, C06, C08.
    """
    return AddedConfig(changes=tuple(changes.items()))


def removed_config(key: str = "quantization_config") -> RemovedConfig:
    """Take a key from the config, such as the quantisation of weights that have scales. Source: taxonomy row C08."""
    return RemovedConfig(key=key)
