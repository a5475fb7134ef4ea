"""The command line: `harness run`, `judge`, `sweep`, `list`, `expectations`, `qualify`, and the guards as commands.

Exit codes: 0 held or clean, 1 broken or findings, 2 unknown, 3 usage.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path

from harness.compare_command import add_commands, judge_comparisons
from harness.errors import EXIT_BROKEN, EXIT_HELD, EXIT_UNKNOWN, EXIT_USAGE, HarnessError
from harness.expectations_command import add_expectations
from harness.guards.command import CommandParser
from harness.matrix_command import add_matrix
from harness.qualify_command import add_qualify
from harness.settings import EXPLAINED

# Guards have a command line of their own, so that they start fast and work alone.
GUARDS = {
    "preflight": ("harness.guards.preflight_command", "main"),
    "manifest": ("harness.guards.manifest_command", "manifest_main"),
    "publish": ("harness.guards.commands", "publish_main"),
    "rollback": ("harness.guards.commands", "rollback_main"),
    "purge-cache": ("harness.guards.purge_command", "purge_main"),
    "canary": ("harness.guards.canary_command", "canary_main"),
    "golden": ("harness.golden_command", "golden_main"),
    "damage": ("harness.damage_command", "damage_main"),
    "explain": ("harness.explain", "explain_main"),
    "agreement": ("harness.agreement_command", "agreement_main"),
    "calibrate": ("harness.load.calibration", "calibrate_main"),
}

SUMMARIES = {
    "preflight": "check a checkpoint before an engine is started on it",
    "manifest": "write down what a checkpoint holds, to verify copies with",
    "publish": "make a checkpoint live in one step",
    "rollback": "make the version before live again",
    "purge-cache": "list what dead engines left, or remove it",
    "canary": "ask a running engine and say which checkpoint answered",
    "golden": "write down what a checkpoint answers, for canaries to compare with",
    "damage": "write a damaged copy of a checkpoint, and prove what is wrong with it",
    "explain": "say what the log of an engine means: cause, likely faults, remedy",
    "agreement": "show what pre-flight foresees of recorded starts beside what releases did",
    "calibrate": "measure what one loader of this machine can do, so that plans beyond it are refused",
}

TRACEBACK_VARIABLE = "ROLLOUT_TRACEBACK"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; what goes wrong is said in one sentence."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may know fewer characters than a log holds
    try:
        with _termination_as_interrupt(), _written_to_the_end():
            if given and given[0] in GUARDS:
                return _guard(given[0], given[1:])
            options = _parser().parse_args(given)
            command: Callable[[argparse.Namespace], int] = options.command
            return command(options)
    except HarnessError as error:
        print(f"harness: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        # One that came from inside an `exec` of text, as dataclasses are made, lets `python -m` end by SIGINT although it
        # is caught here; the next such `exec` clears that.
        exec("")  # noqa: S102
        print("harness: interrupted; what was running has been ended", file=sys.stderr)
        return EXIT_UNKNOWN
    except BrokenPipeError:
        _write_nowhere()
        return EXIT_UNKNOWN
    except OSError as error:
        print(f"harness: {error}", file=sys.stderr)
        return EXIT_USAGE
    except Exception as error:  # exit code 1 would say that something was found broken
        return _own_bug(error)


def _own_bug(error: Exception) -> int:
    if os.environ.get(TRACEBACK_VARIABLE):
        traceback.print_exception(error)
    said = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
    print(
        f"harness: {said}: this is a bug of the harness; {TRACEBACK_VARIABLE}=1 shows where it happened",
        file=sys.stderr,
    )
    return EXIT_UNKNOWN


@contextmanager
def _written_to_the_end() -> Iterator[None]:
    """Write what was printed before the command ends; a reader who has gone, such as `head`, changes no exit code."""
    try:
        yield
    finally:
        try:
            if sys.stdout is not None:  # closed by whoever called
                sys.stdout.flush()
        except OSError as error:
            _write_nowhere()
            if not isinstance(error, BrokenPipeError):  # such as a full disk
                raise


def _write_nowhere() -> None:
    """Discard what is still to be printed, which the interpreter would otherwise complain about when it ends."""
    with open(os.devnull, "wb") as nowhere, suppress(OSError):
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


@contextmanager
def _termination_as_interrupt() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end a command as Ctrl-C does: with everything that was started ended before."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) == signal.SIG_DFL:  # nohup means it
                before[number] = signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="harness", description="Chaos and regression tests for checkpoint rollouts on vLLM.")
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="run scenarios and write results/<run>/report.html")
    run.add_argument(
        "paths", nargs="*", default=["scenarios"], help="scenario files or directories (default: scenarios)"
    )
    run.add_argument("--all", action="store_true", help="every variant instead of one per fault family")
    run.add_argument(
        "--nightly", action="store_true", help="every variant, also those marked nightly: hours on real vLLM"
    )
    for name, text in EXPLAINED.items():
        run.add_argument(f"--{name}", default=None, help=text)
    run.add_argument(
        "--locust-web-ui",
        action="store_true",
        default=None,
        help="serve locust's own page while load runs, on a free loopback port that is printed; for looking only",
    )
    run.add_argument("--require", default="", help="resources whose absence fails instead of skipping")
    run.add_argument(
        "-k",
        dest="select",
        default="",
        help="only scenarios whose name matches, as in pytest; the guarded runs alone are 'not unguarded'",
    )
    run.set_defaults(command=_run)

    judge = commands.add_parser("judge", help="judge a stored run anew, without an engine")
    judge.add_argument("run", type=Path, metavar="RUN", help="a directory under results/, such as results/latest")
    judge.add_argument(
        "--expectations",
        type=Path,
        metavar="DIR",
        help="judge against the recorded layers as they are there now, instead of those stored with the run",
    )
    judge.set_defaults(command=_judge)

    sweep = commands.add_parser("sweep", help="list what dead runs left behind, and end it with --yes")
    sweep.add_argument("--yes", action="store_true", help="end what is listed")
    sweep.set_defaults(command=_sweep)

    listing = commands.add_parser("list", help="list faults and scenarios, what they need and how long they took")
    listing.add_argument("paths", type=Path, nargs="*", help="scenario files or directories (default: scenarios)")
    listing.add_argument("--results", type=Path, default=Path("results"), help="stored runs (default: results)")
    listing.set_defaults(command=_list)

    add_expectations(commands)
    add_matrix(commands)
    add_commands(commands)
    add_qualify(commands)
    for name, summary in SUMMARIES.items():
        commands.add_parser(name, help=summary, add_help=False)
    return parser


def _guard(name: str, arguments: list[str]) -> int:
    module, function = GUARDS[name]
    code: int = getattr(import_module(module), function)(arguments)
    return code


def _run(options: argparse.Namespace) -> int:
    from harness.session import run_scenarios

    return run_scenarios(options)


def _judge(options: argparse.Namespace) -> int:
    from harness.judge.verdict import Verdict, exit_code_of
    from harness.report.printable import printable
    from harness.report.reports import write_reports

    if (options.run / "comparison.json").is_file():
        return judge_comparisons([options.run])
    run = write_reports(options.run, expectations=options.expectations)
    for record in run.scenarios:
        print(printable(f"{record.verdict:8}{record.layer:14}{record.name} [{record.mode}]"))
        for finding in record.findings:
            if finding.verdict is not Verdict.HELD:
                print(printable(f"        {finding.claim}: {finding.verdict}: {finding.because}"))
    for name in run.undeclared:
        print(printable(f'unknown: "{name}" has no scenario.json, so nothing can be said of it'))
    if not run.is_complete:
        print("unknown: the run did not come to its end, so that what is missing in it was not judged")
    print(f"report: {options.run / 'report.html'}")
    return exit_code_of([*(record.verdict for record in run.scenarios), *([] if run.is_complete else ["unknown"])])


def _sweep(options: argparse.Namespace) -> int:
    from harness import sweep

    found = sweep.find_of_dead_runs()
    for left in found:
        for kind in sweep.KINDS:
            if names := left.as_json().get(kind):
                print(f"{left.label}: {kind}: {', '.join(names)}")
    unanswered = found[0].unanswered if found else sweep.docker_unanswered()
    if unanswered:
        print(f"harness: containers and networks could not be looked for: {unanswered}", file=sys.stderr)
    if not found:
        print("nothing else is left of dead runs" if unanswered else "nothing is left of dead runs")
        return EXIT_UNKNOWN if unanswered else EXIT_HELD
    if not options.yes:
        print("nothing was touched; end them with: harness sweep --yes")
        return EXIT_BROKEN
    stayed = [left for left in (sweep.end(left.label) for left in found) if not left.is_empty()]
    for left in stayed:
        print(f"could not be ended: {left.as_json()}", file=sys.stderr)
    return EXIT_BROKEN if stayed else EXIT_HELD


def _list(options: argparse.Namespace) -> int:
    from harness.listing import listing
    from harness.report.printable import printable

    for line in listing(options.paths, options.results):
        print(printable(line))
    return EXIT_HELD


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"harness {version('vllm-rollout-harness')}"
    except PackageNotFoundError:  # run from its sources
        return "harness (not installed)"


if __name__ == "__main__":
    sys.exit(main())
