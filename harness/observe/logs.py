"""Say what the lines of an engine's log mean: class, likely faults, remedy, and which line is the cause.

No match is not a pass: many faults that serve wrong answers leave nothing in a log.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from harness.observe.signatures import ECHO, ERROR, NOTE, SIGNATURES, WEAK_SIGNATURES, Signature

LINE_CHARACTERS_MAX = 2_000
_CAUSE_ORDER = ("signal", "file", "config", "load", "memory", "cache", "request", "live", "lora", "engine")
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")
_PROCESS = re.compile(
    r"^\s*\([A-Za-z]\w*(?:[ -][^)]{1,40})?\)\s?"
)  # "(EngineCore_DP0 pid=12)", "(VllmWorker rank=0 pid=12)"
_LEVEL = re.compile(
    r"^(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL)\b:? *(?:\d\d-\d\d \d\d:\d\d:\d\d)? ?(?:\[[\w.:/<>-]{1,60}\] ?)?"
)
# What stands before a line that came through journald, syslog, docker, docker compose or kubectl.
_CARRIER = re.compile(
    r"^(?:\[pod/[^\]]{1,200}\] |[\w.-]{1,60} {1,40}\| )?"
    r"(?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d [\w.-]{1,64} [\w@.-]{1,64}(?:\[\d{1,10}\])?: "
    r"|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[\d.,]{0,10}(?:Z|[+-]\d\d:?\d\d) "
    r"(?:std(?:out|err) [FP] |[\w.-]{1,64} [\w@.-]{1,64}\[\d{1,10}\]: )?)?"
)
# What a client asked, and what it was answered, as engines log it: never about the engine.
_REQUEST = re.compile(r"^(?:Received request |Generated response |Request \S{1,200} (?:details|JSON body): )")
_PYTHON_WARNING = re.compile(r"\b\w*Warning: ")
_SHUTDOWN = re.compile(r"\[shutdown\] .{0,80}(received signal=|shutdown triggered)")
_FRAME = re.compile(r"^(?: {2,}|\t)\S")
_RAISED = re.compile(r"(?:[a-z_]\w{0,60}\.){0,9}[A-Z]\w{0,60}(?:Error|Exception): ")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """One line of a log that is known.

    `text` has no prefix of process or time. `weight` is `error`, `note` or `echo`; only an `error` can be a cause.
    """

    number: int
    text: str
    klass: str
    fault_ids: tuple[str, ...]
    remedy: str
    weight: str = ERROR


def classify(text: str) -> tuple[LogLine, ...]:
    """Return the known lines of a log in the order in which they were printed."""
    return tuple(classify_lines(text.split("\n")))


def classify_lines(lines: Iterable[str]) -> Iterator[LogLine]:
    """Yield the known lines of a log, one after the other; nothing else is kept.

    Lines of code in a traceback are never classified, nor what clients asked and were answered, nor what an engine says
    about its parts while it is asked to stop.
    """
    is_stopping = False
    for number, raw in enumerate(lines, start=1):
        message, level = _message(raw)
        is_stopping = is_stopping or _SHUTDOWN.match(message) is not None
        if not message or _FRAME.match(message) or _REQUEST.match(message):
            continue
        signature = _signature(message, level)
        if signature is None or (is_stopping and signature.weight == ECHO):
            continue
        yield LogLine(
            number=number,
            text=message,
            klass=signature.klass,
            fault_ids=signature.fault_ids,
            remedy=signature.remedy,
            weight=signature.weight,
        )


def raised_in(raw: str) -> str:
    """Return what a line says was raised, known or not; empty for one that names no exception first, or as advice."""
    if "Error: " not in raw and "Exception: " not in raw:
        return ""
    message, level = _message(raw)
    return message if level in ("", "ERROR", "CRITICAL") and _RAISED.match(message) else ""


def is_shutdown(raw: str) -> bool:
    """Say whether an engine is asked to stop with this line: what it says about its parts from then on is no failure."""
    return "[shutdown]" in raw and _SHUTDOWN.match(_message(raw)[0]) is not None


def is_start(raw: str) -> bool:
    """Say whether a server begins with this line: a log may hold one after the other."""
    return "non-default args: " in raw


def root_cause(text: str) -> LogLine | None:
    """Return the line that says why an engine failed, or None when no known line does.

    A signal comes before files, files before config, config before loading, and so on; within a class the first line
    printed. Lines in which one process reports the failure of another are never the cause.
    """
    return min(filter(can_be_cause, classify(text)), key=cause_order, default=None)


def can_be_cause(line: LogLine) -> bool:
    """Say whether a line can be the reason of a failure."""
    return line.weight == ERROR and line.klass in _CAUSE_ORDER


def cause_order(line: LogLine) -> tuple[int, int]:
    """Return what lines that can be the cause are sorted by: the first of them is it."""
    return _CAUSE_ORDER.index(line.klass), line.number


def has_load_error(text: str) -> bool:
    """Say whether the log shows that weights or files could not be read as they should."""
    return any(line.weight == ERROR and line.klass in ("file", "load") for line in classify(text))


def _message(raw: str) -> tuple[str, str]:
    """Return one line without process, level and time, and its level; empty when it prints none."""
    if not raw or (
        raw.startswith("INFO:  ") and " HTTP/1." in raw
    ):  # one per request: most of a long log, and never of interest
        return "", ""
    line = _CONTROL.sub("", raw[:LINE_CHARACTERS_MAX]).rstrip()
    line = _CARRIER.sub("", line, count=1)
    if line.startswith("INFO:  ") and " HTTP/1." in line:
        return "", ""
    line = _PROCESS.sub("", line, count=1)
    level = _LEVEL.match(line)
    if level is None:
        return line, "WARNING" if _PYTHON_WARNING.search(line) else ""
    return line[level.end() :], level["level"]


def _signature(message: str, level: str) -> Signature | None:
    for signature in (*SIGNATURES, *WEAK_SIGNATURES):
        for word in signature.words:
            if word in message:
                break
        else:
            continue
        if _counts(signature, level) and signature.pattern.search(message):
            return signature
    return None


def _counts(signature: Signature, level: str) -> bool:
    if signature.is_loose and level in ("DEBUG", "INFO", "WARNING"):
        return False
    return level not in ("DEBUG", "INFO") or signature.weight == NOTE or signature.is_quiet
