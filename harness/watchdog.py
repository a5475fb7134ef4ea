"""Outlives the harness: when the harness is gone, however it went, end everything of its run.

Started as `python -m harness.watchdog LABEL` with a pipe as standard input. The pipe closes when the harness ends, also
by SIGKILL; a line "released" before that means that the harness cleaned up itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from harness.label import LABEL_VARIABLE, RunLabel, parse_label

RELEASED = b"released\n"
END_LIMIT_S = 30.0
STOP_LIMIT_S = 5.0


@contextmanager
def watch(label: RunLabel) -> Iterator[int]:
    """Have everything of this run ended if this process dies inside the block; gives the watchdog's process id."""
    environment = {name: value for name, value in os.environ.items() if name != LABEL_VARIABLE}
    environment["TMPDIR"] = (
        tempfile.gettempdir()
    )  # a full disk makes Python choose another one, and later the first again
    watchdog = subprocess.Popen(
        [sys.executable, "-m", "harness.watchdog", str(label)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C in the terminal must not reach it
        env=environment,
    )
    try:
        yield watchdog.pid
    finally:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            watchdog.communicate(RELEASED, timeout=STOP_LIMIT_S)
        if watchdog.poll() is None:
            watchdog.kill()
            watchdog.wait(timeout=STOP_LIMIT_S)


def main(arguments: list[str]) -> int:
    """Wait for the harness to end; end what it left."""
    label = parse_label(arguments[0]) if len(arguments) == 1 else None
    if label is None:
        print("usage: python -m harness.watchdog LABEL", file=sys.stderr)
        return 3
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    if sys.stdin.buffer.read().endswith(RELEASED):
        return 0
    from harness import sweep  # only now: its imports would slow down every start

    return 0 if sweep.end(label, limit_s=END_LIMIT_S).is_empty() else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
