"""A config that belongs to another model than the weights beside it.

Source: incident write-up (newer architecture; config and weights do not belong together); taxonomy rows C01 to C05, D19.
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

ROW_OF_KEY = {"num_hidden_layers": "C01", "vocab_size": "C03", "tie_word_embeddings": "C04"}
SHAPELESS_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "rms_norm_eps", "sliding_window", "hidden_act")


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
        top = self.changes[0][0].split(".")[0]
        return "C05" if top in SHAPELESS_KEYS else ROW_OF_KEY.get(top, "C02")

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
            proved=after == dict(self.changes),  # and each was another value before, or it was refused
            because="; ".join(f'config key "{key}" was {before[key]!r}, is {after[key]!r}' for key in before),
            before=before,
            after=after,
        )


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

    Source: taxonomy rows C01 (layers), C02 (sizes), C03 (vocabulary), C04 (tied embeddings), C05 (no shape shows it).
    """
    return MismatchedConfig(changes=tuple(changes.items()))
