"""`harness canary`: ask a running engine and say which checkpoint answered, and what the asking costs."""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import EXIT_BROKEN, EXIT_HELD, EXIT_UNKNOWN, HarnessError, UsageError
from harness.guards.canary import Answer, Comparison, Golden, GoldenPair
from harness.guards.canary_pass import Asked, Checked, ask, check_deep, check_stream
from harness.guards.command import CommandParser, print_json
from harness.guards.engine_api import EngineApi, require_address, tls_context
from harness.guards.finding import printable

API_KEY_VARIABLE = "VLLM_API_KEY"
NAMES = {Answer.OLD: "golden", Answer.NEW: "golden_new", Answer.NEITHER: "neither", Answer.AMBIGUOUS: "ambiguous"}
SENTENCES = {
    Answer.OLD: "the golden's checkpoint answered",
    Answer.NEW: "the other checkpoint answered",
    Answer.NEITHER: "neither known checkpoint answered: corrupt or mixed weights, or another engine build",
    Answer.AMBIGUOUS: "the answer fits both checkpoints: these prompts cannot tell them apart",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """Everything one call of the command found out."""

    pair: GoldenPair
    is_alone: bool  # no second golden
    rotation: int | None
    asked: Asked
    comparison: Comparison
    answer: Answer
    checks: tuple[tuple[str, Checked], ...]

    @property
    def known(self) -> list[tuple[str, Golden, float]]:
        """Return each golden with its option's name and how far the answer is from it."""
        known = [("golden", self.pair.old, self.comparison.difference_old)]
        if not self.is_alone:
            known.append(("golden_new", self.pair.new, self.comparison.difference_new))
        return known

    @property
    def exit_code(self) -> int:
        is_right = self.answer is Answer.OLD and not any(checked.because for _, checked in self.checks)
        return EXIT_HELD if is_right else EXIT_BROKEN

    @property
    def took_s(self) -> float:
        return self.asked.took_s + sum(checked.took_s for _, checked in self.checks)

    @property
    def prompt_tokens(self) -> int:
        return self.asked.prompt_tokens + sum(checked.prompt_tokens for _, checked in self.checks)

    @property
    def output_tokens(self) -> int:
        return self.asked.output_tokens + sum(checked.output_tokens for _, checked in self.checks)


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
        if options.json:
            print_json({"answer": None, "because": said})
        print(printable(f"harness canary: {said}"), file=sys.stderr)
        _write_metrics(options.textfile, EXIT_UNKNOWN, None)
        return EXIT_UNKNOWN
    if options.json:
        print_json(_document(seen, options))
    else:
        _say(seen, options)
    _write_metrics(options.textfile, seen.exit_code, seen)
    return seen.exit_code


def _ask_everything(api: EngineApi, options: argparse.Namespace, pair: GoldenPair) -> _Seen:
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
    return _Seen(
        pair=pair,
        is_alone=options.golden_new is None,
        rotation=rotation,
        asked=asked,
        comparison=comparison,
        answer=answer,
        checks=tuple(checks),
    )


def _say(seen: _Seen, options: argparse.Namespace) -> None:
    sentence = "another checkpoint answered, or another engine build"
    if seen.answer is not Answer.NEITHER or not seen.is_alone:
        sentence = SENTENCES[seen.answer]
    if not seen.asked.rows:
        sentence = "the engine says that its logprobs are not finite: weights with NaN, or values beyond its dtype"
    far = ", ".join(f"{difference:.3g} from {golden.weights_id}" for _, golden, difference in seen.known)
    lines = [f"{sentence}; largest difference in prompt logprobs: {far} (tolerance {seen.pair.tolerance:g})"]
    for name, checked in seen.checks:
        found = checked.because or f"right: {checked.saw}"
        lines.append(f"{'stream' if name == 'stream' else 'long prompt'}: {found} ({checked.took_s:.2f} s)")
    passes = seen.pair.old.passes
    which = f"all {passes} passes" if seen.rotation is None else f"pass {seen.rotation + 1} of {passes}"
    lines.append(
        f"asked {which} by {seen.asked.how}: {seen.prompt_tokens} prompt tokens, {seen.output_tokens} output tokens, "
        f"{seen.took_s:.3f} s; every {options.period_s:g} s that is at most {seen.took_s / options.period_s:.2%} of the "
        "engine's time"
    )
    print(printable("\n".join(lines)))


def _document(seen: _Seen, options: argparse.Namespace) -> dict[str, Any]:
    document: dict[str, Any] = {"answer": NAMES[seen.answer], "tolerance": seen.pair.tolerance}
    for name, golden, difference in seen.known:
        # JSON has no infinity: null is a difference beyond measure
        shown = difference if math.isfinite(difference) else None
        document[name] = {"weights_id": golden.weights_id, "engine": golden.engine, "difference": shown}
    document["asked"] = {
        "pass": seen.rotation,
        "passes": seen.pair.old.passes,
        "by": seen.asked.how,
        "prompt_tokens": seen.prompt_tokens,
        "output_tokens": seen.output_tokens,
        "took_s": round(seen.took_s, 4),
        "period_s": options.period_s,
        "share_of_engine_time": round(seen.took_s / options.period_s, 5),
        "authenticated": not options.insecure,
    }
    return {**document, **{name: checked.as_json() for name, checked in seen.checks}}


def _write_metrics(path: Path | None, code: int, seen: _Seen | None) -> None:
    """Write the result as Prometheus metrics for a textfile collector, whole or not at all."""
    if path is None:
        return
    values = {
        "harness_canary_exit_code": ("0 the golden's checkpoint answered, 1 another, 2 no usable answer.", float(code)),
        "harness_canary_time_seconds": ("When the canary was asked, seconds since 1970.", time.time()),
    }
    if seen is not None:
        largest = seen.comparison.difference_old
        values["harness_canary_difference"] = ("Largest difference in prompt logprobs from the golden.", largest)
        values["harness_canary_tolerance"] = ("How large it may be.", seen.pair.tolerance)
        values["harness_canary_took_seconds"] = ("How long the engine took to answer.", seen.took_s)
    text = "".join(
        f"# HELP {name} {told}\n# TYPE {name} gauge\n{name} {'+Inf' if value == math.inf else repr(value)}\n"
        for name, (told, value) in values.items()
    )
    try:
        partial = path.with_name(f"{path.name}.partial")
        partial.write_text(text, encoding="utf-8")
        partial.chmod(0o644)
        partial.replace(path)
    except OSError as error:
        print(f'harness canary: "{path}" cannot be written: {error.strerror}', file=sys.stderr)


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
    require_address(options.url)
    for name in ("limit_s", "period_s"):
        value = getattr(options, name)
        if not 0 < value < math.inf:
            raise UsageError(f"--{name.replace('_', '-')} is {value:g}, expected more than 0")
    if options.insecure and options.url.startswith("http:"):
        raise UsageError("--insecure is about certificates, and http:// has none")


def _pair(golden: Path, other: Path | None) -> GoldenPair:
    try:
        known = Golden.load(golden)
        return GoldenPair(known, known if other is None else Golden.load(other))
    except HarnessError as error:
        raise UsageError(str(error)) from error
