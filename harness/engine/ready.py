"""Wait until an engine is ready, and read its log when it is not: shared by all engines."""

from __future__ import annotations

import http.client
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

from harness.clock import Deadline, now_ns, poll_until, seconds_between
from harness.errors import EngineNotReady, WaitExpired

SCRUBBED = b"[scrubbed]"
HEALTHY = "HTTP 200"

_LINE_CUT_BYTES = 1024 * 1024
_LOG_READ_BYTES = 4 * 1024 * 1024
_LINE_CUT_CHARACTERS = 400

_CONTROL = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")
_PROCESS_PREFIX = re.compile(r"^\s*\((?:APIServer|EngineCore|Worker|ApiServer|DPCoordinator)[^)]*\)\s?")
_LEVEL_PREFIX = re.compile(r"^(?P<level>[A-Z]+) \d\d-\d\d \d\d:\d\d:\d\d (?:\[[^\]]*\] ?)?")
_EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Za-z_]*(?:Error|Exception|Exit|Interrupt|Refused)(?::\s|$)")
_DEATH = re.compile(r"^(?:Fatal Python error|.*\bSegfault encountered|Segmentation fault|Killed$|Bus error|Aborted)")
_OPTION = re.compile(r"^(?:vllm|usage|[\w.]+\.py|vllm serve)\b.*: error: ")
# Written by the parent process about a child whose own error stands above.
_CONSEQUENCE = re.compile(
    r"Engine core initialization failed|EngineCore failed to start|EngineCore encountered a fatal error|"
    r"EngineDeadError|WorkerProc initialization failed|Failed core proc|"
    r"^(?:SystemExit|KeyboardInterrupt|asyncio\.(?:exceptions\.)?CancelledError)"
)


def scrub(text: bytes, secrets: Iterable[str]) -> bytes:
    """Replace every secret in `text`."""
    for secret in secrets:
        if secret:
            text = text.replace(secret.encode(), SCRUBBED)
    return text


def copy_log(chunks: Iterable[bytes], sink: BinaryIO, *, secrets: Iterable[str]) -> None:
    """Write an engine's output to `sink` as it comes, whole lines at a time so that no secret is cut in two.

    A line over 1 MiB is written in parts. Returns when `chunks` ends; the sink is flushed after every chunk.
    """
    secrets = tuple(secrets)
    waiting = b""
    for chunk in chunks:
        waiting += chunk
        cut = waiting.rfind(b"\n") + 1
        if cut == 0 and len(waiting) > _LINE_CUT_BYTES:
            # The tail stays back: a secret may have begun in it.
            waiting = scrub(waiting, secrets)
            cut = len(waiting) - max((len(secret.encode()) for secret in secrets), default=0)
        sink.write(scrub(waiting[:cut], secrets))
        sink.flush()
        waiting = waiting[cut:]
    sink.write(scrub(waiting, secrets))
    sink.flush()


def probe_health(endpoint: str, *, limit_s: float) -> str:
    """Ask `/health` once, without retries, and return `HTTP <status>` or what went wrong."""
    parts = urlsplit(endpoint)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=limit_s)
    try:
        connection.request("GET", f"{parts.path.rstrip('/')}/health")
        return f"HTTP {connection.getresponse().status}"
    except (OSError, http.client.HTTPException) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        connection.close()


def wait_healthy(
    *,
    incarnation: str,
    endpoint: str,
    started_ns: int,
    limit_s: float,
    exit_code: Callable[[], int | None],
    log_path: Path,
    finish_log: Callable[[], None] = lambda: None,
    every_s: float = 0.1,
) -> float:
    """Wait until `/health` answers 200 and return the seconds since `started_ns`.

    `exit_code` is asked before every probe, so an engine that ends is noticed at once; `finish_log` is called before
    the log of a dead engine is read.
    Raises: EngineNotReady with the reason, exit code, last probe and first error lines of the log.
    """
    deadline = Deadline.after(limit_s)
    last_probe = "not asked"

    def ask() -> str | None:
        nonlocal last_probe
        if exit_code() is not None:
            return "ended"
        last_probe = probe_health(endpoint, limit_s=max(0.05, min(5.0, deadline.remaining_s())))
        return "healthy" if last_probe == HEALTHY else None

    try:
        state = poll_until(ask, what=f'engine "{incarnation}" healthy', limit_s=limit_s, every_s=every_s)
    except WaitExpired:
        state = "expired"
    if state == "healthy":
        return seconds_between(started_ns, now_ns())
    if state == "ended":
        finish_log()
    raise EngineNotReady(
        incarnation,
        reason="it ended" if state == "ended" else "no answer of 200 on /health",
        limit_s=limit_s,
        waited_s=deadline.waited_s(),
        last_probe=last_probe,
        exit_code=exit_code(),
        log_lines=first_error_lines(read_log(log_path)),
        log_path=log_path,
    )


def read_log(path: Path) -> str:
    """Return the first 4 MiB of a log as text; empty when there is none."""
    try:
        with path.open("rb") as log:
            return log.read(_LOG_READ_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def first_error_lines(log_text: str, *, limit: int = 5) -> tuple[str, ...]:
    """Return the lines of a vLLM log that say why it failed, the root cause first.

    These are the messages of exceptions, of the option parser and of deaths by signal, in the order written, each
    once; what a parent process reports about its dead child comes last. Prefixes and control characters are removed.
    """
    causes: list[str] = []
    consequences: list[str] = []
    logged: list[str] = []
    is_header = False
    for raw in log_text.splitlines():
        line = _PROCESS_PREFIX.sub("", _CONTROL.sub("", raw))
        level = _LEVEL_PREFIX.match(line)
        line = line[level.end() :] if level else line
        if is_header and line.startswith((" ", "\t")) and causes:
            causes[-1] = _cut(f"{causes[-1]} {line.strip()}")
        elif _EXCEPTION.match(line) or _OPTION.match(line) or _DEATH.match(line):
            found = consequences if _CONSEQUENCE.search(line) else causes
            if _cut(line) not in found:
                found.append(_cut(line))
                is_header = found is causes and "validation error" in line
                continue
        elif level and level["level"] in ("ERROR", "CRITICAL") and not line.startswith((" ", "Traceback")):
            found = consequences if _CONSEQUENCE.search(line) else logged
            if line.strip() and _cut(line) not in found:
                found.append(_cut(line))
        is_header = False
    return tuple((causes or logged) + consequences)[:limit]


def _cut(line: str) -> str:
    line = line.strip()
    return line if len(line) <= _LINE_CUT_CHARACTERS else line[: _LINE_CUT_CHARACTERS - 1] + "…"
