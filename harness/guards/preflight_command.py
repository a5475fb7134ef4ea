"""`harness preflight`: the checks as a command, for people and for CI."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from harness.errors import (
    EXIT_BROKEN,
    EXIT_HELD,
    EXIT_UNKNOWN,
    EXIT_USAGE,
    EnvironmentMissing,
    HarnessError,
    UsageError,
)
from harness.guards.command import print_json
from harness.guards.finding import PreflightReport, Severity, printable
from harness.guards.launch import launch_of
from harness.guards.launch_line import LaunchLine, line_of, read_line
from harness.guards.preflight import Published, examine
from harness.guards.releases import RELEASES_READ, newest, release_of

HEADINGS = {
    Severity.REFUSES: "The engine would not start:",
    Severity.SILENT: "The engine would start and serve wrong answers:",
    Severity.RISK: "May be meant so, look at it:",
}
EPILOG = "After -- come the engine's own arguments as they will be used, or a whole `vllm serve` line."


def main(argv: Sequence[str] | None = None) -> int:
    """Run `harness preflight`; return 0 when nothing blocks a rollout, 1 for findings, 2 unknown, 3 for a wrong call."""
    given = list(sys.argv[1:] if argv is None else argv)
    split = given.index("--") if "--" in given else len(given)
    try:
        options = _parser().parse_args(given[:split])
        for directory in filter(None, (options.checkpoint, options.against)):
            if not directory.is_dir():
                raise UsageError(f'"{directory}" is not a directory')
        release = newest() if options.engine is None else release_of(options.engine)
        launch = launch_of(_line(given[split + 1 :], options.launch_file), release)
        fail_on = _severities(options.fail_on)
        report = examine(
            options.checkpoint,
            launch=launch,
            dtype=options.dtype,
            against=options.against,
            read_tensors=options.verify,
            deep=options.deep,
            published=_published(options),
            fail_on=fail_on,
            check_host=options.check_host,
        )
    except argparse.ArgumentError as error:
        return _ended(error, EXIT_USAGE)
    except EnvironmentMissing as error:
        return _ended(error, EXIT_UNKNOWN)
    except HarnessError as error:
        return _ended(error, error.exit_code)
    except SystemExit as end:  # --help, or an argument that is absent
        return EXIT_HELD if end.code in (0, None) else EXIT_USAGE
    if options.json:
        print_json(report.as_json())
    else:
        _print(report)
    is_written = _write_files(report, options)
    if report.failing:
        return EXIT_BROKEN
    return EXIT_HELD if is_written else EXIT_UNKNOWN


def _ended(error: Exception, exit_code: int) -> int:
    print(printable(f"harness preflight: {error}"), file=sys.stderr)
    return exit_code


def _published(options: argparse.Namespace) -> Published | None:
    if options.manifest is None:
        if options.public_key is not None or options.signature is not None:
            raise UsageError("--public-key and --signature belong to --manifest")
        return None
    return Published(manifest=options.manifest, public_key=options.public_key, signature=options.signature)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="harness preflight",
        description="Check a checkpoint before an engine is started on it.",
        epilog=EPILOG,
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--against", type=Path, metavar="OLD", help="the running checkpoint, to see what changed")
    parser.add_argument(
        "--engine", metavar="vllm==X.Y.Z", help=f"the release that will serve it (default: {RELEASES_READ[-1]})"
    )
    parser.add_argument("--launch-file", type=Path, metavar="FILE", help='a file with the "vllm serve" line')
    parser.add_argument("--dtype", default="auto", help="the --dtype of the engine, where no arguments are given")
    parser.add_argument(
        "--deep",
        action="store_true",
        help="names and shapes of any architecture, by the installed transformers and torch",
    )
    parser.add_argument(
        "--check-host", action="store_true", help="also whether the engine could start on this host, as this user, now"
    )
    parser.add_argument("--verify", action="store_true", help="read every byte: values that are not finite, zero tails")
    parser.add_argument(
        "--manifest", type=Path, metavar="FILE", help="compare every byte with this manifest of the publisher"
    )
    parser.add_argument(
        "--public-key", type=Path, metavar="KEY", help="the manifest must be signed with its private half"
    )
    parser.add_argument("--signature", type=Path, metavar="FILE", help="the signature (default: MANIFEST.sig)")
    parser.add_argument(
        "--fail-on",
        default="refuses,silent",
        metavar="SEVERITIES",
        help="which severities stop a rollout: some of refuses,silent,risk, or none (default: refuses,silent)",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--sarif", type=Path, metavar="FILE", help="also write it as SARIF 2.1.0")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="also write it as JUnit XML")
    parser.add_argument("--textfile", type=Path, metavar="FILE", help="also write it for node exporter's collector")
    return parser


def _line(words: Sequence[str], file: Path | None) -> LaunchLine:
    if file is None:
        return line_of(words)
    if words:
        raise UsageError("--launch-file and arguments after -- exclude each other")
    return read_line(file)


def _severities(text: str) -> frozenset[Severity]:
    names = [name.strip() for name in text.split(",") if name.strip() and name.strip() != "none"]
    unknown = [name for name in names if name not in list(Severity)]
    if unknown:
        raise UsageError(f"--fail-on {unknown[0][:60]!r}; expected some of {', '.join(Severity)}, or none")
    return frozenset(Severity(name) for name in names)


def _write_files(report: PreflightReport, options: argparse.Namespace) -> bool:
    """Write what was asked for beside the printed report; return whether all of it was written."""
    is_written = True
    for name in ("sarif", "junit", "textfile"):
        path: Path | None = getattr(options, name)
        if path is None:
            continue
        from harness.guards.preflight_formats import FORMATS, write_beside  # XML is slow to import

        try:
            write_beside(path, FORMATS[name](report))
        except (OSError, ValueError) as error:
            print(printable(f"harness preflight: --{name} was not written: {error}"), file=sys.stderr)
            is_written = False
    return is_written


def _print(report: PreflightReport) -> None:
    for severity, group in groupby(report.findings, key=lambda finding: finding.severity):
        print(HEADINGS[severity])
        for finding in group:
            print(f"\n{finding.as_text()}")
        print()
    for what in report.unchecked:
        print(printable(f"not checked: {what}"))
    print(_verdict(report))


def _verdict(report: PreflightReport) -> str:
    failing = len(report.failing)
    others = [finding for finding in report.findings if finding.severity not in report.fail_on]
    risks = sum(finding.severity is Severity.RISK for finding in others)
    also = f"; {risks} {'risk' if risks == 1 else 'risks'} to look at" if risks else ""
    if len(others) > risks:
        also += f"; {len(others) - risks} that --fail-on lets pass"
    if not failing:
        return printable(f'"{report.checkpoint}": nothing that should stop the rollout{also}')
    counted = f"{failing} {'finding' if failing == 1 else 'findings'}"
    return printable(f'"{report.checkpoint}": do not roll out, {counted}{also}')
