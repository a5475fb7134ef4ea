"""What dead engines may leave behind, or a checkpoint may drag along: where it lies, how big and how old it is, and whose.

Nothing is removed here. Source: taxonomy rows D22 (`np/`), K01, K02 (compile caches), K05 (weight caches), M02 (segments and
sockets); names read in vLLM 0.32.0 and seen on the CPU build.
"""

from __future__ import annotations

import fnmatch
import getpass
import json
import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from harness.errors import UsageError
from harness.guards.holders import FileKey, key_of
from harness.guards.purge import CacheEntry, list_cache
from harness.guards.segments import is_anybodys, segment_names
from harness.label import DIRECTORY_PREFIX, SHARED_MEMORY, parse_label

WEIGHT_CACHE_VARIABLE = "VLLM_WEIGHT_CACHE_PATH"
COMPILED = ("torch_compile_cache", "startup_plan", "deep_gemm", "flashinfer_autotune_cache")  # in VLLM_CACHE_ROOT
WEIGHT_NAMES = "weight_names.json"  # what load format npcache writes last
NAMES_LIMIT_BYTES = 64 * 1024 * 1024


class Kind(StrEnum):
    """What a left-over is."""

    WEIGHT_CACHE = "weight cache"
    SEGMENT = "segment"
    COMPILE_CACHE = "compile cache"
    NUMPY_CACHE = "np/"
    SOCKET = "daemon socket"
    RUN = "run directory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftover:
    """One file or directory. `path` has no link in it; `keys` are its files, by which their users are found.

    `recorded` says that it wears the label of a dead run of this harness. `obstacle` says why it is never removed here.
    """

    kind: Kind
    path: Path
    key: FileKey
    keys: frozenset[FileKey]
    size_bytes: int
    owners: frozenset[int]  # user ids of everything in it
    modified_s: float  # since the epoch, of the newest file
    about: str = ""
    recorded: bool = False
    obstacle: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where engines of this user leave things."""

    shared_memory: Path
    temporary: Path
    weight_caches: tuple[Path, ...]
    compile_caches: tuple[Path, ...]

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Places:
        """Return the places that vLLM, torch and Triton use in this environment."""
        home = Path(environment.get("HOME", "/"))
        temporary = Path(tempfile.gettempdir())
        cache = Path(environment.get("XDG_CACHE_HOME") or home / ".cache")
        root = _expanded(environment.get("VLLM_CACHE_ROOT") or cache / "vllm")
        try:
            user = getpass.getuser()
        except (KeyError, OSError):
            user = f"uid_{os.getuid()}"
        inductor = _expanded(environment.get("TORCHINDUCTOR_CACHE_DIR") or temporary / f"torchinductor_{user}")
        triton = _expanded(environment.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")
        named = environment.get(WEIGHT_CACHE_VARIABLE)
        usual = SHARED_MEMORY / "vllm_weight_cache"
        return cls(
            shared_memory=SHARED_MEMORY,
            temporary=temporary,
            weight_caches=tuple(dict.fromkeys([Path(named), usual] if named else [usual])),
            compile_caches=(*(root / name for name in COMPILED), inductor, triton),
        )


def _expanded(path: str | Path) -> Path:
    return Path(os.path.expanduser(path))  # as engines do: the home directory of nobody stays as it is written


def find_all(places: Places) -> Iterator[Leftover]:
    """Find everything that is not bound to one checkpoint."""
    for root in places.weight_caches:
        yield from weight_cache(root)
    yield from segments(places.shared_memory)
    for directory in places.compile_caches:
        yield from compile_cache(directory)
    yield from daemon_sockets(places.temporary)
    yield from run_directories(places.shared_memory)


def weight_cache(root: Path) -> Iterator[Leftover]:
    """Find the entries of a weight cache; a directory that is none is one left-over with an obstacle."""
    try:
        entries = list_cache(root)
    except UsageError as error:
        yield from _described(Kind.WEIGHT_CACHE, root, obstacle=str(error))
        return
    for entry in entries:
        yield from _described(Kind.WEIGHT_CACHE, root / entry.name, about=about_entry(entry))


def about_entry(entry: CacheEntry) -> str:
    """Say what a cache entry was filled from."""
    filled = f'filled from "{entry.model}"' if entry.model else "says nothing about where it is from"
    return filled if entry.is_complete else f"unfinished, {filled}"


def segments(shared_memory: Path) -> Iterator[Leftover]:
    """Find shared-memory segments and semaphores with the names that engines use; other programs use some too."""
    for name in sorted(segment_names(shared_memory)):
        if _is(shared_memory / name, stat.S_ISREG):
            about = "any Python program makes such" if is_anybodys(name) else ""
            yield from _described(Kind.SEGMENT, shared_memory / name, about=about)


def compile_cache(directory: Path) -> Iterator[Leftover]:
    """Find one compile cache; a variable may point anywhere, so only a directory with a name that vLLM or torch chose is one."""
    known = directory.name in COMPILED or directory.name.startswith("torchinductor_")
    known = (
        known or directory.parts[-2:] == (".triton", "cache") or directory.name in ("inductor_cache", "triton_cache")
    )
    obstacle = "" if known else "its name does not say that it is a cache: remove it yourself"
    yield from _described(Kind.COMPILE_CACHE, directory, obstacle=obstacle)


def numpy_cache(checkpoint: Path) -> Iterator[Leftover]:
    """Find the `np/` that load format npcache wrote into a checkpoint: exactly the files that it names itself."""
    directory = checkpoint / "np"
    if not _is(directory, stat.S_ISDIR):
        return
    try:
        descriptor = os.open(directory / WEIGHT_NAMES, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            named = {str(name) for name in json.loads(file.read(NAMES_LIMIT_BYTES))} | {WEIGHT_NAMES}
        others = sorted(set(os.listdir(directory)) - named)
        obstacle = f'it holds "{others[0]}", which load format npcache did not write' if others else ""
    except FileNotFoundError:
        obstacle = f"it is not finished (no {WEIGHT_NAMES}), so its files cannot be told from others"
    except (OSError, ValueError, TypeError, RecursionError) as error:
        obstacle = f"its {WEIGHT_NAMES} cannot be read: {error}"
    yield from _described(Kind.NUMPY_CACHE, directory, about=f'of "{checkpoint}"', obstacle=obstacle)


def daemon_sockets(temporary: Path) -> Iterator[Leftover]:
    """Find the sockets, and the locks beside them, of vLLM's weight-cache daemons (`vllm preload`, 0.30 and later)."""
    for directory in _listed(temporary):
        if fnmatch.fnmatchcase(directory.name, "vllm_weight_cache_[0-9]*") and _is(directory, stat.S_ISDIR):
            for path in _listed(directory):
                if fnmatch.fnmatchcase(path.name, "vllm_weight_cache_*.sock*"):
                    yield from _described(Kind.SOCKET, path)


def run_directories(shared_memory: Path) -> Iterator[Leftover]:
    """Find what runs of this harness keep in shared memory, by their label."""
    for path in _listed(shared_memory):
        label = (
            parse_label(path.name.removeprefix(DIRECTORY_PREFIX)) if path.name.startswith(DIRECTORY_PREFIX) else None
        )
        if label is None or not _is(path, stat.S_ISDIR):
            continue
        if label.is_foreign():
            obstacle = "its run belongs to another host or container"
        elif label.owner_is_alive():
            obstacle = f"its run still lives (process {label.owner_pid})"
        else:
            obstacle = ""
        yield from _described(Kind.RUN, path, recorded=not obstacle, obstacle=obstacle)


def _described(
    kind: Kind, path: Path, *, about: str = "", recorded: bool = False, obstacle: str = ""
) -> Iterator[Leftover]:
    """Measure one file or directory without following links; nothing when it is not there."""
    try:
        place = Path(os.path.realpath(path.parent)) / path.name
        top = place.lstat()
    except OSError:
        return
    found = [top]
    if stat.S_ISDIR(top.st_mode):
        problems: list[OSError] = []
        for _, directories, files, folder in os.fwalk(place, onerror=problems.append, follow_symlinks=False):
            for name in (*directories, *files):
                try:
                    found.append(os.stat(name, dir_fd=folder, follow_symlinks=False))
                except FileNotFoundError:
                    continue
        if problems:
            obstacle = obstacle or f"not all of it can be read: {problems[0]}"
    elif stat.S_ISLNK(top.st_mode):
        obstacle = "it is a symbolic link, which is not followed"
    yield Leftover(
        kind=kind,
        path=place,
        key=key_of(top),
        keys=frozenset(key_of(status) for status in found),
        size_bytes=sum(status.st_size for status in found if not stat.S_ISDIR(status.st_mode)),
        owners=frozenset(status.st_uid for status in found),
        modified_s=max(status.st_mtime for status in found),
        about=about,
        recorded=recorded,
        obstacle=obstacle,
    )


def _listed(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []


def _is(path: Path, kind: Callable[[int], bool]) -> bool:
    try:
        return kind(path.lstat().st_mode)
    except OSError:
        return False
