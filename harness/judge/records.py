"""Records of requests as columns: a million of them are read and judged in seconds, where JSON lines take minutes."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.errors import HarnessError
from harness.observe.history import OURS, Request, RequestResult

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

MISSING = -1  # a point in time that was not reached
CLASSES = tuple(RequestResult)
_CODE = {result: code for code, result in enumerate(CLASSES)}
_OURS = np.array([result in OURS for result in CLASSES])
_COLUMNS = (
    "planned_ns",
    "dispatched_ns",
    "sent_ns",
    "first_token_ns",
    "ended_ns",
    "output_tokens",
    "is_canary",
    "result",
    "token_counts",
    "token_ns",
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Records:
    """One row per arrival in order of its planned start; times are monotonic nanoseconds, `MISSING` where not reached.

    `result` is a position in `CLASSES`. The times of all tokens follow one another in `token_ns`, `token_counts` of them
    for each row.
    """

    planned_ns: Ints
    dispatched_ns: Ints
    sent_ns: Ints
    first_token_ns: Ints
    ended_ns: Ints
    output_tokens: Ints
    is_canary: Mask
    result: Ints
    token_counts: Ints
    token_ns: Ints

    def __len__(self) -> int:
        return len(self.planned_ns)

    @classmethod
    def of(cls, requests: Iterable[Request]) -> Records:
        """Return the records of requests."""
        rows = sorted(requests, key=lambda request: (request.planned_ns, request.id))

        def times(name: str) -> Ints:
            values = (getattr(row, name) for row in rows)
            return np.fromiter((MISSING if value is None else value for value in values), np.int64, len(rows))

        tokens = [token for row in rows for token in row.token_ns]
        return cls(
            planned_ns=times("planned_ns"),
            dispatched_ns=times("dispatched_ns"),
            sent_ns=times("sent_ns"),
            first_token_ns=times("first_token_ns"),
            ended_ns=times("ended_ns"),
            output_tokens=times("output_tokens"),
            is_canary=np.fromiter((row.is_canary for row in rows), np.bool_, len(rows)),
            result=np.fromiter((_CODE[row.ended_as] for row in rows), np.int64, len(rows)),
            token_counts=np.fromiter((len(row.token_ns) for row in rows), np.int64, len(rows)),
            token_ns=np.array(tokens, np.int64),
        )

    def save(self, path: Path) -> None:
        """Write the columns, whole or not at all; results by their names, which outlive their order."""
        columns: dict[str, Any] = {name: getattr(self, name) for name in _COLUMNS}
        partial = path.with_name(f".{path.name}.partial")
        with partial.open("wb") as file:
            np.savez(
                file,
                allow_pickle=False,
                **{**columns, "result": columns["result"].astype(np.uint8)},
                classes=np.array([str(result) for result in CLASSES]),
            )
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> Records:
        """Read saved columns; nothing in the file is trusted.

        Raises: HarnessError naming the file when it does not hold records.
        """
        try:
            with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
                classes = [_CODE[RequestResult(str(name))] for name in file["classes"]]
                columns = {name: np.asarray(file[name]) for name in _COLUMNS}
            _require_shape(columns)
            if (columns["result"] < 0).any():  # numpy would count from the end
                raise ValueError("a result below zero is no position in its classes")
            columns["result"] = np.array(classes, np.int64)[columns["result"]]
            kinds = {name: np.bool_ if name == "is_canary" else np.int64 for name in _COLUMNS}
            return cls(**{name: column.astype(kinds[name], copy=False) for name, column in columns.items()})
        except (OSError, ValueError, TypeError, LookupError, EOFError, zipfile.BadZipFile) as error:
            raise HarnessError(
                f'"{path}" does not hold records of requests: {type(error).__name__}: {error}'
            ) from error

    def select(self, rows: Mask) -> Records:
        """Return the rows where `rows` is true."""
        return Records(
            **{name: getattr(self, name)[rows] for name in _COLUMNS if name != "token_ns"},
            token_ns=self.token_ns[np.repeat(rows, self.token_counts)],
        )

    def between(self, start_ns: int, end_ns: int) -> Records:
        """Return what was planned from `start_ns` until before `end_ns`."""
        return self.select((self.planned_ns >= start_ns) & (self.planned_ns < end_ns))

    def of_users(self) -> Records:
        """Return what says something about the engine to users: no canaries, no failures of our own."""
        return self.select(~self.is_canary & ~_OURS[self.result])

    def digest(self) -> str:
        """Return a SHA-256 over when its arrivals were due and ended; empty without arrivals."""
        if not len(self):
            return ""
        return hashlib.sha256(self.planned_ns.tobytes() + self.ended_ns.tobytes()).hexdigest()

    @property
    def is_ok(self) -> Mask:
        """Say for each row whether it was answered in full."""
        ok: Mask = self.result == _CODE[RequestResult.OK]
        return ok

    @property
    def last_token_ns(self) -> Ints:
        """Return the time of the last token of each row, of the end where no tokens were seen."""
        ends = np.cumsum(self.token_counts)
        has = self.token_counts > 0
        last = self.ended_ns.copy()
        last[has] = self.token_ns[ends[has] - 1]
        return last

    def counts(self) -> dict[RequestResult, int]:
        """Return how many rows ended in each class, without those that none did."""
        codes, numbers = np.unique(self.result, return_counts=True)
        return {CLASSES[code]: int(number) for code, number in zip(codes, numbers, strict=True)}


def joined(parts: Sequence[Records]) -> Records:
    """Return the rows of all parts, one after the other."""
    return Records(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in _COLUMNS})


def _require_shape(columns: dict[str, NDArray[Any]]) -> None:
    rows = len(columns["planned_ns"]) if columns["planned_ns"].ndim == 1 else -1
    for name, column in columns.items():
        kind = "b" if name == "is_canary" else "iu"
        if column.ndim != 1 or column.dtype.kind not in kind or (name != "token_ns" and len(column) != rows):
            raise ValueError(
                f'column "{name}" has shape {column.shape} and type {column.dtype}, {rows} rows are expected'
            )
    counts = columns["token_counts"]
    if (counts < 0).any() or int(counts.sum()) != len(columns["token_ns"]):
        raise ValueError(f"{len(columns['token_ns'])} token times for rows that have {int(counts.sum())}")
