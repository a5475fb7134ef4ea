"""Say what the lines of an engine's log mean: class, likely faults, remedy, and which line is the cause.

No match is not a pass: many faults that serve wrong answers leave nothing in a log.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from harness.observe.signatures import ECHO, ERROR, SIGNATURES, WEAK_SIGNATURES, Signature

LINE_CHARACTERS_MAX = 2_000
_CAUSE_ORDER = ("signal", "file", "config", "load", "memory", "cache", "request", "live", "lora", "engine")
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")
_PROCESS = re.compile(
    r"^\s*\([A-Za-z]\w*(?:[ -][^)]{1,40})?\)\s?"
)  # "(EngineCore_DP0 pid=12)", "(VllmWorker rank=0 pid=12)"
_LEVEL = re.compile(
    r"^(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL)\b:? *(?:\d\d-\d\d \d\d:\d\d:\d\d)? ?(?:\[[\w.:/<>-]{1,60}\] ?)?"
)
_PYTHON_WARNING = re.compile(r"\b\w*Warning: ")
_SHUTDOWN = re.compile(r"\[shutdown\] .{0,80}(received signal=|shutdown triggered)")
_FRAME = re.compile(r"^(?: {2,}|\t)\S")


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
    """Return the known lines of a log in the order in which they were printed.

    Lines of code in a traceback are never classified, nor is what an engine says about its parts while it is asked to stop.
    """
    found: list[LogLine] = []
    is_stopping = False
    for number, raw in enumerate(text.split("\n"), start=1):
        message, level = _message(raw)
        is_stopping = is_stopping or _SHUTDOWN.match(message) is not None
        if not message or _FRAME.match(message):
            continue
        signature = _signature(message, level)
        if signature is None or (is_stopping and signature.weight == ECHO):
            continue
        found.append(
            LogLine(
                number=number,
                text=message,
                klass=signature.klass,
                fault_ids=signature.fault_ids,
                remedy=signature.remedy,
                weight=signature.weight,
            )
        )
    return tuple(found)


def root_cause(text: str) -> LogLine | None:
    """Return the line that says why an engine failed, or None when no known line does.

    A signal comes before files, files before config, config before loading, and so on; within a class the first line
    printed. Lines in which one process reports the failure of another are never the cause.
    """
    errors = [line for line in classify(text) if line.weight == ERROR and line.klass in _CAUSE_ORDER]
    return min(errors, key=lambda line: (_CAUSE_ORDER.index(line.klass), line.number), default=None)


def has_load_error(text: str) -> bool:
    """Say whether the log shows that weights or files could not be read as they should."""
    return any(line.weight == ERROR and line.klass in ("file", "load") for line in classify(text))


def _message(raw: str) -> tuple[str, str]:
    """Return one line without process, level and time, and its level; empty when it prints none."""
    if raw.startswith("INFO:  ") and " HTTP/1." in raw:  # one per request: most of a long log, and never of interest
        return "", ""
    line = _CONTROL.sub("", raw[:LINE_CHARACTERS_MAX]).rstrip()
    line = _PROCESS.sub("", line, count=1)
    level = _LEVEL.match(line)
    if level is None:
        return line, "WARNING" if _PYTHON_WARNING.search(line) else ""
    return line[level.end() :], level["level"]


def _signature(message: str, level: str) -> Signature | None:
    is_advice = level in ("DEBUG", "INFO", "WARNING")
    for signature in (*SIGNATURES, *WEAK_SIGNATURES):
        if not (is_advice and signature.is_loose) and signature.pattern.search(message):
            return signature
    return None
