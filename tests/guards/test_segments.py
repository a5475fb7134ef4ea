"""Names in shared memory that engines use: one list for whoever lists, removes or spares them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import harness
from harness.guards.segments import is_anybodys, is_segment, segment_names


@pytest.mark.parametrize(
    ("name", "known", "anybodys"),
    [
        ("psm_0123abcd", True, True),
        ("sem.mp-k3j2", True, True),
        ("torch_1_2", True, True),
        ("vllm_dist_1_cpushm_0", True, False),
        ("vllm_offload_1.mmap", True, False),
        ("nccl-abc", True, False),
        ("gloo-cpushm", True, False),
        ("psm", False, False),
        ("xpsm_1", False, False),
        ("semaphore", False, False),
        ("PSM_1", False, False),
        ("pulse-shm-1", False, False),
    ],
)
def test_names(name: str, known: bool, anybodys: bool, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    assert (is_segment(name), is_anybodys(name)) == (known, anybodys)
    assert segment_names(tmp_path) == ({name} if known else set())


def test_a_directory_that_is_not_there_holds_none(tmp_path: Path) -> None:
    assert segment_names(tmp_path / "absent") == frozenset()


def test_nobody_else_keeps_such_a_list() -> None:
    spelled = re.compile(r"""["'](psm_|sem\.)""")
    root = Path(harness.__file__).parent
    holders = {path.name for path in root.rglob("*.py") if spelled.search(path.read_text())}
    assert holders == {"segments.py"}
