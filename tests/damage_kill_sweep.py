"""Damages a checkpoint in children that are killed before one call into the kernel after the other.

Run as a program: it has one thread, so it may fork. Usage: damage_kill_sweep.py CHECKPOINT OLD DIRECTORY STRIDE.
Prints one JSON line per kill: what is left of the originals, and what lies at the place of the copy.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "faults"))

from damage_cases import DAMAGES, contents, seen

from harness import damage

CASES = ("widen_columns", "zero_tail", "stale_index", "config_rope", "nested_checkpoint")
MOST_STEPS = 3000


def kill_at(step: int) -> None:
    """Kill this process before the call number `step` that may reach the file system."""
    left = step

    def profile(frame: FrameType, event: str, called: Any) -> None:
        nonlocal left
        owner = type(getattr(called, "__self__", None)).__module__
        if event == "c_call" and (owner == "_io" or getattr(called, "__module__", None) in ("posix", "fcntl")):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(profile)


def main(checkpoint: Path, old: Path, directory: Path, stride: int) -> None:
    damage.LINKED_BYTES_MIN = 1  # every file is shared: the worst that can be
    before = seen(checkpoint), seen(old)
    for name in CASES:
        whole = directory / f"{name}-whole"
        damage.damage_copy(checkpoint, whole, DAMAGES[name], old=old)
        for step in range(1, MOST_STEPS, stride):
            out = directory / f"{name}-{step}"
            pid = os.fork()
            if pid == 0:
                kill_at(step)
                damage.damage_copy(checkpoint, out, DAMAGES[name], old=old)
                sys.setprofile(None)
                os._exit(0)
            _, status = os.waitpid(pid, 0)
            at_out = "nothing" if not out.exists() else "whole" if contents(out) == contents(whole) else "torn"
            is_left = any(directory.glob(f".{out.name}.*"))
            if at_out == "nothing":
                damage.damage_copy(checkpoint, out, DAMAGES[name], old=old)  # the next one cleans up
            told = {
                "case": name,
                "step": step,
                "originals": "same" if (seen(checkpoint), seen(old)) == before else "changed",
                "out": at_out,
                "left": is_left,
                "left_afterwards": any(directory.glob(f".{out.name}.*")),
                "afterwards": "whole" if contents(out) == contents(whole) else "torn",
            }
            print(json.dumps(told), flush=True)
            if os.waitstatus_to_exitcode(status) == 0:
                break


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
