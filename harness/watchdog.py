"""Outlives the harness: when the harness is gone, however it went, end everything of its run.

Started as `python -m harness.watchdog LABEL` with a pipe as standard input. The pipe closes when the harness ends, also
by SIGKILL; a line "released" before that means that the harness cleaned up itself. It says "up" once it watches.
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

from harness.clock import poll_until
from harness.errors import HarnessError
from harness.label import LABEL_VARIABLE, RunLabel, parse_label

RELEASED = b"released\n"
UP = b"up\n"
UP_LIMIT_S = 30.0
END_LIMIT_S = 30.0
SETTLE_S = 2.5  # what Docker was asked to make when the harness was killed appears within it
STOP_LIMIT_S = 5.0


@contextmanager
def watch(label: RunLabel) -> Iterator[int]:
    """Have everything of this run ended if this process dies inside the block; gives the watchdog's process id.

    Raises: HarnessError when the watchdog does not come up.
    """
    environment = {name: value for name, value in os.environ.items() if name != LABEL_VARIABLE}
    # A full disk makes Python choose another place, and later the first again.
    environment["TMPDIR"] = tempfile.gettempdir()
    # -P: a directory "harness" where the user happens to stand is not ours.
    command = [sys.executable, "-P", "-m", "harness.watchdog", str(label)]
    try:
        watchdog = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C in the terminal must not reach it
            env=environment,
        )
    except OSError as error:
        raise HarnessError(f"the watchdog cannot be started: {error}") from error
    try:
        _wait_until_up(watchdog)
        yield watchdog.pid
    finally:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            watchdog.communicate(RELEASED, timeout=STOP_LIMIT_S)
        if watchdog.poll() is None:
            watchdog.kill()
            watchdog.wait(timeout=STOP_LIMIT_S)


def _wait_until_up(watchdog: subprocess.Popen[bytes]) -> None:
    assert watchdog.stdout is not None
    said_by = watchdog.stdout.fileno()
    os.set_blocking(said_by, False)
    said = b""

    def is_up() -> bool | None:
        nonlocal said
        more = os.read(said_by, 65536)  # a BlockingIOError, which is an OSError, while it says nothing
        said += more
        if UP in said.splitlines(keepends=True):
            return True
        if not more:
            last = said.decode(errors="replace").strip().rpartition("\n")[2] or "it said nothing"
            raise HarnessError(f"the watchdog ended before it watched, nothing of this run would be ended: {last}")
        return None

    poll_until(is_up, what="the watchdog is up", limit_s=UP_LIMIT_S, every_s=0.02)


def main(arguments: list[str]) -> int:
    """Wait for the harness to end; end what it left."""
    label = parse_label(arguments[0]) if len(arguments) == 1 else None
    if label is None:
        print("usage: python -m harness.watchdog LABEL", file=sys.stderr)
        return 3
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    os.write(sys.stdout.fileno(), UP)
    with open(os.devnull, "wb") as nowhere:  # nobody reads on, and later nobody is there to read
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
        os.dup2(nowhere.fileno(), sys.stderr.fileno())
    if sys.stdin.buffer.read().endswith(RELEASED):
        return 0
    from harness import sweep  # only now: its imports would slow down every start

    return 0 if sweep.end(label, limit_s=END_LIMIT_S, settle_s=SETTLE_S).is_empty() else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
