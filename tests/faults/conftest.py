from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from damage_cases import Pair, small, templated_copy

from harness.checkpoint.copy import private_copy


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    cache = tmp_path_factory.mktemp("models")
    return lambda seed, **how: small(seed, **how).build(cache)


@pytest.fixture(scope="session")
def pair(built: Callable[..., Path]) -> Pair:
    """Sharded checkpoints whose configs differ in the intermediate size."""
    return Pair(old=built(1, intermediate=96), new=built(2), alike=built(3))


@pytest.fixture(scope="session")
def single(built: Callable[..., Path]) -> Pair:
    """Checkpoints of one weight file each, with the same config."""
    return Pair(old=built(1, shards=1), new=built(2, shards=1))


@pytest.fixture
def target(pair: Pair, tmp_path: Path) -> Path:
    return templated_copy(pair.new, tmp_path / "target")


@pytest.fixture
def live(pair: Pair, tmp_path: Path) -> Path:
    """What an engine serves: a copy of the old checkpoint in the run's own workspace."""
    return private_copy(pair.old, tmp_path / "run" / "live")
