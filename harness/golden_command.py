"""`harness golden`: write down what a checkpoint answers, from a running engine or from a cold start."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from harness.errors import EXIT_HELD, UsageError
from harness.golden_sources import DEEP_TOKENS, SAFE_VOCABULARY, from_cold_start, from_running
from harness.guards.canary import UNKNOWN, Golden, of_pass
from harness.guards.canary_command import API_KEY_VARIABLE
from harness.guards.command import CommandParser, print_json
from harness.guards.engine_api import require_address
from harness.guards.finding import printable
from harness.observe.canary_prompts import PROMPT_COUNT

BULKY = ("prompts", "prompt_logprobs", "streamed", "deep")
PROMPTS_MAX = 100_000
READY_LIMIT_S = 3600.0


def golden_main(argv: Sequence[str]) -> int:
    """Run `harness golden`; return 0 when the file is written.

    Raises: UsageError for a wrong call; HarnessError when the engine does not start or gives no usable answer.
    """
    split = list(argv).index("--") if "--" in argv else len(argv)
    options = _parser().parse_args(argv[:split])
    options.engine_arguments = tuple(argv[split + 1 :])
    _check(options)
    made = from_running(options) if options.engine is None else from_cold_start(options)
    made.save(options.out)
    _say(made, options)
    return EXIT_HELD


def _say(made: Golden, options: argparse.Namespace) -> None:
    rows = len({token for prompt in made.prompts for token in prompt})
    known = {key: value for key, value in asdict(made).items() if key not in BULKY}
    if options.json:
        print_json(
            {"golden": str(options.out), "prompts": len(made.prompts), "passes": made.passes, "rows": rows, **known}
        )
        return
    price = max(sum(map(len, of_pass(made.prompts, turn))) for turn in range(made.passes))
    lines = [
        f'"{options.out}": what {made.weights_id} answers on {made.engine}, from {made.source}',
        f"{len(made.prompts)} prompts in {made.passes} passes of at most {price} tokens; they read {rows:,} of "
        f"{made.vocabulary_size or 0:,} rows of the embedding",
        f"noise: at most {made.noise_max:.3g} in {made.noise_checks} passes, so differences up to {made.tolerance:.3g} are right",
    ]
    for name, decoded in (("stream", made.streamed), ("long prompt", made.deep)):
        if decoded is not None:
            lines.append(
                f"{name}: {len(decoded.logprobs)} tokens after {len(decoded.prompt)}; noise at most {decoded.noise_max:.3g} in "
                f"{decoded.noise_checks} asks, tolerance {decoded.tolerance:.3g}"
            )
    if made.weights_id == UNKNOWN:
        lines.append(
            "nobody said which checkpoint this is (--checkpoint): the file proves that weights stay the same, not which"
        )
    if options.url is not None and options.vocabulary is None and options.checkpoint is None:
        lines.append(
            f"only token ids below {SAFE_VOCABULARY} are asked: --vocabulary or --checkpoint says how many there are"
        )
    for line in lines:
        print(printable(line))


def _check(options: argparse.Namespace) -> None:
    if (options.url is None) == (options.engine is None):
        raise UsageError("give either the URL of a running engine, or --engine for a cold start")
    if options.url is not None:
        require_address(options.url, insecure=options.insecure)
    elif options.checkpoint is None:
        raise UsageError("a cold start needs --checkpoint")
    if options.checkpoint is not None and not options.checkpoint.is_dir():
        raise UsageError(f'"{options.checkpoint}" is not a directory')
    if not options.out.absolute().parent.is_dir():
        raise UsageError(f'"{options.out.absolute().parent}" is not a directory: --out cannot be written')
    if not 2 <= options.prompts <= PROMPTS_MAX:
        raise UsageError(f"--prompts is {options.prompts}, expected 2 to {PROMPTS_MAX:,}")
    if options.vocabulary is not None and options.vocabulary < 32:
        raise UsageError(f"--vocabulary is {options.vocabulary}, expected at least 32")
    if options.deep_tokens is not None and options.deep_tokens < 17:
        raise UsageError(
            f"--deep-tokens is {options.deep_tokens}, expected more than a block of the KV cache (16 or more)"
        )
    for name in ("limit_s", "ready_limit_s"):
        if not 0 < getattr(options, name) < math.inf:
            raise UsageError(f"--{name.replace('_', '-')} is {getattr(options, name):g}, expected more than 0")


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="harness golden",
        description="Write down what an undamaged checkpoint answers, for `harness canary` to compare with: asked from a "
        "running engine (URL), or from one started for it (--engine). Answers are asked again and again, so that the file "
        "knows how far noise moves them.",
        epilog="After -- come the engine's own arguments: a cold start uses them, and the file names them. Exit codes: 0 "
        "written, 2 no usable answers, 3 wrong call.",
    )
    parser.add_argument("url", nargs="?", metavar="URL", help="where the engine is, for example http://127.0.0.1:8000")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the golden file to write")
    parser.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="what the engine serves: names it, and checks it"
    )
    parser.add_argument(
        "--prompts",
        type=int,
        default=PROMPT_COUNT,
        metavar="N",
        help="prompts to know, of which a pass asks two (default: %(default)s)",
    )
    parser.add_argument(
        "--vocabulary",
        type=int,
        metavar="N",
        help=f"how many token ids there are (default: by --checkpoint, else {SAFE_VOCABULARY})",
    )
    parser.add_argument("--seed", type=int, default=1, help="decides which prompts are asked (default: 1)")
    parser.add_argument("--deep", action="store_true", help="know a long prompt too, for `harness canary --deep`")
    parser.add_argument(
        "--deep-tokens", type=int, metavar="N", help=f"its length (default: {DEEP_TOKENS}, or what fits)"
    )
    parser.add_argument("--json", action="store_true", help="print what the file says, without the answers, as JSON")
    running = parser.add_argument_group("a running engine")
    running.add_argument("--model", metavar="NAME", help="the served model (default: the first that the engine lists)")
    running.add_argument(
        "--under-load", action="store_true", help="send other requests meanwhile; not where users are served"
    )
    running.add_argument("--hardware", default=UNKNOWN, metavar="TEXT", help="what it runs on, for the file")
    running.add_argument(
        "--api-key-env",
        default=API_KEY_VARIABLE,
        metavar="NAME",
        help="the environment variable that holds the API key (default: %(default)s)",
    )
    trust = running.add_mutually_exclusive_group()
    trust.add_argument(
        "--ca-file", type=Path, metavar="FILE", help="certificate authorities to trust instead of the system's"
    )
    trust.add_argument("--insecure", action="store_true", help="trust any certificate: whoever answers may be anybody")
    running.add_argument("--limit-s", type=float, default=60.0, help="how long each answer may take (default: 60)")
    cold = parser.add_argument_group("a cold start")
    cold.add_argument("--engine", choices=("container", "process", "reference"), help="which engine to start")
    cold.add_argument("--image", help="container image with vLLM (default: the CPU image built from docker/)")
    cold.add_argument("--vllm-version", help="vLLM release of the CPU image")
    cold.add_argument("--gpus", default="", help="GPUs for the container: ids, comma-separated, or all, or count=N")
    cold.add_argument("--python", type=Path, help="interpreter with vLLM, for the process engine")
    cold.add_argument("--dtype", default="auto", help="the --dtype of the engine (default: auto)")
    cold.add_argument("--max-model-len", type=int, default=512, help="context length (default: 512)")
    cold.add_argument("--memory-gib", type=float, default=8.0, help="memory limit of a container in GiB (default: 8)")
    cold.add_argument(
        "--ready-limit-s", type=float, default=READY_LIMIT_S, help="how long the start may take (default: 3600)"
    )
    return parser
