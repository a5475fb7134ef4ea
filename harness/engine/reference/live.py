"""Other weights while the engine runs, by a strict contract: all of them or none, and never under a request.

A checkpoint that is refused leaves the weights as they were. Prefixes computed with the weights before are forgotten.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from harness.checkpoint.manifest import Tensor
from harness.checkpoint.survey import survey
from harness.engine.reference.defects import PlantedDefect
from harness.engine.reference.loading import Contract, Loaded, Refusal, load
from harness.engine.reference.model import Floats, Llama
from harness.engine.reference.scheduler import Scheduler
from harness.engine.reference.tensor_source import TensorSource
from harness.errors import CheckpointDefect


class NotNow(Exception):
    """Requests are under way: they would be answered from both checkpoints."""


@dataclass(slots=True, kw_only=True)
class LiveModel:
    """The weights that are served, and how they are replaced."""

    path: Path
    dtype: str
    max_model_len: int | None
    source: TensorSource
    defects: frozenset[PlantedDefect]
    scheduler: Scheduler
    loaded: Loaded
    version: str = "default"
    is_broken: bool = False  # by a planted defect: the next request ends the process
    tensors: Mapping[str, Floats] = field(init=False)  # that are served

    def __post_init__(self) -> None:
        self.tensors = self.loaded.tensors

    def reload(self, path: Path | None) -> None:
        """Serve what is at `path`, or at the path the engine was started on.

        Raises: CheckpointDefect, OSError, NotNow; the old weights are then served as before.
        """
        self._require_idle()
        try:
            tensors = self.read(path)
        except (CheckpointDefect, OSError):
            self.is_broken = PlantedDefect.DIES_AFTER_FAILED_RELOAD in self.defects
            raise
        self.serve(tensors)

    def serve(self, tensors: Mapping[str, Floats]) -> None:
        """Serve other weights from now on.

        Raises: NotNow.
        """
        self._require_idle()
        keeps = PlantedDefect.KEEPS_PREFIX_CACHE in self.defects
        self.scheduler.exchange(Llama(self.loaded.shape, tensors), keeps_prefixes=keeps)
        self.tensors = tensors

    def reset(self) -> None:
        """Zero every weight, so that what does not arrive afterwards shows."""
        zeros = {name: np.zeros_like(values) for name, values in self.tensors.items()}
        self.scheduler.exchange(Llama(self.loaded.shape, zeros))
        self.tensors = zeros

    def checksums(self) -> dict[str, str]:
        """Return the SHA-256 of every tensor as it is served."""
        if PlantedDefect.CHECKSUMS_OF_NOTHING in self.defects:
            return {name: hashlib.sha256(b"").hexdigest() for name in sorted(self.tensors)}
        return {name: hashlib.sha256(values.tobytes()).hexdigest() for name, values in sorted(self.tensors.items())}

    def _require_idle(self) -> None:
        if self.scheduler.is_busy() and PlantedDefect.RELOADS_UNDER_REQUESTS not in self.defects:
            raise NotNow("requests are under way; pause first, and reload when they have ended")

    def read(self, path: Path | None = None) -> Mapping[str, Floats]:
        """Read the weights at `path`, or where the engine was started; they are not served yet.

        Raises: CheckpointDefect, OSError.
        """
        path = self.path if path is None else path
        defects = self.defects
        if PlantedDefect.RELOAD_IGNORES_MISSING_TENSOR in defects:
            defects |= {PlantedDefect.IGNORES_MISSING_TENSOR}
        found = load(
            path,
            dtype=self.dtype,
            max_model_len=self.max_model_len,
            source=self.source,
            contract=Contract(defects),
        )
        if found.shape != self.loaded.shape:
            raise CheckpointDefect(
                Refusal.UNEXPECTED_SHAPE, "its config is not that of the running model: start anew", path=path
            )
        there = {tensor.name for tensor in _tensors(path)}
        return {name: values if name in there else self.tensors[name] for name, values in found.tensors.items()}


def _tensors(path: Path) -> tuple[Tensor, ...]:
    checkpoint, _ = survey(path)
    return tuple(checkpoint.tensors)
