"""Every rank of a split model computes on processors of its own, as far as there are enough."""

from __future__ import annotations

import os

import pytest

from harness.engine.cpu_ranks import BIND_VARIABLE, rank_binding, rank_count


@pytest.mark.parametrize(
    ("arguments", "ranks"),
    [
        ((), 1),
        (("--tensor-parallel-size", "2"), 2),
        (("--tensor-parallel-size=4",), 4),
        (("-tp", "2", "--dtype", "auto"), 2),
        (("--tensor-parallel-size", "2", "--pipeline-parallel-size", "2"), 4),
        (("--tensor-parallel-size", "2", "--tensor-parallel-size", "3"), 3),  # the last one counts
        (("--tensor-parallel-size",), 1),
        (("--tensor-parallel-size", "two"), 1),
        (("--tensor-parallel-size", "0"), 1),
        (("--served-model-name", "-tp", "2"), 2),
    ],
)
def test_ranks_are_what_the_launch_asks_for(arguments: tuple[str, ...], ranks: int) -> None:
    assert rank_count(arguments) == ranks


@pytest.mark.parametrize(
    ("ranks", "cpus", "bound"),
    [
        (2, (0, 1), "0|1"),
        (2, (3, 1, 2, 0), "0,2|1,3"),
        (3, (4, 5), "4|5|4"),
        (2, (1,), "1|1"),
    ],
)
def test_processors_are_divided(ranks: int, cpus: tuple[int, ...], bound: str) -> None:
    assert rank_binding(("--tensor-parallel-size", str(ranks)), cpus) == {BIND_VARIABLE: bound}


def test_a_single_rank_is_left_alone() -> None:
    assert rank_binding(("--dtype", "auto"), (0, 1)) == {}


def test_without_a_choice_all_processors_of_this_process_are_divided() -> None:
    bound = rank_binding(("--tensor-parallel-size", "2"), ())[BIND_VARIABLE]
    assert {int(cpu) for share in bound.split("|") for cpu in share.split(",")} == os.sched_getaffinity(0)
