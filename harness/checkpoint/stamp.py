"""Whether the files of a user's checkpoint are those that were there before, without reading them."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Protocol


class Checkpoints(Protocol):
    """What names the user's own checkpoints, both or none."""

    @property
    def old(self) -> Path | None: ...

    @property
    def new(self) -> Path | None: ...


def stamps_of(given: Checkpoints) -> dict[str, str]:
    """Return a stamp of each of the user's own checkpoints; none where scenarios bring theirs.

    Raises: OSError when one cannot be listed.
    """
    return {name: stamp(path) for name, path in (("old", given.old), ("new", given.new)) if path is not None}


def stamp(directory: Path) -> str:
    """Return 16 hex digits over name, size in bytes and time of change of every file in a directory; links are followed.

    Another file under a name changes it, and so does the same one copied again.
    """
    whole = hashlib.sha256()
    entered: set[str] = set()
    for folder, folders, names in os.walk(directory, followlinks=True, onerror=_raise):
        real = os.path.realpath(folder)
        folders[:] = sorted(folders) if real not in entered else []  # a link to a directory above has no end
        entered.add(real)
        for name in sorted(names):
            path = Path(folder, name)
            try:
                found = path.stat()
                said = f"{found.st_size} {found.st_mtime_ns}"
            except OSError:
                said = "absent"  # a link to nothing
            whole.update(f"{path.relative_to(directory)}\0{said}\n".encode(errors="surrogateescape"))
    return whole.hexdigest()[:16]


def _raise(error: OSError) -> None:
    raise error
