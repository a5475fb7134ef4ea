"""Find, before any engine is started, what is wrong with a checkpoint: headers, config, tokenizer, launch arguments."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from harness.checkpoint.survey import survey
from harness.errors import EXIT_BROKEN, EXIT_HELD, EXIT_USAGE, UsageError
from harness.guards.finding import PreflightFinding, Severity, printable
from harness.guards.launch_arguments import argument_findings, effective_dtype
from harness.guards.layout import layout_findings
from harness.guards.side_files import differences, side_file_findings
from harness.guards.structure import finding_of
from harness.guards.values import value_findings

__all__ = ["PreflightFinding", "Severity", "check", "main"]

UNREAD = ("D01", "D02", "D03", "D16", "D20")  # structural findings after which tensors of a shard are not known
ORDER = {Severity.REFUSES: 0, Severity.SILENT: 1, Severity.RISK: 2}
HEADINGS = {
    Severity.REFUSES: "The engine would not start:",
    Severity.SILENT: "The engine would start and serve wrong answers:",
    Severity.RISK: "May be meant so, look at it:",
}


def check(
    path: Path,
    *,
    dtype: str = "auto",
    arguments: Sequence[str] = (),
    against: Path | None = None,
    read_tensors: bool = False,
) -> tuple[PreflightFinding, ...]:
    """Return everything that is wrong with the checkpoint in `path`, the worst first; never raises for what is in it.

    Headers and small files are read; with `read_tensors` all values too. `dtype` and `arguments` are what the engine
    will be started with; `against` is the running checkpoint, for changes that weights cannot show.
    """
    found = list(_findings(path, dtype, arguments, against, read_tensors))
    return tuple(sorted(found, key=lambda finding: ORDER[finding.severity]))


def _findings(
    path: Path, dtype: str, arguments: Sequence[str], against: Path | None, read_tensors: bool
) -> Iterator[PreflightFinding]:
    checkpoint, defects = survey(path)
    structural = [finding_of(defect) for defect in defects]
    yield from structural
    if path.is_dir():
        is_whole = not any(finding.id in UNREAD for finding in structural)
        yield from layout_findings(checkpoint, is_whole=is_whole)
        yield from side_file_findings(checkpoint)
    yield from argument_findings(checkpoint, dtype=dtype, arguments=arguments)
    if read_tensors:
        to_fp16 = effective_dtype(dtype, arguments) in ("float16", "half")
        yield from value_findings(checkpoint, to_fp16=to_fp16)
    if against is not None:
        yield from differences(checkpoint, survey(against)[0])


def main(argv: Sequence[str] | None = None) -> int:
    """Run `harness preflight`; return 0 when nothing blocks a rollout, 1 for findings, 3 for a wrong call."""
    given = list(sys.argv[1:] if argv is None else argv)
    split = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(
        prog="harness preflight",
        description="Check a checkpoint before an engine is started on it.",
        epilog="After -- come the engine's own arguments, as they will be used.",
        exit_on_error=False,
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--against", type=Path, metavar="OLD", help="the running checkpoint, to see what changed")
    parser.add_argument("--dtype", default="auto", help="the --dtype of the engine (default: auto)")
    parser.add_argument("--deep", action="store_true", help="read all tensor values too")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    try:
        options = parser.parse_args(given[:split])
        for directory in filter(None, (options.checkpoint, options.against)):
            if not directory.is_dir():
                raise UsageError(f'"{directory}" is not a directory')
    except (argparse.ArgumentError, UsageError) as error:
        print(f"harness preflight: {error}", file=sys.stderr)
        return EXIT_USAGE
    except SystemExit as end:  # --help, or an argument that is absent
        return EXIT_HELD if end.code in (0, None) else EXIT_USAGE
    findings = check(
        options.checkpoint,
        dtype=options.dtype,
        arguments=given[split + 1 :],
        against=options.against,
        read_tensors=options.deep,
    )
    blocking = sum(finding.blocks for finding in findings)
    if options.json:
        print(
            json.dumps({"checkpoint": str(options.checkpoint), "findings": [f.as_json() for f in findings]}, indent=1)
        )
    else:
        for severity, group in groupby(findings, key=lambda finding: finding.severity):
            print(HEADINGS[severity])
            for finding in group:
                print(f"\n{finding.as_text()}")
            print()
        print(_verdict(options.checkpoint, blocking, len(findings) - blocking))
    return EXIT_BROKEN if blocking else EXIT_HELD


def _verdict(checkpoint: Path, blocking: int, risks: int) -> str:
    also = f"; {risks} {'risk' if risks == 1 else 'risks'} to look at" if risks else ""
    if not blocking:
        return printable(f'"{checkpoint}": nothing that should stop the rollout{also}')
    counted = f"{blocking} {'finding' if blocking == 1 else 'findings'}"
    return printable(f'"{checkpoint}": do not roll out, {counted}{also}')
