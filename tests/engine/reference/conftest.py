"""Good checkpoints, and reference engines that end with their test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from reference_checkpoints import write_checkpoint
from reference_engines import READY_LIMIT_S, Start, starting

from harness.engine.process_child import ProcessEngine


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Return a good checkpoint."""
    return write_checkpoint(tmp_path / "good", seed=1)


@pytest.fixture
def start_reference(tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts an engine and does not wait for it."""
    with starting(tmp_path) as start:
        yield start


@pytest.fixture
def start_ready(start_reference: Start) -> Start:
    """Return a function like `start_reference` that also waits until the engine is ready."""

    def start(path: Path, *defects: str, **launch: object) -> ProcessEngine:
        engine = start_reference(path, *defects, **launch)
        engine.wait_ready(READY_LIMIT_S)
        return engine

    return start
