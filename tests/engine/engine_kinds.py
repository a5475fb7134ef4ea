"""Every kind of engine behind one name, for tests that must hold for all of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.engine.engine import EngineSite, EngineStarter
from harness.engine.image import ensure_image
from harness.engine.reference_starter import ReferenceStarter
from harness.errors import EnvironmentMissing
from harness.label import new_label

API_KEY = "sk-key-of-the-conformance-suite"


@dataclass(frozen=True, slots=True)
class EngineKind:
    """How to start engines of one kind, and how long they may take."""

    name: str
    starter: Callable[[], EngineStarter]
    ready_limit_s: float


def _container() -> EngineStarter:
    from harness.engine.container import ContainerStarter

    image = os.environ.get("ROLLOUT_IMAGE")
    return ContainerStarter(image or ensure_image(progress=print).name)


def _process() -> EngineStarter:
    from harness.engine.process import ProcessStarter

    if "ROLLOUT_PYTHON" not in os.environ:
        raise EnvironmentMissing("python", "ROLLOUT_PYTHON names no interpreter with vLLM")
    return ProcessStarter(Path(os.environ["ROLLOUT_PYTHON"]))


REFERENCE = EngineKind("reference", ReferenceStarter, 30.0)
CONTAINER = EngineKind("container", _container, 240.0)
PROCESS = EngineKind("process", _process, 240.0)

REAL = (
    pytest.param(CONTAINER, id="container", marks=pytest.mark.docker),
    pytest.param(PROCESS, id="process", marks=pytest.mark.slow),
)
ALL = (pytest.param(REFERENCE, id="reference"), *REAL)


@contextmanager
def opened(kind: EngineKind, directory: Path) -> Iterator[EngineStarter]:
    """Give a starter of this kind, ready to start engines.

    Raises: EnvironmentMissing where it cannot, which skips the test or, where it was required, fails it.
    """
    starter = kind.starter()
    starter.identity()
    site = EngineSite(
        run_label=str(new_label()),
        log_directory=directory / "logs",
        work_directory=directory / "work",
        api_key=API_KEY,
        engine_cpus=(max(os.sched_getaffinity(0)),),
    )
    for made in (site.log_directory, site.work_directory):
        made.mkdir()
    starter.open(site)
    try:
        yield starter
    finally:
        starter.close()
