"""Signals to the processes of vLLM inside a container."""

from __future__ import annotations

import contextlib
import signal

from docker.models.containers import Container

from harness.clock import poll_until
from harness.errors import WaitExpired

SERVER_LIMIT_S = 5.0
# A slim image has no ps. The server is the child of Docker's init; the core titles itself.
FIND_ROLE = {
    "server": 'read -r stat < $d/stat || continue; rest="${stat##*) ? }"; [ "${rest%% *}" = 1 ] || continue',
    "core": 'case "$(tr "\\0" " " < $d/cmdline)" in *EngineCore*) ;; *) continue;; esac',
}
_CUT_OFF = (128 + int(signal.SIGKILL), None)  # exit codes of a shell that ended with its container
_ENDS_NOTHING = (signal.SIGSTOP, signal.SIGCONT)


def send_signal(container: Container, role: str, number: int) -> int | None:
    """Signal the `server` or the `core` and return its process id as the container numbers it; None where none takes it.

    Raises: what Docker's client raises, unless it is while a server is waited for.
    """
    pid = _find(container, role)
    if pid is None and role == "server":  # Docker's init may have yet to start it
        with contextlib.suppress(WaitExpired):
            pid = poll_until(lambda: _find(container, role), what="server", limit_s=SERVER_LIMIT_S)
    if pid is None:
        return None
    exit_code = container.exec_run(["sh", "-c", f"kill -{number} {pid}"]).exit_code
    # The end of the server, or of what it needs, ends the container and this shell, maybe before the shell can say so.
    is_cut_off = number not in _ENDS_NOTHING and exit_code in _CUT_OFF
    return pid if exit_code == 0 or is_cut_off else None


def _find(container: Container, role: str) -> int | None:
    script = (
        f"for d in /proc/[0-9]*; do {FIND_ROLE[role]}; pid=${{d#/proc/}}; [ $pid = $$ ] && continue; "
        "echo $pid; exit; done 2>/dev/null; exit 1"
    )
    done = container.exec_run(["sh", "-c", script])
    assert isinstance(done.output, bytes)
    return int(done.output) if done.exit_code == 0 else None
