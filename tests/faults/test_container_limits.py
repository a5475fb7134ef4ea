"""What a container runs out of, in a real one: the kernel kills, and its own shared memory fills."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from harness import faults
from harness.clock import poll_until
from harness.engine.container_engine import ContainerEngine
from harness.engine.image import ensure_image
from harness.engine.proc import find
from harness.faults.fault import Surroundings
from harness.label import LABEL_KEY, new_label

pytestmark = pytest.mark.docker
HOLDS = "x = b'x' * (200 * 1024**2); print('up', flush=True); import time; time.sleep(600)"
SHARED_MEMORY_BYTES = 1024**2


class Bare(ContainerEngine):
    """A container that holds memory and serves nothing."""

    def __init__(self, container: Any) -> None:
        self._container = container
        self._incarnation = "old-1"
        self._is_removed = False
        self._exit_code = None

    def exit_code(self) -> int | None:
        self._container.reload()
        return int(self._container.attrs["State"]["ExitCode"]) if self._container.status == "exited" else None


@pytest.fixture
def engine() -> Iterator[Bare]:
    from harness.engine.docker_daemon import connect

    client = connect()
    container = client.containers.run(
        os.environ.get("ROLLOUT_IMAGE") or ensure_image(progress=print).name,
        ["python3", "-c", HOLDS],
        entrypoint="",
        detach=True,
        init=True,
        network_mode="none",
        mem_limit="1g",
        memswap_limit="1g",
        shm_size=SHARED_MEMORY_BYTES,
        labels={LABEL_KEY: str(new_label())},
    )
    try:
        poll_until(lambda: True if b"up" in container.logs() else None, what="the container is up", limit_s=60.0)
        yield Bare(container)
    finally:
        container.remove(force=True)
        client.close()


@pytest.fixture
def surroundings(tmp_path: Path) -> Surroundings:
    return Surroundings(live=tmp_path, other=tmp_path, work=tmp_path, shared=tmp_path)


def test_the_kernel_kills_the_largest_process_of_a_container_that_is_squeezed(
    engine: Bare, surroundings: Surroundings
) -> None:
    [holder] = [find(pid) for pid in engine.processes("server")]
    assert holder is not None
    assert holder.is_running()

    struck = faults.memory_limit().strike(engine, surroundings, random=Random(1))

    assert struck.injected.proved, struck.injected.because
    assert struck.injected.before["limit_bytes"] == 1024**3
    assert struck.injected.before["held_bytes"] > 200 * 1024**2
    assert not holder.is_running()
    struck.finish(limit_s=0)
    assert struck.undone().proved


def test_shared_memory_of_a_container_is_filled_and_emptied(engine: Bare, surroundings: Surroundings) -> None:
    before = os.statvfs("/dev/shm").f_bavail

    struck = faults.full_shared_memory().strike(engine, surroundings, random=Random(1))

    assert struck.injected.proved, struck.injected.because
    assert struck.injected.before["free_bytes"] == SHARED_MEMORY_BYTES
    assert os.statvfs("/dev/shm").f_bavail > before - 100 * 1024**2 // os.statvfs("/dev/shm").f_frsize
    struck.finish(limit_s=0)
    assert struck.undone().proved
