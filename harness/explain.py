"""`harness explain`: what an engine's log says went wrong, for people; reads logs of any size, line by line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from harness.errors import EXIT_BROKEN, EXIT_HELD, EXIT_UNKNOWN, UsageError
from harness.guards.command import CommandParser, print_json
from harness.guards.finding import printable
from harness.observe.logs import (
    LINE_CHARACTERS_MAX,
    LogLine,
    can_be_cause,
    cause_order,
    classify_lines,
    is_shutdown,
    is_start,
    raised_in,
)
from harness.observe.signatures import ECHO, NOTE

CHUNK_BYTES = 64 * 1024
LINE_BYTES_MAX = 4 * LINE_CHARACTERS_MAX  # as many bytes as that many characters can take
SHOWN_CHARACTERS = 400
WEIGHTS = {"error": "errors", ECHO: "reports of another process's failure", NOTE: "worth knowing"}
NOTHING = "nothing in this log is known. That is no pass: many faults that serve wrong answers leave nothing in a log."
EMPTY = "the log is empty: nothing was read, so nothing can be said."
NO_CAUSE = "a part of the engine failed, and no line that is known says why."
EPILOG = """example: journalctl -u vllm | harness explain -

Exit codes: 0 no cause in it, 1 a cause, 2 something failed and no known line says why, or the log is empty,
3 a wrong call."""


@dataclass(slots=True)
class Seen:
    """One kind of known line: the first that was printed, and how many there were."""

    first: LogLine
    count: int = 1


@dataclass(frozen=True, slots=True)
class Raised:
    """A line that names an exception, known or not."""

    number: int
    text: str
    before: Raised | None = None  # the last one before it, which counts if this one is known


@dataclass(slots=True)
class Explanation:
    """What a log says: the cause, and every kind of known line once; as small for a long log as for a short one."""

    cause: LogLine | None = None
    seen: dict[tuple[object, ...], Seen] = field(default_factory=dict)
    lines: int = 0  # that were read, without empty ones
    raised: Raised | None = None  # the last exception of which no line is known

    def add(self, line: LogLine) -> None:
        """Take in the next known line."""
        kind = (line.weight, line.klass, line.fault_ids, line.remedy)
        if kind in self.seen:
            self.seen[kind].count += 1
        else:
            self.seen[kind] = Seen(first=line)
        if can_be_cause(line) and (self.cause is None or cause_order(line) < cause_order(self.cause)):
            self.cause = line

    @property
    def exit_code(self) -> int:
        """Return 1 for a cause, 2 when something failed and nothing says why, or nothing was read, else 0."""
        if self.cause is not None:
            return EXIT_BROKEN
        is_well = all(each.first.weight == NOTE for each in self.seen.values())
        return EXIT_HELD if is_well and self.lines and self.raised is None else EXIT_UNKNOWN

    def as_json(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        return {
            "cause": None if self.cause is None else _line_as_json(self.cause),
            "unknown_exception": None
            if self.raised is None
            else {"line": self.raised.number, "text": self.raised.text},
            "lines_read": self.lines,
            "lines": [{**_line_as_json(each.first), "count": each.count} for each in self.seen.values()],
        }


def explain(lines: Iterable[str]) -> Explanation:
    """Read a log and return what it says."""
    explanation = Explanation()
    for line in classify_lines(_watched(lines, explanation)):
        explanation.add(line)
        explanation.raised = _without(explanation.raised, line.number)  # it is known what that one means
    return explanation


def _without(raised: Raised | None, number: int) -> Raised | None:
    if raised is None or raised.number == number:
        return None if raised is None else raised.before
    return replace(raised, before=_without(raised.before, number))


def _watched(lines: Iterable[str], explanation: Explanation) -> Iterator[str]:
    """Pass the lines on, and note the last exception among them until the engine is asked to stop."""
    is_stopping = False
    for number, raw in enumerate(lines, start=1):
        explanation.lines += bool(raw.strip())
        is_stopping = (is_stopping or is_shutdown(raw)) and not is_start(raw)
        if not is_stopping and (text := raised_in(raw)):
            last = explanation.raised
            explanation.raised = Raised(number, text, before=None if last is None else replace(last, before=None))
        yield raw


def bounded_lines(file: BinaryIO) -> Iterator[str]:
    """Yield the lines of a log; of a line without end, or of what is no text, only the beginning is kept."""
    rest = b""
    is_skipping = False  # inside a line of which enough was kept
    while chunk := file.read(CHUNK_BYTES):
        first, *others = chunk.split(b"\n")
        if not is_skipping:
            rest = (rest + first)[:LINE_BYTES_MAX]
        for line in others:
            yield rest.decode("utf-8", "replace")
            rest = line[:LINE_BYTES_MAX]
        is_skipping = len(rest) >= LINE_BYTES_MAX
    if rest:
        yield rest.decode("utf-8", "replace")


def explain_main(arguments: Sequence[str]) -> int:
    """Run `harness explain`."""
    parser = CommandParser(
        prog="harness explain",
        description="Say what an engine's log means: the cause, likely faults, and what to do.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("log", metavar="LOGFILE", help="a file with what the engine printed, or - for standard input")
    parser.add_argument("--all", action="store_true", help="also what is worth knowing without being a failure")
    parser.add_argument("--json", action="store_true", help="print all of it as JSON")
    options = parser.parse_args(arguments)
    if options.log == "-":
        explanation = explain(bounded_lines(sys.stdin.buffer))
    else:
        try:
            with Path(options.log).open("rb") as file:
                explanation = explain(bounded_lines(file))
        except OSError as error:
            raise UsageError(f'the log "{options.log}" cannot be read: {error.strerror or error}') from error
    if options.json:
        print_json(explanation.as_json())
    else:
        for text in _as_text(explanation, with_notes=options.all):
            print(printable(text))
    return explanation.exit_code


def _as_text(explanation: Explanation, *, with_notes: bool) -> Iterator[str]:
    cause = explanation.cause
    if cause is not None:
        yield f"cause, line {cause.number:,} ({_kind(cause)}):"
        yield f"  {cause.text[:SHOWN_CHARACTERS]}"
        yield cause.remedy
    elif not explanation.lines:
        yield EMPTY
    elif explanation.exit_code == EXIT_UNKNOWN:
        yield NO_CAUSE
    elif not explanation.seen:
        yield NOTHING
    else:
        yield "no line of this log names a failure. " + NOTHING.partition(". ")[2]
    if cause is None and (raised := explanation.raised) is not None:
        yield f"the last exception that it names, line {raised.number:,}:"
        yield f"  {raised.text[:SHOWN_CHARACTERS]}"
    for weight, title in WEIGHTS.items():
        others = [
            each
            for each in explanation.seen.values()
            if each.first.weight == weight and not (each.count == 1 and each.first == cause)
        ]
        if not others or (weight == NOTE and not with_notes):
            continue
        yield ""
        yield f"{title}:"
        for each in others:
            times = "" if each.count == 1 else f", {each.count:,} times"
            yield f"  line {each.first.number:,}{times} ({_kind(each.first)}): {each.first.text[:SHOWN_CHARACTERS]}"
            if each.first.remedy and each.first.remedy != (cause and cause.remedy):
                yield f"    {each.first.remedy}"


def _kind(line: LogLine) -> str:
    return f"{line.klass}; {', '.join(line.fault_ids)}" if line.fault_ids else line.klass


def _line_as_json(line: LogLine) -> dict[str, Any]:
    return {
        "line": line.number,
        "class": line.klass,
        "weight": line.weight,
        "text": line.text,
        "fault_ids": list(line.fault_ids),
        "remedy": line.remedy,
    }
