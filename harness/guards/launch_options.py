"""Read launch arguments as the engine's own parser does, and name what that parser would refuse.

vLLM builds on argparse: options may be shortened while that stays unique, `--a_b` is `--a-b`, `--x.y 1` puts a key into
the JSON value of `--x`, `-O3` is `--optimization-level 3`, and the last of several equal options wins.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.guards.finding import PreflightFinding, Severity, shortened
from harness.guards.launch_values import json_of, mended, size_of, what_is_expected
from harness.guards.releases import LaunchOption, Release, launch_options, releases_with

WHERE = "launch arguments"
NUMBER = re.compile(r"-\d+|-\d*\.\d+")
ADVICE = {
    "--disable-weight-cache": "leave it out; vLLM has no such flag (--load-format auto uses no weight cache daemon)",
    "--weight-cache-path": "leave it out; vLLM has no such flag",
    "--task": "use --runner pooling, and --convert for a generative model",
}


@dataclass(slots=True)
class Launch:
    """The options of one launch, by their first spelling, and what the engine's parser would say against them."""

    release: Release
    values: dict[str, tuple[str, ...]] = field(default_factory=dict)
    flags: dict[str, bool] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    problems: list[PreflightFinding] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)  # sentences on what could not be looked at

    @property
    def is_given(self) -> bool:
        """Say whether anything is known of the launch."""
        return bool(self.values or self.flags or self.words or self.problems)

    @property
    def model(self) -> str | None:
        """Return the model that the line names, where it is known."""
        named = self.text("--model") or (self.words[0] if self.words else None)
        return None if named is None or "$" in named else named

    def text(self, name: str) -> str | None:
        """Return the value of an option, as far as it is known: None for one that is absent or not expanded."""
        values = self.values.get(name, ())
        return values[0] if values and "$" not in values[0] else None

    def number(self, name: str, default: int | None = None) -> int | None:
        """Return a whole-number value, None when it is not known."""
        if name not in self.values:
            return default
        try:
            return size_of(self.text(name) or "")
        except ValueError:
            return None

    def json(self, name: str) -> Any:
        """Return a JSON value, None when there is none that can be read."""
        try:
            return json_of(self.text(name) or "", with_sizes=True)
        except ValueError:
            return None

    def note(self, seen: str, expected: str, remedy: str, severity: Severity = Severity.REFUSES) -> None:
        """Keep what the parser would say, which makes the engine end with exit code 2."""
        self.problems.append(
            PreflightFinding(
                id="L01",
                severity=severity,
                seen=shortened(seen),
                expected=shortened(expected),
                where=WHERE,
                remedy=remedy,
            )
        )


def read_options(arguments: Sequence[str], release: Release) -> Launch:
    """Return the options among `arguments`, as the parser of `release` takes them."""
    launch = Launch(release)
    if not arguments:
        return launch
    known = launch_options(release.read_as)
    given = _nested(list(_spelled(arguments)), launch)
    position = 0
    while position < len(given):
        word = given[position]
        position += 1
        if word == "--":
            launch.words += given[position:]
            break
        if _is_value(word, known):
            launch.words.append(word)
            continue
        name, equals, explicit = _parts(word, known)
        option, explicit_values = _option(name, known, launch), [explicit] if equals else []
        if option is None:
            position += _foreign_values(given, position, equals, known)
            continue
        values = list(explicit_values)
        limit = {"0": 0, "1": 1, "?": 1, "+": len(given)}[option.count] if not equals else 0
        while limit and position < len(given) and _is_value(given[position], known):
            values.append(given[position])
            position, limit = position + 1, limit - 1
        _take(launch, option, name, values, is_explicit=bool(equals))
    models = [*launch.values.get("--model", ()), *launch.words]
    if len(models) > 1:
        launch.note(f'"{models[1]}" belongs to no option', "one word alone at most, the model", "quote or remove it")
    return launch


def _parts(word: str, known: Mapping[str, LaunchOption]) -> tuple[str, str, str]:
    """Return an option's name, "=" where its value is part of the word, and that value."""
    if word in known:
        return word, "", ""
    name, equals, explicit = word.partition("=")
    if name not in known and word[1] != "-" and word[:2] in known:
        return word[:2], "=", word[2:]
    return name, equals, explicit


def _spelled(arguments: Sequence[str]) -> Iterator[str]:
    """Yield the arguments with dashes for underscores in option names, and `-O` spelled out."""
    for index, argument in enumerate(arguments):
        following = arguments[index + 1] if index + 1 < len(arguments) else ""
        if argument.startswith("--"):
            key, equals, value = argument.partition("=")
            name, dot, path = key.partition(".")
            yield f"{name.replace('_', '-')}{dot}{path}{equals}{value}"
        elif argument.startswith("-O") and argument != "-O":
            yield "--optimization-level"
            yield argument[2:].removeprefix("=")
        elif argument == "-O" and following in ("0", "1", "2", "3"):
            yield "--optimization-level"
        else:
            yield argument


def _nested(arguments: list[str], launch: Launch) -> list[str]:
    """Return the arguments with `--x.y.z 1` gathered into one JSON value of `--x` each, at the end as vLLM does."""
    rest: list[str] = []
    gathered: dict[str, dict[str, Any]] = {}
    position = 0
    while position < len(arguments):
        word = arguments[position]
        position += 1
        key, equals, value = word.partition("=")
        if not word.startswith("-") or "." not in key or NUMBER.fullmatch(word):
            rest.append(word)
            continue
        if not equals:
            if position == len(arguments):
                launch.note(word, "a value", f"give {key} a value")
                break
            value = arguments[position]
            position += 1
        name, *path = key.removesuffix("+").split(".")
        _put(gathered.setdefault(name, {}), path[:50], value.split(",") if key.endswith("+") else _value_of(value))
    for name, value_of_name in gathered.items():
        rest += [name, json.dumps(value_of_name)]
    return rest


def _put(target: dict[str, Any], path: list[str], value: Any) -> None:
    for key in path[:-1]:
        inner = target.get(key)
        target[key] = target = inner if isinstance(inner, dict) else {}
    held = target.get(path[-1])
    target[path[-1]] = held + value if isinstance(held, list) and isinstance(value, list) else value


def _value_of(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _candidates(name: str, known: Mapping[str, LaunchOption]) -> list[str]:
    return [other for other in known if other.startswith(name)] if len(name) > 1 else []


def _is_value(word: str, known: Mapping[str, LaunchOption]) -> bool:
    """Say whether argparse takes a word for a value: no dash, a lone dash, a negative number, or a space in it."""
    if not word.startswith("-") or len(word) == 1:
        return True
    name = _parts(word, known)[0]
    if word == "--" or name in known or _candidates(name, known):
        return False
    return bool(NUMBER.fullmatch(word)) or " " in word


def _option(name: str, known: Mapping[str, LaunchOption], launch: Launch) -> LaunchOption | None:
    if name in known:
        return known[name]
    candidates = _candidates(name, known)
    if len(candidates) == 1:
        return known[candidates[0]]
    if not launch.release.is_read and not candidates:
        return None  # the release may have it
    if candidates:
        launch.note(
            f'"{name}", which may mean {", ".join(candidates[:4])}', "an option in full", "write the option out in full"
        )
    else:
        launch.note(f'"{name}"', f"an option that {launch.release.label} has", _advice(name, known))
    return None


def _advice(name: str, known: Mapping[str, LaunchOption]) -> str:
    if name in ADVICE:
        return ADVICE[name]
    plain = name.removeprefix("--no-").removeprefix("--").removeprefix("enable-").removeprefix("disable-")
    is_off = name.startswith(("--no-enable-", "--disable-")) or (name.startswith("--no-") and "disable" not in name)
    for other in (f"--enable-{plain}", f"--disable-{plain}", f"--{plain}"):
        if name.startswith("--") and other in known and known[other].kind == "flag":
            option = known[other]
            wants_off = is_off != (other in option.off or option.names[0].startswith("--disable-"))
            spelling = option.off[0] if wants_off and option.off else option.names[0]
            return f"write {spelling}"
    others = releases_with(name)
    if others:
        return f"leave it out, or use a release that has it ({', '.join(others)})"
    nearest = difflib.get_close_matches(name[:80], list(known), n=1)
    return f"did you mean {nearest[0]}?" if nearest else "leave it out"


def _foreign_values(given: list[str], position: int, equals: str, known: Mapping[str, LaunchOption]) -> int:
    """Return how many words after an unknown option are its value, so that they are not reported too."""
    return int(not equals and position < len(given) and _is_value(given[position], known))


def _take(launch: Launch, option: LaunchOption, spelling: str, values: list[str], *, is_explicit: bool) -> None:
    name = option.names[0]
    if option.count == "0":
        if is_explicit:
            launch.note(f'{spelling}="{values[0]}"', f"{spelling} without a value", f"write {spelling} alone")
        launch.flags[name] = spelling not in option.off
        return
    if not values and option.count != "?":
        launch.note(spelling, "a value", f"give {spelling} a value")
        return
    for value in values:
        expected = what_is_expected(option, value)
        if expected:
            launch.note(f'{spelling} "{value}"', expected, mended(option, value, expected))
    if name in launch.values and launch.values[name] != tuple(values):
        before = " ".join(launch.values[name])
        launch.note(
            f'{name} twice: "{before}", then "{" ".join(values)}"', "it once", "remove one of them", Severity.RISK
        )
    launch.values[name] = tuple(values)
