"""Put a launch together from a line, a file that `--config` names and the release whose parser will read it."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

from harness.guards.finding import Severity, shortened
from harness.guards.launch_line import LaunchLine
from harness.guards.launch_options import Launch, read_options
from harness.guards.releases import Release, launch_options

MAX_CONFIG_BYTES = 1024 * 1024


def launch_of(line: LaunchLine, release: Release) -> Launch:
    """Return the options of a launch as `release` will understand them, those of its `--config` file included."""
    words, ignored, unchecked = list(line.arguments), None, []
    named = next((word for word in words if word.startswith("--config=")), None)
    if "--config" in words:
        at = words.index("--config")
        path = words[at + 1] if at + 1 < len(words) else ""
        read, reason = _words_of(Path(path), release) if path else (None, "")
        if read is not None:
            begin = int(bool(words) and not words[0].startswith("-") and at > 0)  # the model comes first, then the file
            words = [*words[:begin], *read, *words[begin:at], *words[at + 2 :]]
        elif path:
            unchecked.append(f'"{shortened(path)}", which --config names: {reason}')
    elif named is not None:
        ignored = named
    launch = read_options(words, release)
    launch.variables = dict(line.variables)
    launch.unchecked += unchecked
    if ignored is not None:
        launch.note(
            f"{ignored}, which the engine does not read",
            "--config and its file as two words",
            "write a space for the equals sign",
            Severity.SILENT,
        )
    if line.arguments and not release.is_read:
        launch.unchecked.append(f"options of {release.label}: those of {release.read_as.label} were taken")
    if any("$" in word for word in line.arguments):
        launch.unchecked.append("values with a $: what a shell puts there is not known")
    return launch


def _words_of(path: Path, release: Release) -> tuple[list[str] | None, str]:
    """Return the words that a YAML file stands for, or none and why it could not be read."""
    try:
        yaml: Any = import_module("yaml")
    except ImportError:
        return None, "not read, because PyYAML is not installed"
    try:
        if not path.is_file():
            return None, "not read, there is no such file here"
        with path.open("rb") as file:
            raw = file.read(MAX_CONFIG_BYTES + 1)
        if len(raw) > MAX_CONFIG_BYTES:
            return None, f"not read, it is longer than {MAX_CONFIG_BYTES:,} bytes"
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(raw, Loader=yaml.SafeLoader)):
            return None, "not read, it has aliases"
        content = yaml.safe_load(raw)
        if not isinstance(content, dict):
            return None, "not read, it holds no options"
        known = launch_options(release.read_as)
        return [word for key, value in content.items() for word in _option(str(key), value, known)], ""
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        return None, f"not read: {shortened(' '.join(str(error).split()))}"


def _option(key: str, value: Any, known: Any) -> list[str]:
    """Return one entry as vLLM turns it into words."""
    name = f"--{key}"
    if isinstance(value, bool):
        return [name] if value else [f"--no-{key}"] if f"--no-{key}" in known else []
    if isinstance(value, list):
        return [name, *map(str, value)] if value else []
    return [name, json.dumps(value, default=str) if isinstance(value, dict) else str(value)]
