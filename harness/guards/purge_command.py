"""The guard `harness purge-cache`: list what dead engines or a checkpoint may have left, and remove what may be removed."""

from __future__ import annotations

import argparse
import os
import pwd
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.errors import EXIT_BROKEN, EXIT_HELD, HarnessError, UsageError
from harness.guards.command import CommandParser, print_json
from harness.guards.finding import printable
from harness.guards.holders import FileKey, Sight, look
from harness.guards.leftovers import Kind, Leftover, Places, find_all, numpy_cache, weight_cache
from harness.guards.purge import list_cache, purge
from harness.guards.removal import remove

ABSENT = 'there is no directory "{}" that could hold a weight cache'
SPANS = ((86400.0, "day"), (3600.0, "hour"), (60.0, "minute"), (1.0, "second"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A left-over, why it is kept (empty: it may be removed), and whether it was."""

    left: Leftover
    chosen: bool  # named by the user, or recorded by a run of this harness that is dead
    kept: str
    users: tuple[str, ...]
    removed: bool = False


def purge_main(argv: Sequence[str]) -> int:
    """Run `harness purge-cache`; return 0 when nothing that was chosen is there any more, 1 when something is.

    Raises: UsageError when a path is absent, no weight cache and nothing else that is known: a mistyped path must not
    look like success.
    """
    options = _parser().parse_args(argv)
    places = Places.of(os.environ)
    found = list(_found(options, places))
    named = {left.key for path in options.paths for left in found if _is_meant(path, left)}
    if options.checkpoint is not None:
        named |= {left.key for left in found if left.kind is Kind.NUMPY_CACHE}
    keys = {key for left in found for key in left.keys}
    sight = look(keys, sockets=[left.path for left in found if left.kind is Kind.SOCKET])
    judged = [_judge(left, named, sight, options) for left in found]
    if options.yes:
        judged = _remove(judged)
    _say(judged, sight, options)
    return EXIT_BROKEN if any(each.chosen and not each.removed for each in judged) else EXIT_HELD


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="harness purge-cache",
        description="List what dead engines or a checkpoint may have left: weight caches, segments in shared memory, compile "
        "caches, np/, sockets of weight-cache daemons. Removed is only what is named here, or what a dead run of this "
        "harness labelled, if it is the caller's own and no living process was seen to use it. Purge before an engine "
        "starts, never beside a start.",
        epilog="Exit codes: 0 nothing of what was named or labelled is there any more; 1 some of it is, because --yes was "
        "not given or because it was kept for the reason printed; 3 wrong call, nothing was removed.",
    )
    parser.add_argument(
        "paths",
        nargs="*",
        type=Path,
        metavar="ROOT",
        help="a weight cache, as in VLLM_WEIGHT_CACHE_PATH, or any path that the list shows; "
        "without one, and without --checkpoint, everything is listed",
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="also the np/ that load format npcache wrote into this checkpoint",
    )
    parser.add_argument("--all-kinds", action="store_true", help="list everything, whatever is named")
    parser.add_argument("--yes", action="store_true", help="remove what may be removed; without it all is only listed")
    parser.add_argument(
        "--even-mapped",
        action="store_true",
        help="also what a living process uses: it keeps what it has mapped, as the old engine beside a new one should",
    )
    parser.add_argument("--even-of-others", action="store_true", help="also what belongs to other users, as root may")
    parser.add_argument("--json", action="store_true", help="print all of it as JSON")
    return parser


def _found(options: argparse.Namespace, places: Places) -> Iterator[Leftover]:
    """Find what was asked for, each thing once.

    Raises: UsageError.
    """
    found: dict[FileKey, Leftover] = {}

    def add(more: Iterable[Leftover]) -> None:
        for left in more:
            found.setdefault(left.key, left)

    for path in options.paths:
        add(_named(path, places))
    if options.checkpoint is not None:
        if not options.checkpoint.is_dir():
            raise UsageError(f'the checkpoint "{options.checkpoint}" is not a directory')
        add(numpy_cache(options.checkpoint.resolve()))
    if options.all_kinds or not (options.paths or options.checkpoint):
        add(find_all(places))
    return iter(found.values())


def _named(path: Path, places: Places) -> list[Leftover]:
    """Return what a path of the command line stands for."""
    if not os.path.lexists(path):
        raise UsageError(ABSENT.format(path))
    try:
        list_cache(path)
    except UsageError:
        others = [*find_all(places), *(numpy_cache(path.parent.resolve()) if path.name == "np" else ())]
        found = [left for left in others if _is_meant(path, left) and not _is_refused_cache(left)]
        if not found:
            raise
        return found
    return list(weight_cache(path))


def _is_refused_cache(left: Leftover) -> bool:
    return left.kind is Kind.WEIGHT_CACHE and bool(left.obstacle)


def _is_meant(path: Path, left: Leftover) -> bool:
    """Say whether a path names a left-over, or the weight cache that it is an entry of."""
    place = Path(os.path.realpath(path.parent)) / path.name
    if path.name in ("", ".", ".."):
        place = Path(os.path.realpath(path))
    return left.path == place or (left.kind is Kind.WEIGHT_CACHE and left.path.parent == place)


def _judge(left: Leftover, named: set[FileKey], sight: Sight, options: argparse.Namespace) -> Judged:
    """Decide whether a left-over may be removed; the first reason against it is told."""
    chosen = left.key in named or left.recorded
    users = tuple(str(holder) for holder in sight.of(left.keys))
    others = sorted(left.owners - {os.geteuid()})
    kept = ""
    if not chosen:
        kept = left.obstacle or "nobody named it, and no dead run of this harness labelled it"
    elif left.obstacle:
        kept = left.obstacle
    elif others and not options.even_of_others:
        kept = f"it belongs to {_user(others[0])}, or holds something that does (--even-of-others)"
    elif users and not options.even_mapped:
        kept = f"{users[0]} (--even-mapped)"
    return Judged(left=left, chosen=chosen, kept=kept, users=users)


def _remove(judged: list[Judged]) -> list[Judged]:
    """Remove what may be removed; what refuses at the last moment is kept with its reason."""
    done = []
    caches: dict[Path, set[str]] = {}
    for each in judged:
        if each.kept:
            done.append(each)
        elif each.left.kind is Kind.WEIGHT_CACHE:
            caches.setdefault(each.left.path.parent, set()).add(each.left.path.name)
            done.append(replace(each, removed=True))
        else:
            try:
                remove(each.left.path, each.left.key)
                done.append(replace(each, removed=True))
            except HarnessError as error:
                done.append(replace(each, kept=str(error)))
    for root in caches:
        keep = {each.left.path.name for each in judged if each.kept and each.left.path.parent == root}
        purge(root, keep=frozenset(keep))
    return done


def _say(judged: list[Judged], sight: Sight, options: argparse.Namespace) -> None:
    if options.json:
        print_json(
            {
                "dry_run": not options.yes,
                "items": [_as_json(each) for each in judged],
                "processes": {"looked_at": sight.looked_at, "closed": sight.closed, "sees_host": sight.sees_host},
            }
        )
        return
    for each in judged:
        print(_described(each))
    chosen = [each for each in judged if each.chosen]
    if not judged:
        where = (
            ", ".join(f'"{path}"' for path in (*options.paths, *filter(None, [options.checkpoint]))) or "this machine"
        )
        print(printable(f"{where} holds no cache entries, and nothing else was found"))
    else:
        print(f"{sight}, so unseen does not mean unused")
    if options.yes:
        gone = [each for each in chosen if each.removed]
        if gone or judged:
            print(f"removed: {_counted(gone)}")
    elif removable := [each for each in chosen if not each.kept]:
        print(f"found: {_counted(removable)}; nothing was removed, add --yes to remove them")
    elif judged:
        print("nothing was removed, and --yes would remove nothing")


def _described(each: Judged) -> str:
    left = each.left
    use = "; ".join(each.users) or "not seen in use"
    facts = f"{left.size_bytes:,} bytes, {_owners(left)}, {_age(left)} old, {use}"
    fate = "removed" if each.removed else f"kept: {each.kept}" if each.kept else "may be removed"
    about = f"  {left.about}" if left.about else ""
    return printable(f"{left.kind:14}{left.path}  {facts}{about}") + "\n" + printable(f"{'':14}{fate}")


def _as_json(each: Judged) -> dict[str, Any]:
    left = each.left
    return {
        "kind": left.kind,
        "path": str(left.path),
        "size_bytes": left.size_bytes,
        "owners": sorted(left.owners),
        "age_s": round(max(0.0, time.time() - left.modified_s), 1),
        "about": left.about,
        "used_by": list(each.users),
        "chosen": each.chosen,
        "kept_because": each.kept,
        "removed": each.removed,
    }


def _counted(judged: list[Judged]) -> str:
    size_bytes = sum(each.left.size_bytes for each in judged)
    return f"{len(judged)} {'entry' if len(judged) == 1 else 'entries'}, {size_bytes:,} bytes"


def _owners(left: Leftover) -> str:
    return "of " + ", ".join(_user(number) for number in sorted(left.owners))


def _user(number: int) -> str:
    try:
        return f'user "{pwd.getpwuid(number).pw_name}"'
    except KeyError:
        return f"user {number}"


def _age(left: Leftover) -> str:
    seconds = max(0.0, time.time() - left.modified_s)
    for span, word in SPANS:
        if seconds >= span:
            count = int(seconds / span)
            return f"{count} {word}{'' if count == 1 else 's'}"
    return "0 seconds"
