"""At which layer each engine release noticed each fault, recorded from real starts."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.errors import HarnessError
from harness.judge.moments import Layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """The layers of every recorded start of one scenario on one engine release, and the runs they come from."""

    layers: tuple[Layer, ...]
    runs: tuple[str, ...]
    seen: str = ""  # what the engine said in the last recorded start


def expectations_path(directory: Path, engine_label: str) -> Path:
    """Return the file of one engine release; a label can only name a file inside `directory`."""
    return directory / f"{re.sub(r'[^A-Za-z0-9._+-]', '_', engine_label)}.toml"


def load_expectations(directory: Path, engine_label: str) -> Mapping[str, Expectation]:
    """Read what was recorded for an engine release; empty when nothing was.

    Raises: HarnessError naming the file and what is wrong in it.
    """
    path = expectations_path(directory, engine_label)
    if not path.is_file():
        return {}
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
        return {
            scenario: Expectation(
                layers=tuple(Layer(layer) for layer in table["layers"]),
                runs=tuple(table["runs"]),
                seen=table.get("seen", ""),
            )
            for scenario, table in tables.items()
        }
    except (ValueError, KeyError, TypeError) as error:
        raise HarnessError(f'"{path}" is not an expectations file: {error}') from error


def record_start(directory: Path, engine_label: str, scenario: str, *, layer: Layer, run: str, seen: str) -> None:
    """Add one start to the file of an engine release; the same run counts once.

    Raises: HarnessError for a name that no scenario can have, or a file that cannot be read.
    """
    if not scenario.isidentifier():
        raise HarnessError(
            f"a scenario's name must be an identifier, got {scenario[:80]!r}: nothing was recorded of it"
        )
    known = dict(load_expectations(directory, engine_label))
    old = known.get(scenario, Expectation(layers=(), runs=()))
    if run in old.runs:
        return
    known[scenario] = Expectation(layers=(*old.layers, layer), runs=(*old.runs, run), seen=_shown(seen))
    directory.mkdir(parents=True, exist_ok=True)
    path = expectations_path(directory, engine_label)
    partial = path.with_suffix(".partial")
    partial.write_text(_as_toml(engine_label, known), encoding="utf-8")
    partial.replace(path)


def _shown(text: str) -> str:
    # An engine's words: some characters of a JSON string must not be in a TOML one.
    return "".join(character if character.isprintable() else " " for character in text)


def _as_toml(engine_label: str, known: Mapping[str, Expectation]) -> str:
    parts = [
        f"# Where {engine_label} notices each fault, unguarded; one entry per recorded start.\n"
        "# Written by `harness expectations accept` and `measure`, never by hand.\n"
    ]
    for scenario in sorted(known):
        entry = known[scenario]
        # A JSON string or list of strings is also a TOML one (no bare control characters, same escapes).
        parts.append(
            f"[{scenario}]\nlayers = {json.dumps([str(layer) for layer in entry.layers])}\n"
            f"runs = {json.dumps(list(entry.runs))}\nseen = {json.dumps(entry.seen)}\n"
        )
    return "\n".join(parts)
