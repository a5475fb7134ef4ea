"""Find the engine's arguments in what an operator has: bare arguments, a `vllm serve` line, a file with such a line.

Nothing is executed and no variable is expanded: what a shell would put in is not known here, and is said to be so.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.errors import UsageError

MAX_FILE_BYTES = 1024 * 1024
ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
SERVERS = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.cli.main")
ENDS = re.compile(r"[;&|()<>]+")
SHELL = re.compile(
    r"""(?P<quoted>'[^']*'|"(?:\\.|[^"\\])*")
    |(?P<escaped>\\.)
    |(?P<run>\$\([^()]*\)|`[^`]*`)
    |(?P<comment>(?<!\S)\#[^\n]*)
    |(?P<redirection>(?<!\S)(?:\d?>>?|&>>?|\d?<)(?:&\d|[ \t]*[^\s;|&]+))
    |(?P<end>\n)""",
    re.DOTALL | re.VERBOSE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchLine:
    """What starts an engine: variables set for it, and the arguments after the program's name."""

    arguments: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    is_serve: bool = False  # the first word without a dash is then the model


def line_of(words: Sequence[str]) -> LaunchLine:
    """Return the launch that the words after `--` describe; one word that is a whole line is taken apart.

    Raises: UsageError when such a line is not quoted as a shell wants it.
    """
    if len(words) == 1 and len(words[0].split()) > 1:
        return line_in(words[0])
    return _launch(list(words))


def read_line(path: Path) -> LaunchLine:
    """Return the launch that a file holds: the first command in it that starts vLLM, else its only command.

    Raises: UsageError when the file cannot be read or holds no such command.
    """
    try:
        if not path.is_file():
            raise UsageError(f'launch file "{path}" is not a file')
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        raise UsageError(f'launch file "{path}" cannot be read: {error}') from None
    if len(raw) > MAX_FILE_BYTES:
        raise UsageError(f'launch file "{path}" is longer than {MAX_FILE_BYTES:,} bytes')
    return line_in(raw.decode("utf-8", "replace"))


def line_in(text: str) -> LaunchLine:
    """Return the launch in a piece of shell text: quotes, continued lines and comments are understood.

    Raises: UsageError when a quote is not closed, or several commands are there and none of them starts vLLM.
    """
    commands = _commands(text)
    serving = [command for command in commands if _start(command) is not None]
    if not serving and len(commands) != 1:
        raise UsageError(f'no "vllm serve" among the {len(commands)} commands of the launch text')
    chosen = (serving or commands)[0]
    exported = [word for command in commands if command[0] == "export" for word in command[1:]]
    return _launch([*(word for word in exported if ASSIGNMENT.fullmatch(word)), *chosen])


def _commands(text: str) -> list[list[str]]:
    lexer = shlex.shlex(SHELL.sub(_plain, text.replace("\r\n", "\n")), posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    commands: list[list[str]] = [[]]
    try:
        for word in lexer:
            if ENDS.fullmatch(word):
                commands.append([])
            else:
                commands[-1].append(word)
    except ValueError as error:
        raise UsageError(f"the launch text is not quoted as a shell wants it: {error}") from None
    return [command for command in commands if command]


def _plain(match: re.Match[str]) -> str:
    """Leave out comments, redirections and continuations, end a command where its line ends, and mark what a shell would run."""
    if match["quoted"] is not None:
        return match[0].replace("\\\n", "") if match[0][0] == '"' else match[0]
    if match["escaped"] is not None:
        return "" if match[0] == "\\\n" else match[0]
    if match["run"] is not None:
        return "'$(...)'"
    return " ; " if match["end"] is not None else ""


def _start(words: Sequence[str]) -> tuple[int, bool] | None:
    """Return where the engine's arguments begin, and whether `serve` comes before them; None without an engine."""
    for index, word in enumerate(words):
        if word == "serve" and index and words[index - 1].rpartition("/")[2] in ("vllm", *SERVERS):
            return index + 1, True
        if word in SERVERS[:1]:
            return index + 1, False
    return None


def _launch(words: list[str]) -> LaunchLine:
    found = _start(words)
    variables = []
    for word in words[: found[0] if found else None]:
        match = ASSIGNMENT.fullmatch(word)
        if match:
            variables.append((match[1], match[2]))
        elif found is None:
            break
    if found is not None:
        begin, is_serve = found
    else:
        begin = len(variables)
        is_serve = words[begin : begin + 1] == ["serve"]
        begin += is_serve
    return LaunchLine(arguments=tuple(words[begin:]), variables=tuple(variables), is_serve=is_serve)
