"""Put a checkpoint where an engine reads it so that a reader sees the whole old or the whole new one, never a mixture.

Layout: `<root>/versions/<number>/` and `<root>/<name>` -> `versions/<number>`, a relative link replaced by rename: it also
holds inside a container that mounts the root. Where the live path must stay a real directory, two directories swap.
A running engine never notices either; it has to be started anew. An engine that is starting opens file after file: do not
publish under it.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.checkpoint.hashing import Part, hash_parts
from harness.clock import wall_time
from harness.errors import HarnessError, UsageError
from harness.guards.durable import exchange, require_one_file_system, swap, sync
from harness.guards.manifest import SIGNATURE_SUFFIX, write_manifest
from harness.guards.publish_copy import Copied, copy_checkpoint
from harness.guards.publish_lock import locked
from harness.guards.versions import MANIFEST, PENDING, READY, UNFINISHED, VERSIONS, Live, Marker, Store, write_marker

KEPT_VERSIONS = 3
LOCK_LIMIT_S = 60.0

__all__ = ["KEPT_VERSIONS", "LOCK_LIMIT_S", "Published", "exchange", "publish", "rollback", "versions_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What is live now and where it lies, what was live before and where that lies now, and how it was copied."""

    version: int
    version_path: Path
    previous: Path | None
    previous_version: int | None
    copied: Copied | None = None  # None for a rollback


def publish(
    source: Path,
    root: Path,
    *,
    name: str = "live",
    keep: int = KEPT_VERSIONS,
    by_exchange: bool = False,
    link: bool = False,
    with_manifest: bool = True,
    wait_limit_s: float = LOCK_LIMIT_S,
) -> Published:
    """Copy a checkpoint into a new version and make it live; `keep` versions stay for a rollback.

    `by_exchange` is for a live path that must stay a real directory. `link` makes hard links instead of copies: **writing
    to the source in place then changes what is live**. `with_manifest` writes down what the version holds, byte for byte.
    Raises: UsageError when `source` is no directory, or the live path is not of the wanted kind; HarnessError when
    another publish holds the root for longer than `wait_limit_s`, when the source changes meanwhile, when the file
    system cannot exchange, or the disk is full; it says what is live then.
    """
    if keep < 1:
        raise UsageError(f"keep is {keep}, expected at least 1")
    store = Store(root=root, name=name)
    with _explained(f'publishing "{source}" failed', store):
        if not source.is_dir():
            raise UsageError(f'the checkpoint "{source}" is not a directory')
        _refuse_overlap(source, store)
        store.versions.mkdir(parents=True, exist_ok=True)
        with locked(root, limit_s=wait_limit_s):
            before = _live_of_kind(store, by_exchange=by_exchange)
            require_one_file_system(root, store.versions)
            store.settle()
            if by_exchange:
                _require_exchange(store)
            number = store.next_number()
            try:
                copied = _stage(source, store, number, previous=before, link=link, with_manifest=with_manifest)
                if by_exchange:
                    _exchange_live(store, number, before)
                else:
                    _replace_link(store, number)
                (store.versions / f"{PENDING}{number}").unlink()
            except BaseException:
                with contextlib.suppress(OSError, HarnessError):
                    store.settle()
                raise
            store.drop_old(keep)
            return _published(store, before, copied)


def rollback(root: Path, *, name: str = "live", wait_limit_s: float = LOCK_LIMIT_S) -> Published:
    """Make the version live again that was live before the live one was published, by one rename.

    Raises: UsageError when nothing is live or that version is not kept; HarnessError as `publish` does.
    """
    store = Store(root=root, name=name)
    with _explained(f'rolling back "{store.live_path}" failed', store):
        if not store.versions.is_dir():
            raise UsageError(f'nothing was ever published in "{root}"')
        with locked(root, limit_s=wait_limit_s):
            return _roll_back(store)


def _roll_back(store: Store) -> Published:
    live = store.live()
    if live is None:
        raise UsageError(f'nothing is live under "{store.live_path}", so there is nothing to roll back')
    store.settle()
    number = store.before(live)
    if number is None:
        raise UsageError(f'no version before {live.number} is kept in "{store.versions}"')
    if live.is_directory:
        _exchange_live(store, number, live)
    else:
        _replace_link(store, number)
    return _published(store, live, None)


def versions_of(root: Path) -> tuple[Path, ...]:
    """Return the finished versions that lie in `versions/`, oldest first."""
    store = Store(root=root, name="live")
    return tuple(store.path_of(number) for number in store.finished())


def _stage(
    source: Path, store: Store, number: int, *, previous: Live | None, link: bool, with_manifest: bool
) -> Copied:
    """Make a finished version that is not live yet."""
    unfinished = store.versions / f"{UNFINISHED}{number}"
    copied = copy_checkpoint(source, unfinished, link=link, leave_out=(READY, MANIFEST, MANIFEST + SIGNATURE_SUFFIX))
    marker = Marker(
        version=number,
        previous=None if previous is None else previous.number,
        published_at=wall_time(),
        manifest_blake3=_write_manifest(unfinished) if with_manifest else "",
        linked=link,
    )
    write_marker(unfinished, marker)
    (store.versions / f"{PENDING}{number}").touch()
    sync(store.versions)
    unfinished.rename(store.path_of(number))
    sync(store.versions)
    return copied


def _write_manifest(directory: Path) -> str:
    """Write the manifest of a version into it; return the digest of that file, as `b3sum` prints it."""
    file = directory / MANIFEST
    write_manifest(directory, file)
    return hash_parts([Part(file, 0, file.stat().st_size)])[0].hex()


def _replace_link(store: Store, number: int) -> None:
    """Point the live link to a version: a new link, renamed over the old one."""
    store.new_link.symlink_to(f"{VERSIONS}/{number}")
    store.new_link.replace(store.live_path)
    sync(store.root)


def _exchange_live(store: Store, number: int, before: Live | None) -> None:
    """Swap a version with the live directory; what was live takes its own number as name."""
    if before is None:
        store.path_of(number).rename(store.live_path)
        sync(store.root)
        sync(store.versions)
        return
    swap(store.path_of(number), store.live_path)
    store.path_of(number).rename(store.path_of(before.number))
    sync(store.versions)


def _live_of_kind(store: Store, *, by_exchange: bool) -> Live | None:
    """Return what is live, when it can be replaced in the wanted way.

    Raises: UsageError naming the other way.
    """
    live = store.live()
    if live is None or live.is_directory == by_exchange:
        return live
    if live.is_directory:
        raise UsageError(
            f'"{store.live_path}" is a real directory, not a link: publish under another name, or exchange it (--exchange)'
        )
    raise UsageError(f'"{store.live_path}" is a link, so nothing needs to be exchanged: publish without --exchange')


def _require_exchange(store: Store) -> None:
    """Find out whether the live directory can be exchanged before gigabytes are copied.

    Raises: UsageError; HarnessError.
    """
    if store.live_path.is_mount():
        raise UsageError(
            f'"{store.live_path}" is a mount point, which no rename can move: mount the directory above it'
        )
    probes = [store.versions / f"{UNFINISHED}probe-{number}" for number in (1, 2)]
    try:
        for probe in probes:
            probe.mkdir()
        swap(*probes)
    finally:
        for probe in probes:
            with contextlib.suppress(FileNotFoundError):
                probe.rmdir()


def _refuse_overlap(source: Path, store: Store) -> None:
    """Refuse to publish a directory into itself; publishing a kept version anew is fine."""
    if store.root.resolve().is_relative_to(source.resolve()):
        raise UsageError(f'"{store.root}" lies inside "{source}": a checkpoint cannot be published into itself')


@contextmanager
def _explained(what_failed: str, store: Store) -> Iterator[None]:
    """Turn what the system refused into one sentence that says what is live now."""
    try:
        yield
    except OSError as error:
        where = f' at "{error.filename}"' if error.filename else ""
        with contextlib.suppress(OSError):
            where += f", {shutil.disk_usage(store.root).free:,} bytes are free"
        live = None
        with contextlib.suppress(OSError, UsageError):
            live = store.live()
        now = "nothing is live" if live is None else f"version {live.number} is live"
        raise HarnessError(f"{what_failed}: {error.strerror or error}{where}; {now}") from error


def _published(store: Store, before: Live | None, copied: Copied | None) -> Published:
    live = store.live()
    if live is None:
        raise HarnessError(f'"{store.live_path}" was made live and is gone again: somebody else changes "{store.root}"')
    return Published(
        version=live.number,
        version_path=live.path,
        previous=None if before is None else store.path_of(before.number),
        previous_version=None if before is None else before.number,
        copied=copied,
    )
