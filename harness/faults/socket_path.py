"""A new engine that is told to serve on a Unix socket where it may not make one. Source: taxonomy row M07."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from harness.engine.launch import Launch
from harness.errors import ScenarioInvalid
from harness.faults.fault import Injected, parameters_of

# Below it the kernel lets nobody make a socket, root neither, on a host as in a container.
FORBIDDEN = "/sys/engine.sock"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForbiddenSocket:
    """An engine launched with `--uds` in a directory where its user may make no socket."""

    name: ClassVar[str] = "forbidden_socket"
    fault_id: ClassVar[str] = "M07"
    path: str

    def __post_init__(self) -> None:
        if not Path(self.path).is_absolute():
            raise ScenarioInvalid(f'forbidden_socket: path "{self.path}" must be absolute')

    def parameters(self) -> Mapping[str, Any]:
        return parameters_of(self)

    def alter(self, launch: Launch) -> tuple[Launch, Injected]:
        altered = replace(launch, extra_arguments=(*launch.extra_arguments, "--uds", self.path))
        before, after = _socket_of(launch), _socket_of(altered)
        error = None if after is None else bind_error(after)
        is_free = after is None or not os.path.lexists(after)  # what is there already is another fault: an old engine's
        refused = "this user may make one" if error is None else f"binding one there gives: {error}"
        return altered, Injected.of(
            self,
            proved=after == self.path != before and error is not None and is_free,
            because=f'"--uds" was {_shown(before)}, is {_shown(after)}; {refused}',
            before={"uds": before},
            after={"uds": after, "error": error},
        )


def bind_error(path: str) -> str | None:
    """Make a Unix socket where an engine would, remove it again, and return what the system said; None when it could be made."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.bind(path)
        os.unlink(path)
    except OSError as error:
        return f"{type(error).__name__} ({error.strerror or error})"
    return None


def _socket_of(launch: Launch) -> str | None:
    """Return the value of the last `--uds` of the line, which is the one that counts."""
    line = launch.extra_arguments
    return next((line[index + 1] for index in range(len(line) - 2, -1, -1) if line[index] == "--uds"), None)


def _shown(path: str | None) -> str:
    return "not given" if path is None else f'"{path}"'


def forbidden_socket(path: str = FORBIDDEN) -> ForbiddenSocket:
    """Launch with `--uds` in a directory where the engine's user may make no socket; by default one where nobody may.

    The proof makes one there as this process: give a path that the engine's user is refused for the same reason.
    Source: taxonomy row M07.
    """
    return ForbiddenSocket(path=path)
