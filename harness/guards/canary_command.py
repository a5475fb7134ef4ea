"""`harness canary`: ask a running engine and say which checkpoint answered, and what the asking costs."""

from __future__ import annotations

import argparse
import math
import os
import random
import ssl
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.errors import EXIT_UNKNOWN, HarnessError, UsageError
from harness.guards.canary import Answer, Golden, GoldenPair
from harness.guards.canary_pass import Checked, ask, check_deep, check_stream
from harness.guards.canary_report import Seen, prometheus
from harness.guards.command import CommandParser, print_json
from harness.guards.engine_api import EngineApi, Refused, require_address, tls_context
from harness.guards.finding import printable

API_KEY_VARIABLE = "VLLM_API_KEY"


def canary_main(argv: Sequence[str]) -> int:
    """Run `harness canary`; return 0 for the golden's answer, 1 for another, 2 for none that can be used.

    Raises: UsageError for an address or a golden file that cannot be used.
    """
    options = _parser().parse_args(argv)
    _check(options)
    pair = _pair(options.golden, options.golden_new)
    if options.deep and pair.old.deep is None:
        raise UsageError(f'"{options.golden}" knows no long prompt: make it with `harness golden --deep`')
    if options.all and pair.old.streamed is None:
        print("harness canary: the golden knows no stream: only its framing can be checked", file=sys.stderr)
    api = EngineApi(
        url=options.url,
        limit_s=options.limit_s,
        api_key=os.environ.get(options.api_key_env),
        tls=tls_context(options.ca_file, insecure=options.insecure),
    )
    try:
        seen = _ask_everything(api, options, pair)
    except (OSError, ValueError) as error:
        said = (
            f"no usable answer from {options.url} (limit {options.limit_s:g} s): {str(error) or type(error).__name__}"
        )
        if isinstance(error, Refused) and error.status == 401:
            said += f"; the API key comes from the variable {options.api_key_env}"
        if isinstance(error, ssl.SSLCertVerificationError):
            said += "; --ca-file names the authority to trust"
        if options.json:
            print_json({"answer": None, "because": said})
        print(printable(f"harness canary: {said}"), file=sys.stderr)
        _write_metrics(options.textfile, None)
        return EXIT_UNKNOWN
    if options.json:
        print_json(seen.as_json(period_s=options.period_s, is_authenticated=not options.insecure))
    else:
        for line in seen.as_lines(period_s=options.period_s):
            print(printable(line))
    _write_metrics(options.textfile, seen)
    return seen.exit_code


def _ask_everything(api: EngineApi, options: argparse.Namespace, pair: GoldenPair) -> Seen:
    model = options.model or api.served().model
    rotation = None
    if not options.all:
        # Drawn, not counted by the clock: a probe whose period is a multiple of the clock's would meet the same pass again.
        rotation = random.randrange(pair.old.passes) if options.rotation is None else options.rotation % pair.old.passes
    asked = ask(api, model, pair.old.prompts, rotation=rotation)
    comparison = pair.compare(asked.rows, rotation)
    answer = comparison.answer
    if options.golden_new is None:  # compared with one golden, an answer is its or is not
        answer = Answer.NEITHER if answer is Answer.NEITHER else Answer.OLD
    checks: list[tuple[str, Checked]] = []
    if options.all:
        checks.append(("stream", check_stream(api, model, pair.old)))
    if options.deep and pair.old.deep is not None:
        checks.append(("deep", check_deep(api, model, pair.old.deep)))
    return Seen(
        pair=pair,
        is_alone=options.golden_new is None,
        rotation=rotation,
        asked=asked,
        comparison=comparison,
        answer=answer,
        checks=tuple(checks),
    )


def _write_metrics(path: Path | None, seen: Seen | None) -> None:
    if path is None:
        return
    from harness.guards.preflight_formats import write_beside  # XML is slow to import

    try:
        write_beside(path, prometheus(seen))
    except OSError as error:
        print(printable(f"harness canary: --textfile was not written: {error}"), file=sys.stderr)


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="harness canary",
        description="Ask what a golden knows the answers of and say which checkpoint answered. One pass asks two of its "
        "prompts, drawn anew each time.",
        epilog="Exit codes: 0 the golden's checkpoint, 1 another, 2 no usable answer, 3 wrong call.",
    )
    parser.add_argument("url", metavar="URL", help="where the engine is, for example http://127.0.0.1:8000")
    parser.add_argument("--golden", type=Path, required=True, metavar="FILE", help="the answers expected here")
    parser.add_argument("--golden-new", type=Path, metavar="FILE", help="the other checkpoint's, to recognise it too")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--rotation", type=int, metavar="N", help="ask pass N (counted from 0, in turn) instead of one drawn"
    )
    which.add_argument(
        "--all", action="store_true", help="ask all passes and one stream, as before traffic is admitted"
    )
    parser.add_argument(
        "--deep",
        action="store_true",
        help="also ask a long prompt twice, which finds a stale KV cache; costs its prefill",
    )
    parser.add_argument(
        "--period-s", type=float, default=10.0, help="how often this is run, for its price (default: 10)"
    )
    parser.add_argument(
        "--api-key-env",
        default=API_KEY_VARIABLE,
        metavar="NAME",
        help=f"the environment variable that holds the API key (default: {API_KEY_VARIABLE})",
    )
    trust = parser.add_mutually_exclusive_group()
    trust.add_argument(
        "--ca-file", type=Path, metavar="FILE", help="certificate authorities to trust instead of the system's"
    )
    trust.add_argument("--insecure", action="store_true", help="trust any certificate: whoever answers may be anybody")
    parser.add_argument("--model", metavar="NAME", help="the served model (default: the first that the engine lists)")
    parser.add_argument("--limit-s", type=float, default=30.0, help="how long each answer may take (default: 30)")
    parser.add_argument("--textfile", type=Path, metavar="FILE", help="also write the result as Prometheus metrics")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def _check(options: argparse.Namespace) -> None:
    require_address(options.url, insecure=options.insecure)
    for name in ("limit_s", "period_s"):
        value = getattr(options, name)
        if not 0 < value < math.inf:
            raise UsageError(f"--{name.replace('_', '-')} is {value:g}, expected more than 0")


def _pair(golden: Path, other: Path | None) -> GoldenPair:
    try:
        known = Golden.load(golden)
        return GoldenPair(known, known if other is None else Golden.load(other))
    except HarnessError as error:
        raise UsageError(str(error)) from error
