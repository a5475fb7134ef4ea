"""Recorded arrivals: when requests came, and how long they were."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import ScenarioInvalid

ROWS_MAX = 2_000_000
MS_PER_S = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """One recorded arrival; None where the trace does not say how long it was."""

    at_s: float
    prompt_tokens: int | None = None
    output_tokens: int | None = None


def read_trace(path: Path) -> tuple[TraceRow, ...]:
    """Read recorded arrivals, in seconds from the first; at most 2,000,000.

    `.csv` with a header, or JSON lines. Names: `at_s`, `prompt_tokens`, `output_tokens`; also, as in the published
    Mooncake traces, `timestamp` in milliseconds, `input_length`, `output_length`.
    Raises: ScenarioInvalid naming the line: no time, no number, a time before the one above it, a length below one.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ScenarioInvalid(f'trace "{path}" cannot be read: {error}') from error
    rows: list[TraceRow] = []
    for number, fields in _numbered(path, text):
        where = f'trace "{path}" line {number}'
        row = TraceRow(
            at_s=_time_s(where, fields),
            prompt_tokens=_length(where, fields, "prompt_tokens", "input_length"),
            output_tokens=_length(where, fields, "output_tokens", "output_length"),
        )
        if rows and row.at_s < rows[-1].at_s:
            raise ScenarioInvalid(f"{where}: times decrease, {row.at_s:g} s comes after {rows[-1].at_s:g} s")
        if len(rows) == ROWS_MAX:
            raise ScenarioInvalid(f"{where}: a trace may have at most {ROWS_MAX:,} arrivals")
        rows.append(row)
    if not rows:
        raise ScenarioInvalid(f'trace "{path}" has zero arrivals')
    first_s = rows[0].at_s
    return tuple(
        TraceRow(at_s=round(row.at_s - first_s, 6), prompt_tokens=row.prompt_tokens, output_tokens=row.output_tokens)
        for row in rows
    )


def _numbered(path: Path, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    lines = text.splitlines()
    if path.suffix == ".csv":
        reader = csv.DictReader(lines)
        for row in reader:
            yield reader.line_num, {name: value for name, value in row.items() if name and value}
        return
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ScenarioInvalid(f'trace "{path}" line {number} is not JSON: {error}') from error
        if not isinstance(fields, dict):
            raise ScenarioInvalid(f'trace "{path}" line {number} is not a JSON object')
        yield number, fields


def _time_s(where: str, fields: Mapping[str, Any]) -> float:
    name, per_s = ("at_s", 1.0) if "at_s" in fields else ("timestamp", MS_PER_S)
    if name not in fields:
        raise ScenarioInvalid(f'{where}: no "at_s" and no "timestamp", only {", ".join(sorted(fields)) or "nothing"}')
    value = _number(where, name, fields[name]) / per_s
    if value < 0:
        raise ScenarioInvalid(f'{where}: "{name}" is {fields[name]!r}, before the start')
    return value


def _length(where: str, fields: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        if fields.get(name) is not None:
            value = _number(where, name, fields[name])
            if value < 1 or value != int(value):
                raise ScenarioInvalid(f'{where}: "{name}" is {fields[name]!r}, it must be a whole number above zero')
            return int(value)
    return None


def _number(where: str, name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, bool) or not math.isfinite(number):
        raise ScenarioInvalid(f'{where}: "{name}" is {value!r}, it must be a number')
    return number
