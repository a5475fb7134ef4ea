"""Which names in shared memory engines use: the one list, for whoever looks for them, removes them or leaves them alone."""

from __future__ import annotations

import fnmatch
import os
from pathlib import Path

# Python's shared memory and semaphores ("sem.mp-..."), and what vLLM, NCCL and torch name themselves.
ANYBODYS = ("psm_*", "sem.*", "torch_*")
ENGINES = ("vllm_*", "nccl-*", "*-cpushm")


def is_segment(name: str) -> bool:
    """Say whether an engine may have made a segment or semaphore of this name; other programs make some such too."""
    return is_anybodys(name) or any(fnmatch.fnmatchcase(name, pattern) for pattern in ENGINES)


def is_anybodys(name: str) -> bool:
    """Say whether any Python program makes segments of such a name."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in ANYBODYS)


def segment_names(shared_memory: Path) -> frozenset[str]:
    """Return the names of that kind in a directory of shared memory; none where it cannot be read."""
    try:
        return frozenset(name for name in os.listdir(shared_memory) if is_segment(name))
    except OSError:
        return frozenset()
