"""Measure the reference engine: time until ready, tokens per second alone and together, time of one canary.

    python benchmarks/reference_engine.py [--model DIR] [--starts N]

Prints medians with the smallest and largest value; asserts nothing. Figures depend on the machine and on what else runs.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from harness.checkpoint.models import directory, tiny_llama
from harness.engine.engine import Engine, EngineSite
from harness.engine.launch import SERVED_MODEL_NAME, Launch
from harness.engine.reference_starter import ReferenceStarter
from harness.guards.canary import complete, request_body
from harness.label import new_label

API_KEY = "benchmark"
NEW_TOKENS = 200
TOGETHER = 8
CANARIES = 50
READY_LIMIT_S = 120.0
ANSWER_LIMIT_S = 600.0


def main() -> None:
    """Start engines, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint; default: the tiny Llama")
    parser.add_argument("--starts", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        source = tiny_llama(1) if options.model is None else directory(options.model)
        checkpoint = source.build(place / "models")
        starter = ReferenceStarter()
        site = EngineSite(
            run_label=str(new_label()),
            log_directory=place / "logs",
            work_directory=place / "work",
            api_key=API_KEY,
            engine_cpus=(0,),
        )
        starter.open(site)
        print(starter.identity().build, "|", starter.identity().hardware, "|", checkpoint.name)
        launch = Launch(checkpoint_root=checkpoint.parent, checkpoint_name=checkpoint.name, max_model_len=256)
        ready_s: list[float] = []
        alone_per_s: list[float] = []
        together_per_s: list[float] = []
        canary_ms: list[float] = []
        try:
            for number in range(options.starts):
                engine = starter.start(launch, incarnation=f"benchmark-{number}")
                ready_s.append(engine.wait_ready(READY_LIMIT_S))
                generate(engine)
                alone_per_s.append(NEW_TOKENS / timed(generate, engine))
                together_per_s.append(TOGETHER * NEW_TOKENS / timed(generate_together, engine))
                canary_ms += [1000 * timed(ask_canary, engine) for _ in range(CANARIES)]
                engine.stop()
        finally:
            starter.close()
    show("ready", ready_s, "s")
    show("one request", alone_per_s, "tokens/s")
    show(f"{TOGETHER} requests at once", together_per_s, "tokens/s in all")
    show("canary of 2 prompts", canary_ms, "ms")


def timed(work: Callable[[Engine], None], engine: Engine) -> float:
    """Return the seconds that `work(engine)` takes."""
    began_s = time.perf_counter()
    work(engine)
    return time.perf_counter() - began_s


def generate(engine: Engine) -> None:
    """Ask for one answer."""
    body = {"model": SERVED_MODEL_NAME, "prompt": [5, 6, 7], "max_tokens": NEW_TOKENS, "ignore_eos": True}
    complete(engine.endpoint, body, api_key=API_KEY, limit_s=ANSWER_LIMIT_S)


def generate_together(engine: Engine) -> None:
    """Ask for several answers at once."""
    threads = [threading.Thread(target=generate, args=(engine,)) for _ in range(TOGETHER)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(ANSWER_LIMIT_S)


def ask_canary(engine: Engine) -> None:
    """Ask for the prompt logprobs of two prompts."""
    body = request_body(SERVED_MODEL_NAME, [list(range(10, 40)), list(range(100, 130))])
    complete(engine.endpoint, body, api_key=API_KEY, limit_s=ANSWER_LIMIT_S)


def show(what: str, values: Sequence[float], unit: str) -> None:
    """Print one figure."""
    middle, least, most = statistics.median(values), min(values), max(values)
    print(f"{what:22} {middle:10.2f} {unit} (from {least:.2f} to {most:.2f}, {len(values)} times)")


if __name__ == "__main__":
    main()
