"""`harness canary`: ask a running engine once and say which checkpoint answered."""

from __future__ import annotations

import http.client
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from harness.errors import EXIT_BROKEN, EXIT_HELD, EXIT_UNKNOWN, HarnessError, UsageError
from harness.guards.canary import Answer, Golden, GoldenPair, complete, prompt_logprobs_of, request_body
from harness.guards.command import CommandParser, print_json
from harness.guards.finding import printable

API_KEY_VARIABLE = "VLLM_API_KEY"
NAMES = {Answer.OLD: "golden", Answer.NEW: "golden_new", Answer.NEITHER: "neither", Answer.AMBIGUOUS: "ambiguous"}
SENTENCES = {
    Answer.OLD: "the golden's checkpoint answered",
    Answer.NEW: "the other checkpoint answered",
    Answer.NEITHER: "neither known checkpoint answered: corrupt or mixed weights, or another engine build",
    Answer.AMBIGUOUS: "the answer fits both checkpoints: these prompts cannot tell them apart",
}


def canary_main(argv: Sequence[str]) -> int:
    """Run `harness canary`; return 0 for the golden's answer, 1 for another, 2 for none that can be used.

    Raises: UsageError for an address or a golden file that cannot be used.
    """
    options = _parser().parse_args(argv)
    _require_address(options.url)
    if options.limit_s <= 0:
        raise UsageError(f"--limit-s is {options.limit_s:g}, expected more than 0")
    pair = _pair(options.golden, options.golden_new)
    api_key = os.environ.get(options.api_key_env)
    prompts = pair.old.prompts
    try:
        model = options.model or _served_model(options.url, api_key, options.limit_s)
        body = request_body(model, prompts)
        rows = prompt_logprobs_of(complete(options.url, body, api_key=api_key, limit_s=options.limit_s), prompts)
    except (OSError, ValueError) as error:
        said = (
            f"no usable answer from {options.url} (limit {options.limit_s:g} s): {str(error) or type(error).__name__}"
        )
        if options.json:
            print_json({"answer": None, "because": said})
        print(printable(f"harness canary: {said}"), file=sys.stderr)
        return EXIT_UNKNOWN
    seen = pair.compare(rows)
    alone = options.golden_new is None
    answer = seen.answer
    if alone:  # compared with one golden, an answer is its or is not
        answer = Answer.NEITHER if answer is Answer.NEITHER else Answer.OLD
    known = [("golden", pair.old, seen.difference_old)]
    if not alone:
        known.append(("golden_new", pair.new, seen.difference_new))
    if options.json:
        document: dict[str, Any] = {
            "answer": NAMES[answer],
            "tolerance": pair.tolerance,
        }
        for name, golden, difference in known:
            # JSON has no infinity: null is a difference beyond measure
            shown = difference if math.isfinite(difference) else None
            document[name] = {"weights_id": golden.weights_id, "engine": golden.engine, "difference": shown}
        print_json(document)
    else:
        sentence = "another checkpoint answered, or another engine build"
        if answer is not Answer.NEITHER or not alone:
            sentence = SENTENCES[answer]
        far = ", ".join(f"{difference:.3g} from {golden.weights_id}" for _, golden, difference in known)
        print(printable(f"{sentence}; largest difference in prompt logprobs: {far} (tolerance {pair.tolerance:g})"))
    return EXIT_HELD if answer is Answer.OLD else EXIT_BROKEN


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="harness canary",
        description="Send one request whose right answer is known and say which checkpoint answered.",
        epilog="Exit codes: 0 the golden's checkpoint, 1 another, 2 no usable answer, 3 wrong call.",
    )
    parser.add_argument("url", metavar="URL", help="where the engine is, for example http://127.0.0.1:8000")
    parser.add_argument("--golden", type=Path, required=True, metavar="FILE", help="the answers expected here")
    parser.add_argument("--golden-new", type=Path, metavar="FILE", help="the other checkpoint's, to recognise it too")
    parser.add_argument(
        "--api-key-env",
        default=API_KEY_VARIABLE,
        metavar="NAME",
        help=f"the environment variable that holds the API key (default: {API_KEY_VARIABLE})",
    )
    parser.add_argument("--model", metavar="NAME", help="the served model (default: the first that the engine lists)")
    parser.add_argument("--limit-s", type=float, default=30.0, help="how long each answer may take (default: 30)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def _require_address(url: str) -> None:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise UsageError(f'"{url}" is no address, expected for example http://127.0.0.1:8000')


def _pair(golden: Path, other: Path | None) -> GoldenPair:
    try:
        known = Golden.load(golden)
        return GoldenPair(known, known if other is None else Golden.load(other))
    except HarnessError as error:
        raise UsageError(str(error)) from error


def _served_model(endpoint: str, api_key: str | None, limit_s: float) -> str:
    """Return the first model that the engine lists.

    Raises: OSError for transport faults, ValueError when the answer is not a list of models.
    """
    parts = urlsplit(endpoint)
    connection_type = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = connection_type(parts.hostname or "", parts.port, timeout=limit_s)
    try:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        connection.request("GET", f"{parts.path.rstrip('/')}/v1/models", headers=headers)
        response = connection.getresponse()
        text = response.read(1024 * 1024).decode("utf-8", "replace")
    except http.client.HTTPException as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
    finally:
        connection.close()
    if response.status != 200:
        raise ValueError(f"HTTP {response.status}: {text[:300]}")
    try:
        return str(json.loads(text)["data"][0]["id"])
    except (KeyError, IndexError, TypeError, ValueError):
        raise ValueError(f"/v1/models lists no model: {text[:300]}") from None
