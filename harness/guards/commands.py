"""The guards as commands: `harness publish` and `harness rollback`, for deploy scripts and init containers."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from harness.errors import EXIT_HELD
from harness.guards.command import CommandParser, print_json
from harness.guards.finding import printable
from harness.guards.publish import KEPT_VERSIONS, LOCK_LIMIT_S, Published, publish, rollback

DANGER = (
    "Danger: a file and its link are one file. Whoever writes to the source in place writes into the live checkpoint, "
    "under a running engine; replacing a file of the source by rename is safe."
)


def publish_main(argv: Sequence[str]) -> int:
    """Run `harness publish`; return 0 when the checkpoint is live.

    Raises: UsageError, HarnessError as `publish` does; they say what is live then.
    """
    parser = CommandParser(
        prog="harness publish",
        description="Copy a checkpoint beside the live one and make it live in one step. "
        "A running engine does not notice: start it anew.",
        epilog="Exit codes: 0 the checkpoint is live; 2 it could not be published (disk full, another publish under way, the "
        "source changed), the message says what is live; 3 wrong call.",
    )
    parser.add_argument("source", type=Path, metavar="SOURCE", help="the checkpoint to publish; it is only read")
    _add_root(parser)
    parser.add_argument(
        "--keep",
        type=int,
        default=KEPT_VERSIONS,
        metavar="N",
        help=f"how many versions stay, the live one and the one before in any case (default: {KEPT_VERSIONS})",
    )
    parser.add_argument(
        "--exchange",
        action="store_true",
        help="ROOT/NAME is and stays a real directory: swap it with the new version instead of replacing a link",
    )
    parser.add_argument("--link", action="store_true", help=f"make hard links instead of copies. {DANGER}")
    parser.add_argument(
        "--no-manifest",
        action="store_true",
        help="do not write down what the version holds: saves reading it once, and it cannot be verified later",
    )
    options = parser.parse_args(argv)
    published = publish(
        options.source,
        options.root,
        name=options.name,
        keep=options.keep,
        by_exchange=options.exchange,
        link=options.link,
        with_manifest=not options.no_manifest,
        wait_limit_s=options.wait,
    )
    if options.link:
        print(f"harness: the live files are hard links to the source. {DANGER}", file=sys.stderr)
    return _say_live(published, options)


def rollback_main(argv: Sequence[str]) -> int:
    """Run `harness rollback`; return 0 when the version before is live again.

    Raises: UsageError when there is none; HarnessError as `rollback` does.
    """
    parser = CommandParser(
        prog="harness rollback",
        description="Make the version live again that was live before the live one was published. "
        "A running engine does not notice: start it anew.",
        epilog="Exit codes: 0 it is live; 2 it could not be done, the message says what is live; 3 wrong call, or no such "
        "version is kept.",
    )
    _add_root(parser)
    options = parser.parse_args(argv)
    return _say_live(rollback(options.root, name=options.name, wait_limit_s=options.wait), options)


def _add_root(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("root", type=Path, metavar="ROOT", help="the directory that the engine's host mounts")
    parser.add_argument("--name", default="live", help="the entry of ROOT that the engine serves (default: live)")
    parser.add_argument(
        "--wait",
        type=_seconds,
        default=LOCK_LIMIT_S,
        metavar="S",
        help=f"how long to wait for another publish to the same ROOT; 0: refuse at once (default: {LOCK_LIMIT_S:g})",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f'must be a number of seconds from 0 on, got "{text}"')
    return seconds


def _say_live(published: Published, options: argparse.Namespace) -> int:
    live, previous, copied = options.root / options.name, published.previous, published.copied
    if options.json:
        print_json(
            {
                "live": str(live),
                "version": published.version,
                "path": str(published.version_path),
                "previous": published.previous_version,
                "previous_path": None if previous is None else str(previous),
                "copied": None if copied is None else asdict(copied),
            }
        )
    else:
        before = "nothing" if previous is None else f'version {published.previous_version} ("{previous}")'
        print(
            printable(
                f'live: "{live}" is now version {published.version} ("{published.version_path}"); before: {before}'
            )
        )
        if copied is not None:
            print(f"      {copied}")
    return EXIT_HELD
