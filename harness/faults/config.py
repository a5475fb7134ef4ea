"""A config that belongs to another model than the weights beside it.

Source: incident write-up (newer architecture; config and weights do not belong together); taxonomy rows C01 to C08, D19.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from harness.errors import FaultNotApplicable, ScenarioInvalid
from harness.faults.facts import CONFIG_NAME, digest_of, read_json
from harness.faults.fault import Fault, Injected
from harness.faults.proof import prove
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
class ChangedConfig:
    """A config with other values than the weights were trained with, or with keys that they know nothing of."""

    changes: tuple[tuple[str, Any], ...]
    are_new: bool  # keys that the config lacks; else keys that it has

    def __post_init__(self) -> None:
        if not self.changes:
            raise ScenarioInvalid(f"{self.name}: changes is empty, expected at least one config key")

    @property
    def name(self) -> str:
        return "added_config" if self.are_new else "mismatched_config"

    @property
    def fault_id(self) -> str:
        return _row(self.changes[0][0])

    def parameters(self) -> Mapping[str, Any]:
        return {"changes": dict(self.changes)}

    def damage(self, target: Path, *, old: Path, random: Random) -> Injected:
        own = Target.open(target, old=old)
        wanted = read_json(target / CONFIG_NAME)
        for key, value in self.changes:
            if self.are_new:
                _add(wanted, key, value)
            else:
                _change(wanted, key, value)
        return _rewrite(self, own, wanted, [key for key, _ in self.changes])


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
        wanted = read_json(target / CONFIG_NAME)
        if self.key not in wanted:
            raise FaultNotApplicable(f'config has no key "{self.key}"; nearest: {_nearest(self.key, wanted)}')
        del wanted[self.key]
        return _rewrite(self, own, wanted, [self.key])


def _add(config: dict[str, Any], key: str, value: Any) -> None:
    if config.get(key) is not None:
        raise FaultNotApplicable(f'config has a key "{key}" already, which is mismatched_config')
    config[key] = value


def _change(config: dict[str, Any], key: str, value: Any) -> None:
    """Give a key that is there another value; "a.b" names key "b" inside "a"."""
    *parents, last = key.split(".")
    inner: Any = config
    for part in (*parents, last):
        if not isinstance(inner, dict) or part not in inner:
            raise FaultNotApplicable(f'config has no key "{key}"; nearest: {_nearest(part, inner)}')
        holder, inner = inner, inner[part]
    if inner == value:
        raise FaultNotApplicable(f'config key "{key}" is {value!r} already')
    holder[last] = value


def _rewrite(fault: Fault, own: Target, wanted: Mapping[str, Any], keys: Sequence[str]) -> Injected:
    """Write the config anew, and prove that it is the wanted one and that each of these keys has another value now."""

    def look() -> dict[str, Any]:
        config = read_json(own.path / CONFIG_NAME)
        return {key: _value(config, key) for key in keys} | {"config": digest_of(config)}

    return prove(
        fault,
        lambda: own.write(CONFIG_NAME, json.dumps(wanted, indent=2).encode()),
        look=look,
        holds=lambda before, after: after["config"] == digest_of(wanted) != before["config"],
        told=lambda before, after: "; ".join(
            f'config key "{key}" was {before[key]!r}, is {after[key]!r}' for key in keys
        ),
    )


def _row(key: str) -> str:
    """Return the row of the taxonomy that a config key belongs to; sizes are the rest."""
    return ROW_OF_KEY.get(key.split(".")[0], "C02")


def _value(config: Mapping[str, Any], key: str) -> Any:
    """Return a value of the config, and "absent" where there is none."""
    inner: Any = config
    for part in (key,) if key in config else key.split("."):
        if not isinstance(inner, Mapping) or part not in inner:
            return "absent"
        inner = inner[part]
    return inner


def _nearest(part: str, inner: Any) -> str:
    return (
        ", ".join(get_close_matches(part, list(inner) if isinstance(inner, Mapping) else [], n=3, cutoff=0.4)) or "none"
    )


def mismatched_config(*, changes: Mapping[str, Any]) -> ChangedConfig:
    """Give config keys that are there other values; "a.b" names key "b" inside "a".

    Source: taxonomy rows C01 (layers), C02 (sizes), C03 (vocabulary), C04 (tied embeddings), C05 (no shape shows it),
    C06 (architecture), C07 (dtype), C08 (quantisation).
    """
    return ChangedConfig(changes=tuple(changes.items()), are_new=False)


def added_config(*, changes: Mapping[str, Any]) -> ChangedConfig:
    """Give the config keys that are not there: "quantization_config" (C08), "auto_map" (C06), "rope_scaling" (C05).

    Source: taxonomy rows C05, C06, C08.
    """
    return ChangedConfig(changes=tuple(changes.items()), are_new=True)


def removed_config(key: str = "quantization_config") -> RemovedConfig:
    """Take a key from the config, such as the quantisation of weights that have scales. Source: taxonomy row C08."""
    return RemovedConfig(key=key)
