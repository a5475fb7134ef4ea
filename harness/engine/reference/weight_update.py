"""Weights that are sent to the reference engine, by a strict contract: all tensors of the model in one update, or none.

What is sent is read from files, as the plug-in does for vLLM. An update that lacks a tensor is refused when it is finished; the old
weights are served as before, also between its start and its end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.checkpoint.survey import survey
from harness.engine.launch import WEIGHT_TRANSFER
from harness.engine.reference.defects import PlantedDefect
from harness.engine.reference.live import LiveModel
from harness.engine.reference.model import Floats

NOT_CONFIGURED = "RuntimeError: Weight transfer not configured. Please set weight_transfer_config."
BACKEND = json.loads(WEIGHT_TRANSFER[1])["backend"]


class UpdateRefused(Exception):
    """The call is out of order, or the update lacks something."""


def backend_of(config: str | None) -> str | None:
    """Return the backend that `--weight-transfer-config` names; None without it.

    Raises: ValueError for any other than the one that reads files.
    """
    if config is None:
        return None
    named = json.loads(config)
    backend = named.get("backend") if isinstance(named, dict) else None
    if backend != BACKEND:
        raise ValueError(f"--weight-transfer-config names the backend {backend!r}, this engine has {BACKEND!r} alone")
    return str(backend)


@dataclass(slots=True)
class WeightUpdate:
    """The update of a running model that is under way, if one is."""

    live: LiveModel
    _sent: dict[str, Floats] | None = field(default=None, init=False)

    def answer(self, path: str, fields: Mapping[str, Any]) -> None:
        """Carry out one call.

        Raises: UpdateRefused, NotNow, CheckpointDefect, OSError.
        """
        if path == "/start_weight_update":
            if self._sent is not None:
                raise UpdateRefused("a weight update is already active")
            self._sent = {}
        elif path == "/update_weights":
            self._take((fields.get("update_info") or {}).get("files") or {})
        elif path == "/finish_weight_update":
            self._finish(fields.get("weight_version"))

    def _take(self, files: Mapping[str, list[str]]) -> None:
        if self._sent is None:
            raise UpdateRefused("weights came without a matching start_weight_update")
        checkpoint, _ = survey(self.live.path)
        there = {(tensor.shard, tensor.name) for tensor in checkpoint.tensors}
        wanted = [(file, name) for file, names in files.items() for name in names]
        absent = [f'"{name}" of "{file}"' for file, name in wanted if (file, name) not in there]
        if absent:
            self.live.is_broken = PlantedDefect.DIES_AFTER_FAILED_RELOAD in self.live.defects
            raise UpdateRefused(f"{len(absent)} tensors cannot be read, the first is {absent[0]}")
        tensors = self.live.read()
        self._sent |= {name: tensors[name] for _, name in wanted}

    def _finish(self, version: Any) -> None:
        sent, self._sent = self._sent, None
        if sent is None:
            raise UpdateRefused("finished without a matching start_weight_update")
        absent = sorted(self.live.tensors.keys() - sent.keys())
        if absent and PlantedDefect.FINISHES_INCOMPLETE_UPDATE not in self.live.defects:
            raise UpdateRefused(
                f"{len(absent)} tensors never came, the first is {absent[0]}: the old weights are served"
            )
        self.live.serve({**self.live.tensors, **sent})
        if version is not None:
            self.live.version = str(version)
