"""The versions of a published checkpoint: where they lie, which one is live, and what a killed publish left behind.

Layout: `<root>/versions/<number>/` and the live path `<root>/<name>`. That is either a relative link to a version, or a
real directory that *is* a version: then its number is missing in `versions/`. A finished version holds a ready marker,
written last; a directory that lay at the live path before anything was published there is version 0, without a marker.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.errors import HarnessError, UsageError
from harness.guards.durable import sync

VERSIONS = "versions"
READY = ".ready"  # written last into a version: without it, the version is unfinished
MANIFEST = ".manifest.json"
UNFINISHED = ".unfinished-"  # being copied, or being removed
PENDING = ".pending-"  # finished, and about to become live
ORIGINAL = 0
MARKER_LIMIT_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """What a ready marker says. `previous` is the version that was live before; None when nothing was."""

    version: int
    previous: int | None
    published_at: str
    manifest_blake3: str = ""  # of the manifest file; empty when none was asked for
    linked: bool = False  # its files are hard links, so its source must never be written to


def write_marker(directory: Path, marker: Marker) -> None:
    """Declare a version finished, durably."""
    with (directory / READY).open("xb") as file:
        file.write(json.dumps(asdict(marker)).encode())
        file.flush()
        os.fsync(file.fileno())
    sync(directory)


def read_marker(directory: Path) -> Marker | None:
    """Return what the marker of a version says; None when there is none or it says nothing that can be used.

    Raises: OSError when there is one that cannot be read.
    """
    try:
        descriptor = os.open(directory / READY, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return None
        raise
    with os.fdopen(descriptor, "rb") as file:
        text = file.read(MARKER_LIMIT_BYTES)
    try:
        said: Any = json.loads(text)
        previous = said["previous"]
        return Marker(
            version=int(said["version"]),
            previous=None if previous is None else int(previous),
            published_at=str(said["published_at"]),
            manifest_blake3=str(said["manifest_blake3"]),
            linked=bool(said["linked"]),
        )
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """What is live: its number, where it lies, and whether the live path is that directory itself."""

    number: int
    path: Path
    is_directory: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """The versions below one root and one live path in it."""

    root: Path
    name: str

    def __post_init__(self) -> None:
        if self.name in ("", ".", "..", VERSIONS) or "/" in self.name or self.name.startswith("."):
            raise UsageError(f'"{self.name}" cannot be the name of the live checkpoint')

    @property
    def versions(self) -> Path:
        """Return the directory of the versions."""
        return self.root / VERSIONS

    @property
    def live_path(self) -> Path:
        """Return the path that engines are started on."""
        return self.root / self.name

    @property
    def new_link(self) -> Path:
        """Return the link that is about to replace the live one."""
        return self.root / f".{self.name}.new"

    def path_of(self, number: int) -> Path:
        """Return where a version lies when it is not itself the live directory."""
        return self.versions / str(number)

    def live(self) -> Live | None:
        """Return what is live; None when nothing is yet.

        Raises: UsageError when the live path is a file, or a link to anything but a version.
        """
        path = self.live_path
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            return None
        if stat.S_ISLNK(mode):
            target = os.readlink(path)
            parent, _, number = target.partition("/")
            if parent != VERSIONS or not _is_number(number):
                raise UsageError(f'"{path}" points to "{target}", expected a version in "{VERSIONS}/": left as it is')
            return Live(number=int(number), path=self.path_of(int(number)), is_directory=False)
        if not stat.S_ISDIR(mode):
            raise UsageError(f'"{path}" is neither a link nor a directory: it is left as it is')
        marker = read_marker(path)
        return Live(number=ORIGINAL if marker is None else marker.version, path=path, is_directory=True)

    def finished(self) -> list[int]:
        """Return the numbers of the finished versions in `versions/`, lowest first; version 0 is not among them."""
        return sorted(number for number in self._numbers() if (self.path_of(number) / READY).is_file())

    def is_kept(self, number: int) -> bool:
        """Say whether a version lies in `versions/`, where it can be made live again."""
        directory = self.path_of(number)
        return directory.is_dir() if number == ORIGINAL else (directory / READY).is_file()

    def next_number(self) -> int:
        """Return a number that no version has or had since the last one."""
        return 1 + max([*self._numbers(), *(live.number for live in self._live_anywhere()), ORIGINAL])

    def before(self, live: Live) -> int | None:
        """Return the version that was live before this one; None when there was none or it is no longer kept."""
        marker = read_marker(live.path)
        if marker is not None:
            return marker.previous if marker.previous is not None and self.is_kept(marker.previous) else None
        earlier = [number for number in self.finished() if number < live.number]  # published before markers told
        return max(earlier, default=None)

    # changes, under the lock

    def settle(self) -> None:
        """Clear away what a killed publish or rollback left, so that every version lies under its own number.

        Raises: HarnessError when that cannot be told.
        """
        live = self.live()
        for path in self.versions.glob(f"{UNFINISHED}*"):
            shutil.rmtree(path)
        self.new_link.unlink(missing_ok=True)
        self._rename_exchanged(live)
        in_use = {live.number for live in self._live_anywhere()}
        for pending in self.versions.glob(f"{PENDING}*"):
            number = pending.name.removeprefix(PENDING)
            if _is_number(number) and int(number) not in in_use and self.is_kept(int(number)):
                self.remove(int(number))  # finished, but its publisher died before it was live
            pending.unlink()

    def _rename_exchanged(self, live: Live | None) -> None:
        """Give what an exchange moved out of the live path its own number as name."""
        for number in self._numbers():
            is_doubled = live is not None and live.is_directory and live.number == number
            marker = read_marker(self.path_of(number))
            own = (ORIGINAL if is_doubled else number) if marker is None else marker.version
            if own != number and not os.path.lexists(self.path_of(own)):
                self.path_of(number).rename(self.path_of(own))
                sync(self.versions)
            elif is_doubled:
                raise HarnessError(
                    f'"{self.path_of(number)}" and "{self.live_path}" both hold version {number}, or version {own} is '
                    "there twice: move one of them away"
                )

    def remove(self, number: int) -> None:
        """Remove a version, under another name first so that a half-removed one is never taken for a whole one."""
        doomed = self.versions / f"{UNFINISHED}{number}"
        self.path_of(number).rename(doomed)
        shutil.rmtree(doomed)

    def drop_old(self, keep: int) -> None:
        """Remove the oldest versions beyond `keep`, but none that is live under any name or was so just before."""
        used = set()
        for live in self._live_anywhere():
            used |= {live.number, self.before(live)}
        kept = set(self.finished())
        surplus = len(kept | used - {None, ORIGINAL}) - keep
        for number in sorted(kept - used)[: max(0, surplus)]:
            self.remove(number)

    # parts

    def _numbers(self) -> list[int]:
        if not self.versions.is_dir():
            return []
        return [int(path.name) for path in self.versions.iterdir() if _is_number(path.name)]

    def _live_anywhere(self) -> list[Live]:
        """Return what any entry of the root makes live, not only this store's own name."""
        found = []
        for path in self.root.iterdir():
            if path.name != VERSIONS and not path.name.startswith("."):
                with contextlib.suppress(UsageError):
                    live = Store(root=self.root, name=path.name).live()
                    if live is not None:
                        found.append(live)
        return found


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdecimal()
