"""At which layer each engine release noticed each fault, recorded from real starts."""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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
    reasons: tuple[str, ...] = ()  # one per start: why it was accepted, empty for one that was measured
    noticed_after_s: tuple[float | None, ...] = ()  # one per start; None: nobody noticed, or it was not measured
    wrong_ratios: tuple[float | None, ...] = ()  # one per start: how many of the answers were of wrong weights

    @property
    def latest(self) -> Layer:
        """Return the latest layer among the recorded starts: what a user of that release must reckon with."""
        return max(self.layers, key=lambda layer: layer.rank)

    def starts(self, scenario: str) -> tuple[Start, ...]:
        """Return every recorded start; what the engine said is known of the last one."""
        blank = (None,) * len(self.runs)
        each = zip(self.layers, self.runs, self.noticed_after_s or blank, self.wrong_ratios or blank, strict=False)
        return tuple(
            Start(scenario=scenario, layer=layer, run=run, seen=self.seen, noticed_after_s=after_s, wrong_ratio=wrong)
            for layer, run, after_s, wrong in each
        )

    def with_start(self, start: Start, *, reason: str = "") -> Expectation:
        """Return the same with one start more; the same run counts once."""
        if _shown(start.run) in self.runs:
            return self
        return Expectation(
            layers=(*self.layers, start.layer),
            runs=(*self.runs, _shown(start.run)),
            seen=_shown(start.seen),
            reasons=(*self.reasons, *[""] * (len(self.runs) - len(self.reasons)), _shown(reason)),
            noticed_after_s=self._with_figure(self.noticed_after_s, start.noticed_after_s),
            wrong_ratios=self._with_figure(self.wrong_ratios, start.wrong_ratio),
        )

    def _with_figure(self, figures: tuple[float | None, ...], figure: float | None) -> tuple[float | None, ...]:
        return (*figures, *[None] * (len(self.runs) - len(figures)), figure)


NOTHING_RECORDED = Expectation(layers=(), runs=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start of an engine on one fault, as it was seen: what an expectation is made of."""

    scenario: str
    layer: Layer
    run: str  # the run it is from, and the place in it
    seen: str  # what the engine said
    noticed_after_s: float | None = None  # since the fault began to act
    wrong_ratio: float | None = None  # of the answers given since then; None when there was none

    def figures(self) -> str:
        """Say how soon it was noticed and how much was answered wrongly, to follow a layer; empty where neither is known."""
        after = "" if self.noticed_after_s is None else f" after {self.noticed_after_s:.1f} s"
        return after + ("" if not self.wrong_ratio else f", {self.wrong_ratio:.0%} of the answers wrong")


def change(start: Start, known: Mapping[str, Expectation]) -> str:
    """Say what recording this start would change, in one line."""
    before = known.get(start.scenario, NOTHING_RECORDED)
    if _shown(start.run) in before.runs:
        said = f"{start.layer}, and this run is recorded already"
    elif not before.layers:
        said = f"{start.layer}, the first record"
    elif start.layer.rank > before.latest.rank:
        said = f"{start.layer}, later than ever recorded ({before.latest})"
    elif start.layer in before.layers:
        said = f"{start.layer}, as recorded"
    else:
        earlier = min(before.layers, key=lambda layer: layer.rank)
        which = "earlier than ever recorded" if start.layer.rank < earlier.rank else "between what is recorded"
        said = f"{start.layer}, {which} ({', '.join(dict.fromkeys(before.layers))})"
    return f"{start.scenario}: {said}: {start.seen}"


def expectations_path(directory: Path, engine_label: str) -> Path:
    """Return the file of one engine release; a label can only name a file inside `directory`."""
    return directory / f"{re.sub(r'[^A-Za-z0-9._+-]', '_', engine_label)}.toml"


def why_uncertain(engine_label: str) -> str:
    """Say why what is recorded under a label may be of another build; empty when it names a version or a digest.

    An image that says no version of its own is labelled by its tag, and some tags move: `latest`, `nightly`.
    """
    version = engine_label.rpartition("-")[2] or engine_label
    if re.match(r"v?\d", version) or re.fullmatch(r"[0-9a-f]{7,64}", version) or re.search(r"-v?\d", engine_label):
        return ""
    return (
        f'"{engine_label}" is named after a tag, which may have moved: starts recorded under it may be of another build'
    )


def load_expectations(directory: Path, engine_label: str) -> Mapping[str, Expectation]:
    """Read what was recorded for an engine release; empty when nothing was.

    Raises: HarnessError naming the file and what is wrong in it.
    """
    path = expectations_path(directory, engine_label)
    return _parsed(path.read_bytes(), path) if path.is_file() else {}


def _parsed(content: bytes, path: Path) -> Mapping[str, Expectation]:
    try:
        tables = tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise HarnessError(f'"{path}" is not an expectations file: {error}') from error
    known = {}
    for scenario, table in tables.items():
        try:
            known[scenario] = _expectation(table)
        except ValueError as error:
            raise HarnessError(f'"{path}" is not an expectations file: "{_shown(scenario)}": {error}') from error
    return known


def _expectation(table: object) -> Expectation:
    """Return one entry of a file. Raises: ValueError saying why it is none."""
    if not isinstance(table, dict):
        raise ValueError("it must be a table")
    layers, runs, reasons = _texts(table, "layers"), _texts(table, "runs"), _texts(table, "reasons", default=())
    seen = table.get("seen", "")
    if not isinstance(seen, str):
        raise ValueError("seen must be a string")
    if unknown := [layer for layer in layers if layer not in list(Layer)]:
        raise ValueError(f"layer {unknown[0][:80]!r} is unknown; layers: {', '.join(Layer)}")
    if not len(layers) == len(runs) >= 1:
        raise ValueError(f"every start has one layer and one run, got {len(layers)} layers and {len(runs)} runs")
    if len(set(runs)) < len(runs):
        raise ValueError("a run counts once, but one is named twice in runs")
    if reasons and len(reasons) != len(runs):
        raise ValueError(f"every start has one reason or none has any, got {len(reasons)} for {len(runs)} starts")
    return Expectation(
        layers=tuple(Layer(layer) for layer in layers),
        runs=runs,
        seen=seen,
        reasons=reasons,
        noticed_after_s=_figures(table, "noticed_after_s", count=len(runs)),
        wrong_ratios=_figures(table, "wrong_ratios", count=len(runs)),
    )


def _texts(table: Mapping[str, object], name: str, *, default: tuple[str, ...] | None = None) -> tuple[str, ...]:
    given = table.get(name, default)
    if not isinstance(given, list | tuple) or not all(isinstance(each, str) for each in given):
        raise ValueError(f"{name} must be a list of strings")
    return tuple(given)


def _figures(table: Mapping[str, object], name: str, *, count: int) -> tuple[float | None, ...]:
    given = table.get(name, [])
    if not isinstance(given, list) or not all(type(each) in (int, float) for each in given):
        raise ValueError(f"{name} must be a list of numbers")
    if given and len(given) != count:
        raise ValueError(f"{name} has one number per start or none at all, got {len(given)} for {count} starts")
    if wrong := [each for each in given if math.isinf(each) or each < 0]:
        raise ValueError(f"{name} must be numbers from 0 on, got {wrong[0]}")
    return tuple(None if math.isnan(each) else float(each) for each in given)


def record_start(
    directory: Path, engine_label: str, scenario: str, *, layer: Layer, run: str, seen: str, reason: str = ""
) -> None:
    """Add one start to the file of an engine release; the same run counts once.

    Raises: HarnessError for a name that no scenario can have, or a file that cannot be read.
    """
    record_starts(directory, engine_label, [Start(scenario=scenario, layer=layer, run=run, seen=seen)], reason=reason)


def record_starts(directory: Path, engine_label: str, starts: Sequence[Start], *, reason: str = "") -> None:
    """Add starts to the file of an engine release, all or none, with why they were accepted; the same run counts once.

    Raises: HarnessError for a name that no scenario can have, or a file that cannot be read.
    """
    for start in starts:
        if not start.scenario.isidentifier():
            raise HarnessError(
                f"a scenario's name must be an identifier, got {start.scenario[:80]!r}: nothing was recorded of it"
            )
    directory.mkdir(parents=True, exist_ok=True)
    with _locked(directory):
        known = dict(load_expectations(directory, engine_label))
        for start in starts:
            before = known.get(start.scenario, NOTHING_RECORDED)
            known[start.scenario] = before.with_start(start, reason=reason)
        _write(expectations_path(directory, engine_label), engine_label, known)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Let one process at a time read the files of a directory, add to them and write them."""
    opened = os.open(directory, os.O_RDONLY)
    try:
        # Where a file system has no locks for directories, as NFS, writers must take turns by themselves.
        with suppress(OSError):
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


def _write(path: Path, engine_label: str, known: Mapping[str, Expectation]) -> None:
    content = _as_toml(engine_label, known).encode()
    if _layers_and_runs(_parsed(content, path)) != _layers_and_runs(
        known
    ):  # a bug here must not cost what was recorded
        raise HarnessError(f'"{path}" would not be read as it is written: nothing was recorded')
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _layers_and_runs(known: Mapping[str, Expectation]) -> dict[str, tuple[tuple[Layer, ...], tuple[str, ...]]]:
    return {scenario: (entry.layers, entry.runs) for scenario, entry in known.items()}


def _shown(text: str) -> str:
    # An engine's words: some characters of a JSON string must not be in a TOML one.
    return "".join(character if character.isprintable() else " " for character in text)


def _as_toml(engine_label: str, known: Mapping[str, Expectation]) -> str:
    parts = [
        f"# Where {_shown(engine_label)} notices each fault, unguarded; one entry per recorded start.\n"
        "# Written by `harness expectations accept` and `measure`, never by hand.\n"
    ]
    for scenario in sorted(known):
        entry = known[scenario]
        parts.append(
            f"[{_key(scenario)}]\nlayers = {_strings(entry.layers)}\nruns = {_strings(entry.runs)}\n"
            f"seen = {_string(entry.seen)}\n"
            + (f"reasons = {_strings(entry.reasons)}\n" if any(entry.reasons) else "")
            + _numbers("noticed_after_s", entry.noticed_after_s)
            + _numbers("wrong_ratios", entry.wrong_ratios)
        )
    return "\n".join(parts)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _string(name)


def _string(text: str) -> str:
    # A JSON string is also a TOML one but for a bare DEL; ASCII is not asked for, since it writes two surrogates for one
    # character.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _strings(values: Sequence[str]) -> str:
    return f"[{', '.join(_string(str(value)) for value in values)}]"


def _numbers(name: str, figures: Sequence[float | None]) -> str:
    """Return a line with one number per start, `nan` where there is none; no line when there is none at all."""
    if all(figure is None for figure in figures):
        return ""
    return f"{name} = [{', '.join('nan' if figure is None else repr(float(figure)) for figure in figures)}]\n"
