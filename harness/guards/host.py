"""Check the machine that pre-flight runs on, as the engine would find it there: its port, its shared memory, its cache.

Only when asked: the answer is about this host, this user and this moment. Nothing stays, and nothing stays bound.
Source: vLLM 0.32.0 binds its port before anything else, with SO_REUSEADDR; each queue to and from a worker is a ring of ten
chunks in /dev/shm, which it refuses to create where the space is not free.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from harness.guards.finding import PreflightFinding, Severity, shortened
from harness.guards.launch_options import WHERE, Launch

DEFAULT_PORT = 8000
SHARED_MEMORY = Path("/dev/shm")
QUEUE_BYTES = 240 * 1024**2  # the larger of the two queues of a worker: ten chunks of 24 MiB
CHUNKS = 10
SOCKET_PATH_BYTES_MAX = 107  # of Linux, for a Unix socket
CHUNK_VARIABLE = "VLLM_MQ_MAX_CHUNK_BYTES_MB"
ELSEWHERE = "run this on the host, and as the user, that the engine will have"


def host_findings(
    launch: Launch, *, environment: Mapping[str, str] | None = None, shared_memory: Path = SHARED_MEMORY
) -> Iterator[PreflightFinding]:
    """Yield what of this host would stop the launch: a port that is held or forbidden, too little shared memory, a cache
    that cannot be written.

    What the launch line sets wins over `environment`, which is this process's own when left out.
    """
    variables = {**(os.environ if environment is None else environment), **launch.variables}
    yield from _port(launch)
    yield from _shared_memory(launch, variables, shared_memory)
    yield from _cache(launch, variables)


def _port(launch: Launch) -> Iterator[PreflightFinding]:
    path = launch.text("--uds")
    if path and "\0" not in path:
        yield from _socket_file(Path(path))
        return
    port, host = launch.number("--port", DEFAULT_PORT), launch.text("--host") or ""
    if port is None or not 0 < port < 65536:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(
                socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
            )  # as the engine does: only a listener is in the way
            probe.bind((host, port))
    except (OSError, ValueError) as error:  # ValueError: no name of a host
        where = f"{shortened(host) or 'every address'}, port {port}"
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            yield _finding(
                "L05",
                f"somebody listens on {where}, perhaps the old engine",
                "a port that nobody listens on",
                "stop the old engine first; until then health checks there are answered by it",
            )
        else:
            yield _finding("M07", f"{where}: {_words(error)}", "an address that this user may listen on", ELSEWHERE)


def _socket_file(path: Path) -> Iterator[PreflightFinding]:
    if os.path.lexists(path):
        yield _finding("L05", f'--uds "{shortened(path)}" exists', "a path that is free", "stop the old engine first")
        return
    size_bytes = len(os.fsencode(path))
    if size_bytes > SOCKET_PATH_BYTES_MAX:
        seen = f'--uds "{shortened(path)}": its path has {size_bytes} bytes'
        yield _finding("M07", seen, f"at most {SOCKET_PATH_BYTES_MAX} bytes", "give a shorter path")
        return
    # Root passes every check of permissions, also where the kernel lets nobody make a file: only making one tells.
    trial = path.parent / f".{os.getpid():x}"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.bind(str(trial))
        trial.unlink()
    except OSError as error:
        seen = f'--uds "{shortened(path)}": no socket can be made there: {_words(error)}'
        yield _finding("M07", seen, "a directory to write to", ELSEWHERE)


def _shared_memory(launch: Launch, variables: Mapping[str, str], mounted: Path) -> Iterator[PreflightFinding]:
    ranks = 1
    for option in ("--tensor-parallel-size", "--pipeline-parallel-size"):
        ranks *= launch.number(option, 1) or 1
    if ranks < 2:
        return  # one worker lives in the engine's own process tree without a queue of this size
    asked = variables.get(CHUNK_VARIABLE, "")
    needed = max(QUEUE_BYTES, CHUNKS * int(asked) * 1024**2 if asked.isdecimal() else 0)
    try:
        state = os.statvfs(mounted)
    except OSError as error:
        yield _finding("M01", f'"{mounted}": {error.strerror}', "shared memory for the workers' queues", ELSEWHERE)
        return
    free = state.f_bavail * state.f_frsize
    if free < needed:
        yield _finding(
            "M01",
            f'{free / 1024**2:.0f} MiB free in "{mounted}", {ranks} workers',
            f"at least {needed / 1024**2:.0f} MiB, the size of one queue",
            "enlarge it (docker run --shm-size 1g, or a memory volume at /dev/shm), or remove what dead engines left",
        )


def _cache(launch: Launch, variables: Mapping[str, str]) -> Iterator[PreflightFinding]:
    base = variables.get("XDG_CACHE_HOME") or f"{variables.get('HOME') or '~'}/.cache"
    root = Path(os.path.expanduser(variables.get("VLLM_CACHE_ROOT") or f"{base}/vllm"))
    there = next((path for path in (root, *root.parents) if _is_taken(path)), Path("/"))
    if os.path.isdir(there) and os.access(there, os.W_OK | os.X_OK):
        return
    yield PreflightFinding(
        id="K04",
        severity=Severity.RISK if launch.flags.get("--enforce-eager") else Severity.REFUSES,
        seen=f'"{there}" ' + ("cannot be written by this user" if os.path.isdir(there) else "is no directory"),
        expected=f'a cache directory that can be written: "{root}"',
        where="VLLM_CACHE_ROOT",
        remedy=f"set VLLM_CACHE_ROOT to such a directory, or mount one; {ELSEWHERE}",
    )


def _is_taken(path: Path) -> bool:
    """Say whether something is there, or nothing ever can be: a name too long, or one below a closed directory."""
    try:
        return path.exists()
    except OSError:
        return True


def _finding(fault_id: str, seen: str, expected: str, remedy: str) -> PreflightFinding:
    return PreflightFinding(
        id=fault_id,
        severity=Severity.REFUSES,
        seen=seen,
        expected=expected,
        where="this host" if fault_id == "M01" else WHERE,
        remedy=remedy,
    )


def _words(error: OSError | ValueError) -> str:
    return shortened((error.strerror if isinstance(error, OSError) else None) or error)
