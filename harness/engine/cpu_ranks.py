"""Which processors each rank of a CPU engine computes on.

By itself such an engine gives every rank a NUMA node of its own, and refuses to start with more ranks than nodes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod

BIND_VARIABLE = "VLLM_CPU_OMP_THREADS_BIND"
RANK_OPTIONS = (("--tensor-parallel-size", "-tp"), ("--pipeline-parallel-size", "-pp"))


def rank_count(arguments: Sequence[str]) -> int:
    """Return over how many ranks a launch splits the model; 1 where it says nothing that can be read."""
    return prod(_last_number(arguments, names) for names in RANK_OPTIONS)


def rank_binding(arguments: Sequence[str], cpus: Sequence[int]) -> Mapping[str, str]:
    """Return the variable that divides processors over the ranks of a launch; nothing for a single rank.

    Without `cpus` those that this process may use are divided. Where there are fewer processors than ranks, some ranks
    share one.
    """
    ranks = rank_count(arguments)
    if ranks < 2:
        return {}
    divided = sorted(cpus or os.sched_getaffinity(0))
    shares = [divided[rank::ranks] or [divided[rank % len(divided)]] for rank in range(ranks)]
    return {BIND_VARIABLE: "|".join(",".join(map(str, share)) for share in shares)}


def _last_number(arguments: Sequence[str], names: Sequence[str]) -> int:
    number = 1
    for word, following in pairwise((*arguments, "")):
        name, equals, value = word.partition("=")
        text = value if equals else following
        if name in names and text.isdecimal():
            number = max(1, int(text))
    return number
