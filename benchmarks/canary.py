"""How good the canary is: which damage it notices, and whether it ever accuses a good engine.

    python benchmarks/canary.py sensitivity tiny|smollm2 [--layers 0,15] [--python PYTHON] [--out FILE]
    python benchmarks/canary.py show FILE
    python benchmarks/canary.py accuse --passes 10000 [--engine reference|process] [--python PYTHON] [--rate-rps R]

`sensitivity` damages one tensor after the other with everything in the catalogue that strikes one tensor, and asks all
passes until one notices, with the functions of `harness canary`. Weights are loaded as vLLM loads them (what is too wide is
cut, what has another dtype is cast; what is absent is zero here and memory that nobody filled there), and our own forward
pass answers, in float32. With --python a real vLLM is started once and made to serve each damaged checkpoint by
`reload_weights`. Prints a Markdown table; `--out` keeps every case as a line of JSON,
of which `show` makes the table again.

`accuse` starts a good engine `--starts` times, measures a golden in the first, and asks passes while load arrives open-loop.
Exits 1 when a pass was accused.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

from canary_accuse import Tally, accuse
from canary_damages import Case, cases, kinds_of, layers_of, parts_of, renamed, split_shards
from canary_engine import Reloading, measured_golden, serving, starter_of
from canary_sensitivity import Ask, Bench, Excerpt, asking, examined, loaded_like_vllm
from canary_table import summary, table

from harness.checkpoint.manifest import read_checkpoint, weights_id
from harness.checkpoint.models import smollm2, tiny_llama
from harness.clock import Deadline, now_ns, seconds_between
from harness.engine.reference.model import Llama
from harness.guards.canary import Golden, GoldenPair, pass_count
from harness.observe.canary_prompts import FIRST_ORDINARY_TOKEN, canary_prompts
from harness.observe.noise import TOLERANCE_MIN

SEED = 1
TOKENS_MAX = 64
ROWS_STRUCK = 4  # of the vocabulary: so many that prompts read, and so many that they do not
MODELS: dict[str, Callable[[int], Path]] = {
    "tiny": lambda seed: tiny_llama(seed).build(),
    "smollm2": lambda seed: smollm2(seed=None if seed == 1 else seed).build(),
}


def main() -> int:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    sensitivity = commands.add_parser("sensitivity")
    sensitivity.add_argument("model", choices=MODELS)
    sensitivity.add_argument("--layers", metavar="N,N", help="default: the first, the middle and the last")
    sensitivity.add_argument("--python", type=Path, help="interpreter with vLLM; default: our own forward pass answers")
    sensitivity.add_argument("--out", type=Path, metavar="FILE", help="write every case as a line of JSON")
    sensitivity.add_argument("--limit-s", type=float, default=7200.0, help="stop after this time with what there is")
    show = commands.add_parser("show")
    show.add_argument("file", type=Path)
    show.add_argument(
        "--tolerance", type=float, default=TOLERANCE_MIN, help="it was judged with (default: %(default)g)"
    )
    good = commands.add_parser("accuse")
    good.add_argument("--passes", type=int, required=True)
    good.add_argument("--engine", choices=("reference", "process"), default="reference")
    good.add_argument("--python", type=Path, help="interpreter with vLLM, for the process engine")
    good.add_argument("--model", choices=MODELS, default="tiny")
    good.add_argument("--rate-rps", type=float, default=8.0, help="of the other requests (default: 8)")
    good.add_argument("--together", type=int, default=1, help="passes that are asked at a time (default: 1)")
    good.add_argument("--starts", type=int, default=1, help="engines to spread the passes over (default: 1)")
    good.add_argument("--limit-s", type=float, default=3600.0, help="stop after this time with what there is")
    options = parser.parse_args()
    if options.command == "accuse" and (options.engine == "process") != (options.python is not None):
        parser.error("--engine process and --python go together")
    if options.command == "show":
        lines = [json.loads(line) for line in options.file.read_text().splitlines()]
        print("\n".join([*table(lines), "", *summary(lines, options.tolerance)]))
        return 0
    return measure_accusations(options) if options.command == "accuse" else measure_sensitivity(options)


def measure_sensitivity(options: argparse.Namespace) -> int:
    """Damage one tensor after the other and ask; print the table."""
    source, previous = (MODELS[options.model](seed) for seed in (1, 2))
    layers = layers_of(source, options.layers)
    config = read_checkpoint(source).config
    vocabulary = int(config["vocab_size"])
    prompts = canary_prompts(vocabulary, seed=SEED)
    read = sorted({token for prompt in prompts for token in prompt})
    unread = sorted(set(range(FIRST_ORDINARY_TOKEN, vocabulary)).difference(read))
    draw = Random(SEED)
    deadline = Deadline.after(options.limit_s)
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        kinds = kinds_of(read_checkpoint(source), layers)
        alone = list(dict.fromkeys(name for name, (_, twin) in kinds.items() for name in (name, twin) if name))
        split, old = place / "new", place / "old"
        split_shards(source, split, alone)
        split_shards(previous, old, alone)
        whole = loaded_like_vllm(split, tokens_max=TOKENS_MAX)
        model = Llama(whole.shape, whole.tensors)
        serve: Callable[[Path], Ask] | None = None
        if options.python is None:
            golden = golden_of(asking(model)(prompts), prompts, split, vocabulary)
        else:
            reloading = stack.enter_context(Reloading(options.python, split, place))
            golden = measured_golden(reloading.served, split, vocabulary=vocabulary, seed=SEED)
            serve = reloading.asking
        bench = Bench(
            split=split,
            old=old,
            place=place,
            pair=GoldenPair(golden, golden),
            model=model,
            tensors=whole.tensors,
            serve=serve,
        )
        print(
            f"{options.model} on {golden.engine}: {len(prompts)} prompts in {pass_count(prompts)} passes hold {len(read):,} of "
            f"{vocabulary:,} tokens ({len(read) / vocabulary:.2%}); layers {', '.join(map(str, layers))} of "
            f"{config['num_hidden_layers']}; tolerance {golden.tolerance:g}",
            flush=True,
        )
        rows = {"read_rows": draw.sample(read, ROWS_STRUCK), "unread_rows": draw.sample(unread, ROWS_STRUCK)}
        lines: list[dict[str, Any]] = []
        out = stack.enter_context(options.out.open("w")) if options.out else None
        started_ns = now_ns()
        for part, its_layers, its_rows in parts_of(kinds, int(config["num_hidden_layers"])):
            excerpt = excerpt_of(source, previous, place, alone, layers=its_layers, rows=its_rows)
            small = cases(excerpt.split, renamed(part, excerpt.names), **rows)
            for case, same in zip(cases(split, part, **rows), small, strict=True):
                if deadline.is_expired() or (serve is not None and is_left_out(case)):
                    continue
                result = examined(case, same, excerpt, bench)
                if result is None:
                    continue
                lines.append(result.as_json())
                if out is not None:
                    print(json.dumps(lines[-1]), file=out, flush=True)
        took_s = seconds_between(started_ns, now_ns())
        if deadline.is_expired():
            print(f"stopped at the limit of {options.limit_s:g} s: not every damage was tried")
        if serve is not None:
            after = bench.pair.compare(serve(split)(prompts))
            print(f"after all reloads the undamaged weights answer {after.difference_old:.3g} from the golden")
    print("\n".join([*table(lines), "", *summary(lines, golden.tolerance), f"{took_s:.0f} s"]))
    return 0


def excerpt_of(
    source: Path, previous: Path, place: Path, alone: Sequence[str], *, layers: Sequence[int], rows: int | None
) -> Excerpt:
    """Write and load the excerpt of both checkpoints with these layers and rows, in place of the one before."""
    directory = place / "excerpt"
    shutil.rmtree(directory, ignore_errors=True)
    names = split_shards(source, directory / "new", alone, layers=layers, rows=rows)
    split_shards(previous, directory / "old", alone, layers=layers, rows=rows)
    loaded = loaded_like_vllm(directory / "new", tokens_max=TOKENS_MAX)
    return Excerpt(split=directory / "new", old=directory / "old", names=names, loaded=loaded)


def is_left_out(case: Case) -> bool:
    """Say whether a reload would not do what a start does: a tensor that is absent or too long keeps the values before."""
    return case.damage.name in ("drop_tensor", "widen_tensor")


def golden_of(
    rows: tuple[tuple[float, ...], ...], prompts: tuple[tuple[int, ...], ...], checkpoint: Path, vocabulary: int
) -> Golden:
    """Return what our own forward pass answers as a golden. It has no noise, so the smallest tolerance is taken."""
    return Golden(
        weights_id=weights_id(checkpoint),
        engine="our own forward pass",
        build="",
        hardware="",
        flags=(),
        prompts=prompts,
        prompt_logprobs=rows,
        noise_max=0.0,
        noise_checks=0,
        tolerance=TOLERANCE_MIN,
        vocabulary_size=vocabulary,
    )


def measure_accusations(options: argparse.Namespace) -> int:
    """Ask good engines again and again; print what came of it."""
    checkpoint = MODELS[options.model](1)
    vocabulary = int(read_checkpoint(checkpoint).config["vocab_size"])
    tally = Tally()
    deadline = Deadline.after(options.limit_s)
    golden: Golden | None = None
    with tempfile.TemporaryDirectory() as scratch, starter_of(options.python, Path(scratch)) as (starter, site):
        for start in range(options.starts):
            share = options.passes // options.starts + (start < options.passes % options.starts)
            with serving(starter, site, checkpoint, f"good-{start}") as served:
                if golden is None:
                    golden = measured_golden(served, checkpoint, vocabulary=vocabulary, seed=SEED)
                    print(
                        f"{options.model} on {served.label}; noise {golden.noise_max:.3g} in {golden.noise_checks} passes under "
                        f"load, tolerance {golden.tolerance:g}; {options.rate_rps:g} other requests/s",
                        flush=True,
                    )
                place = Path(scratch) / f"load-{start}"
                place.mkdir()
                accuse(
                    served,
                    golden,
                    tally,
                    passes=share,
                    together=options.together,
                    rate_rps=options.rate_rps,
                    deadline=deadline,
                    place=place,
                )
    print("\n".join(tally.lines()))
    return 1 if tally.accused else 0


if __name__ == "__main__":
    sys.exit(main())
