"""Give verdicts on two engines that are the same, live, and count those that are wrong; stops and goes on where it was.

    python benchmarks/verdict_live.py results/live.jsonl [--verdicts 60] [--on stub reference]
    python benchmarks/verdict_error_rates.py resample results/live.jsonl

Each verdict starts two servers of one kind and one load process; the load moves from one server to the other after each
block, in ABBA order, and the profile `nightly` looks at 4, 8 and 16 pairs as `harness compare` does. Blocks are short, so
that many verdicts fit into minutes: they scatter more than blocks of 20 s would. No gate voids anything here, which makes
it harder. Every verdict is a line of the file with the differences of all its pairs; a run that was stopped goes on with
the verdicts that are missing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import secrets
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from load_stub import running_stub
from verdict_error_rates import bounds

from harness.checkpoint.models import default_cache, tiny_llama
from harness.clock import NS_PER_S, now_ns, pause, poll_until, seconds_between
from harness.engine.engine import EngineSite
from harness.engine.launch import SERVED_MODEL_NAME, Launch
from harness.engine.reference.version import STEP_MS_VARIABLE
from harness.engine.reference_starter import ReferenceStarter
from harness.judge.paired import Slower, decide
from harness.judge.profiles import PROFILES
from harness.judge.records import Records
from harness.judge.windows import FUNCTIONALS, latencies
from harness.label import new_label
from harness.load.driver import LoadDriver
from harness.load.plan import make_plan
from harness.load.shape import constant
from harness.observe.history import Request

METRICS = ("ttft_ms_p50", "tpot_ms_p50")
RULE = PROFILES["nightly"]
KINDS = ("stub", "reference")
TOKENS = 8
WARM_S = 0.2
VOCABULARY = 256
Endpoints = tuple[str, str]


def main() -> None:
    """Run what is missing and print what all verdicts in the file say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--verdicts", type=int, default=60)
    parser.add_argument("--on", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--block-s", type=float, default=0.6)
    parser.add_argument("--rate-rps", type=float, default=25.0)
    options = parser.parse_args()
    options.file.parent.mkdir(parents=True, exist_ok=True)
    done = stored(options.file)
    for number in range(len(done), options.verdicts):
        kind = options.on[number % len(options.on)]
        line = verdict(kind, number, block_s=options.block_s, rate_rps=options.rate_rps)
        with options.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{number + 1:3} {kind:10}{line['answer']:13}{line['because']}", flush=True)
    report(stored(options.file))


def stored(file: Path) -> list[dict[str, Any]]:
    """Return the verdicts in a file; a last line cut by a stop is left out."""
    lines = file.read_text(encoding="utf-8").split("\n")[:-1] if file.is_file() else []
    return [json.loads(line) for line in lines]


def report(lines: Sequence[dict[str, Any]]) -> None:
    """Print how many verdicts said what, and the 95 % bound of the share of a wrong `yes`."""
    for kind in (*KINDS, ""):
        chosen = [line for line in lines if line["kind"] == kind or not kind]
        if chosen:
            counts = Counter(line["answer"] for line in chosen)
            said = ", ".join(f"{counts[answer]} {answer}" for answer in Slower if counts[answer])
            pairs = sum(line["pairs"] for line in chosen) / len(chosen)
            print(
                f"{kind or 'all':10}{len(chosen)} verdicts: {said}; {pairs:.1f} pairs on average; wrong yes at most "
                f"{bounds(counts[Slower.YES], len(chosen))[1]:.1%} (95 %)"
            )


def verdict(kind: str, number: int, *, block_s: float, rate_rps: float) -> dict[str, Any]:
    """Give one verdict on two servers that are the same; the second one is called new."""
    per_block = math.ceil(rate_rps * (WARM_S + block_s))
    length_s = per_block / rate_rps  # whole gaps, so that every block has its arrivals at the same places
    blocks = 2 * RULE.looks[-1]
    plan = make_plan(
        constant(rate_rps=rate_rps, canary_ratio=0.0, prompt_tokens=16, output_tokens=TOKENS),
        seed=number,
        horizon_s=(blocks + 1) * length_s,
        vocabulary_size=VOCABULARY,
        canary_prompts=(),
    )
    requests: list[Request] = []
    with ExitStack() as stack:
        endpoints, api_key = stack.enter_context(servers(kind))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        driver = LoadDriver(
            plan,
            directory=folder,
            api_key=api_key,
            model=SERVED_MODEL_NAME,
            on_request=requests.append,
            run_label="benchmark",
        )
        stack.callback(driver.close)
        start_ns = driver.start(endpoints[0], "old")
        values: list[dict[str, float]] = []
        differences: dict[str, list[float]] = {name: [] for name in METRICS}
        for block in range(blocks):
            begin_ns = start_ns + round(block * length_s * NS_PER_S)
            end_ns = begin_ns + round(length_s * NS_PER_S)
            pause(seconds_between(now_ns(), end_ns))
            if arm_of(block + 1) != arm_of(block):
                driver.admit(endpoints[arm_of(block + 1)], ("old", "new")[arm_of(block + 1)])
            warm_ns = begin_ns + round(WARM_S * NS_PER_S)
            planned = sum(warm_ns <= arrival.planned_ns(start_ns) < end_ns for arrival in plan.arrivals)
            values.append(measured(requests, warm_ns, end_ns, planned=planned))
            if block % 2 == 0:
                continue
            old, new = values[-2:] if arm_of(block) == 1 else values[:-3:-1]
            for name in METRICS:
                differences[name].append(math.log(new[name] / old[name]))
            if len(values) // 2 in RULE.looks:
                seen = decide(differences, RULE)
                if seen.answer in (Slower.YES, Slower.NO):
                    break
    return {
        "kind": kind,
        "answer": seen.answer,
        "because": seen.because,
        "pairs": seen.pairs,
        "block_s": block_s,
        "rate_rps": rate_rps,
        "differences": differences,
    }


def arm_of(block: int) -> int:
    """Return which server a block goes to: A B B A A B B A."""
    return (block + 1) // 2 % 2


def measured(requests: list[Request], begin_ns: int, end_ns: int, *, planned: int) -> dict[str, float]:
    """Wait until everything that was planned in a window has ended, and return its functionals; milliseconds."""

    def ended() -> Records | None:
        window = Records.of(r for r in list(requests) if begin_ns <= r.planned_ns < end_ns)
        return window.of_users() if len(window) >= planned else None

    seen = latencies(poll_until(ended, what="the answers of a block", limit_s=20.0))
    return {name: FUNCTIONALS[name](seen) for name in METRICS}


@contextmanager
def servers(kind: str) -> Iterator[tuple[Endpoints, str]]:
    """Run two servers of one kind; give their addresses and the key for both."""
    if kind == "stub":
        options = ("--first-s", "0.02", "--pace-s", "0.004")
        with running_stub(*options) as one, running_stub(*options) as other:
            yield (one.endpoint, other.endpoint), ""
        return
    api_key = secrets.token_urlsafe(12)
    place = Path(tempfile.mkdtemp(prefix="live-"))
    starter = ReferenceStarter()
    checkpoint = tiny_llama(seed=1).build(default_cache())
    # Without a pace of its own it computes several tokens at once, and the time per token is zero.
    pace = ((STEP_MS_VARIABLE, "1"),)
    launch = Launch(checkpoint_root=checkpoint.parent, checkpoint_name=checkpoint.name, environment=pace)
    try:
        starter.open(
            EngineSite(
                run_label=str(new_label()), log_directory=place / "logs", work_directory=place / "work", api_key=api_key
            )
        )
        engines = [starter.start(launch, incarnation=name) for name in ("old-1", "new-1")]
        for engine in engines:
            engine.wait_ready(60.0)
        yield (engines[0].endpoint, engines[1].endpoint), api_key
    finally:
        starter.close()
        shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
