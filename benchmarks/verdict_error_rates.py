"""Measure how often the latency verdicts err, and how fast a million requests are judged from disk.

    python benchmarks/verdict_error_rates.py simulate [--verdicts 2000]   on a model of the noise
    python benchmarks/verdict_error_rates.py simulate --profile release --block-sd 0.015   with calmer blocks
    python benchmarks/verdict_error_rates.py simulate --profile release --starts fresh --blocks-per-arm 4 --blocks-per-start 2
    python benchmarks/verdict_error_rates.py resample RUN... [--verdicts 600]   on the blocks of stored A/A comparisons, or of a
                                                                             file of verdict_live.py
    python benchmarks/verdict_error_rates.py band [--histories 600]   latency_back_in_band where nothing changed
    python benchmarks/verdict_error_rates.py judge [--requests 1000000]   time and memory

The model: requests with a spread of 15 % (4 times the time per token's 4 %) that remember each other by 0.4, blocks that
scatter by 2 % with heavy tails (Student's t, 4 degrees of freedom), engine starts by 2 %, a drift of up to 3 % over the run.
It is a guess about machines; what a figure means on yours, `resample` says.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.signal import lfilter

from harness.compare import Options
from harness.judge.blocks import (
    KEY_FIELDS,
    Arm,
    Declaration,
    block_name,
    load_blocks,
    load_declaration,
)
from harness.judge.comparison import judge_run
from harness.judge.latency import band_finding
from harness.judge.paired import Slower, decide
from harness.judge.pairs import pairs_of
from harness.judge.profiles import PROFILES, Profile
from harness.judge.records import Records
from harness.judge.verdict import Verdict
from harness.observe.history import Request, RequestResult

REQUESTS = 300
TOKENS = 16
TTFT_MS, TPOT_MS = 100.0, 20.0
REQUEST_SD, MEMORY = 0.15, 0.4
METRICS = ("ttft_ms_p50", "tpot_ms_p50", "ttft_ms_p95", "e2e_ms_p95")
EFFECTS = (0.0, 0.05, 0.10, 0.30)
STARTS = {"same": "same server", "fresh": "fresh starts", "one": "one start a side"}
START_SD = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Standard deviations of logarithms."""

    block_sd: float = 0.02
    start_sd: float = START_SD
    drift: float = 0.03  # over the whole run, at most, either way


def main() -> None:
    """Run one of the measurements and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("simulate", "resample", "band", "judge", "judge-stored"))
    parser.add_argument("runs", type=Path, nargs="*")
    parser.add_argument("--verdicts", type=int, default=None)
    parser.add_argument("--histories", type=int, default=600)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--profile", action="append", choices=tuple(PROFILES), help="may be repeated (default: all)")
    parser.add_argument("--starts", action="append", choices=tuple(STARTS), help="may be repeated (default: all)")
    parser.add_argument("--blocks-per-arm", type=int, default=None, help="default: as harness compare has them")
    parser.add_argument("--blocks-per-start", type=int, default=None, help="with fresh starts; default as well")
    parser.add_argument("--effect", action="append", type=float, help="may be repeated (default: several)")
    parser.add_argument("--block-sd", type=float, default=Noise().block_sd)
    parser.add_argument("--start-sd", type=float, default=Noise().start_sd)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    random = np.random.default_rng(options.seed)
    if options.what == "simulate":
        noise = Noise(block_sd=options.block_sd, start_sd=options.start_sd)
        simulate(
            options.verdicts or 2000,
            random,
            profiles=options.profile or tuple(PROFILES),
            starts=options.starts or tuple(STARTS),
            noise=noise,
            blocks_per_arm=options.blocks_per_arm,
            blocks_per_start=options.blocks_per_start,
            effects=options.effect,
        )
    elif options.what == "resample":
        resample(options.runs, options.verdicts or 600, random)
    elif options.what == "band":
        band(options.histories, random)
    elif options.what == "judge":
        judge(options.requests, random)
    else:
        judge_stored(options.runs[0])


# --- a model of the noise ---


def simulate(
    verdicts: int,
    random: np.random.Generator,
    *,
    profiles: Sequence[str],
    starts: Sequence[str],
    noise: Noise,
    blocks_per_arm: int | None,
    blocks_per_start: int | None,
    effects: Sequence[float] | None,
) -> None:
    """Print the answers of each profile for several true effects; the margin of the profile is among them.

    The last line of a table has one metric at the margin and the other unchanged: there a wrong `no` is most probable.
    """
    for kind in starts:
        for name in profiles:
            profile, is_fresh = PROFILES[name], kind == "fresh"
            asked = Options(
                profile=name,
                fresh=is_fresh,
                blocks_per_arm=blocks_per_arm,
                blocks_per_start=blocks_per_start if is_fresh else None,
                confirms=Path() if name == "confirm" else None,
            )
            blocks, in_turn = asked.arm_blocks, asked.start_blocks
            d = np.array(
                [run_differences(profile.looks[-1], blocks, in_turn, kind, random, noise) for _ in range(verdicts)]
            )
            spread = ", ".join(f"{metric} {d[:, :, k].std():.1%}" for k, metric in enumerate(METRICS))
            served = f", {in_turn} in each start" if is_fresh else ""
            print(
                f"\n{name}, {STARTS[kind]}, {blocks} blocks of each side in a pair{served}; {verdicts} verdicts; "
                f"pair sd: {spread}"
            )
            head()
            for effect in effects or sorted({0.0, profile.effect, *EFFECTS, profile.margin}):
                line(profile, METRICS[:2], effect, d + math.log1p(effect))
            line(profile, METRICS, 0.0, d)
            one = d.copy()
            one[:, :, 0] += math.log1p(profile.margin)
            line(profile, METRICS[:2], profile.margin, one, mark=" (one metric)")


def run_differences(
    pairs: int, blocks: int, in_turn: int, starts: str, random: np.random.Generator, noise: Noise
) -> np.ndarray:
    """Return ln T(B) - ln T(A) of one A/A comparison, with so many blocks of each side in a pair; (pairs, metrics).

    A fresh start serves `in_turn` blocks, which share how far it is off.
    """
    count = 2 * pairs * blocks
    is_new = np.array([arm == "new" for arm, _ in order(pairs, blocks, in_turn)])
    level = random.standard_t(4, count) * noise.block_sd / math.sqrt(2)  # a t with 4 degrees has variance 2
    level += random.uniform(-noise.drift, noise.drift) * np.arange(count) / count
    if starts == "fresh":
        level += np.repeat(random.normal(0, noise.start_sd, count // in_turn), in_turn)
    elif starts == "one":
        level += np.where(is_new, random.normal(0, noise.start_sd), random.normal(0, noise.start_sd))
    steps = random.normal(0, REQUEST_SD * math.sqrt(1 - MEMORY**2), (count, REQUESTS))
    ttft_ms = TTFT_MS * np.exp(level[:, None] + lfilter([1], [1, -MEMORY], steps, axis=1))
    tpot_ms = TPOT_MS * np.exp(level[:, None] + random.normal(0, REQUEST_SD / 4, (count, REQUESTS)))
    e2e_ms = ttft_ms + (TOKENS - 1) * tpot_ms
    logs = np.log([ranked(ttft_ms, 0.5), ranked(tpot_ms, 0.5), ranked(ttft_ms, 0.95), ranked(e2e_ms, 0.95)]).T.reshape(
        pairs, 2 * blocks, len(METRICS)
    )
    signs = np.where(is_new, 1, -1).reshape(pairs, 2 * blocks, 1)
    return (signs * logs).sum(axis=1) / blocks


def ranked(values: np.ndarray, q: float) -> np.ndarray:
    """Return the quantile of each row, as `judge.windows.quantile` does."""
    rank = math.ceil(round(q * values.shape[1], 9)) - 1
    return np.partition(values, rank, axis=1)[:, rank]


def head() -> None:
    """Print the head of a table."""
    print(
        f"  {'profile':9}{'metrics':>8}{'effect':>8}{'yes':>9}{'no':>9}{'inconcl.':>10}{'pairs':>7}   95 % bound of yes"
    )


def line(profile: Profile, metrics: Sequence[str], effect: float, differences: np.ndarray, *, mark: str = "") -> None:
    """Print how many verdicts said what; `differences` has shape (verdicts, pairs, metrics)."""
    answers: Counter[Slower] = Counter()
    pairs = 0
    for d in differences:
        seen = decide({name: d[:, METRICS.index(name)].tolist() for name in metrics}, profile)
        answers[seen.answer] += 1
        pairs += seen.pairs
    n = len(differences)
    low, high = bounds(answers[Slower.YES], n)
    mark = mark or (" (margin)" if effect == profile.margin else "")
    shares = [answers[answer] / n for answer in (Slower.YES, Slower.NO, Slower.INCONCLUSIVE)]
    print(
        f"  {profile.name:9}{len(metrics):8}{effect:+8.0%}{shares[0]:9.4f}{shares[1]:9.4f}{shares[2]:10.4f}{pairs / n:7.1f}"
        f"   {low:.4f} to {high:.4f}{mark}",
        flush=True,
    )


def bounds(count: int, n: int) -> tuple[float, float]:
    """Return the one-sided 95 % bounds of a share, by Clopper and Pearson."""
    from scipy.stats import beta

    low = float(beta.ppf(0.05, count, n - count + 1)) if count else 0.0
    high = float(beta.ppf(0.95, count + 1, n - count)) if count < n else 1.0
    return low, high


# --- blocks that were really measured ---


def resample(runs: Sequence[Path], verdicts: int, random: np.random.Generator) -> None:
    """Draw comparisons from the pairs of stored A/A comparisons, as they are and with B scaled; no bound can be claimed.

    Where each side keeps one server, a drawn comparison is a stretch of neighbouring pairs that begins anywhere, which keeps
    what drifts and repeats. Where a profile starts engines anew, each of its pairs comes from as many servers as it starts,
    drawn anew, with as many neighbouring pairs of each as a start serves blocks.
    """
    servers = [rows for run in runs for rows in (stored_live(run) if run.is_file() else stored_pairs(run))]
    d = np.concatenate(servers) if servers else np.zeros((0, 2))
    if len(d) < 4:
        sys.exit(f"{len(d)} valid pairs in these runs: at least 4 are needed")
    spread = ", ".join(f"{name} {sd:.1%}" for name, sd in zip(METRICS, d.std(axis=0, ddof=1), strict=False))
    print(f"{len(d)} pairs; pair sd {spread}")
    print(
        f"{len(servers)} pairs of servers; they differ by {between(servers)} beyond what their pairs' own noise explains"
    )
    head()
    for name in ("nightly", "release", "incident"):
        profile = PROFILES[name]
        for is_fresh in (False, True) if profile.fresh else (False,):
            if is_fresh:
                drawn = np.array([of_fresh_starts(servers, profile, random) for _ in range(verdicts)])
            else:
                begins = random.integers(0, len(d), verdicts)
                drawn = np.array([d[(begin + np.arange(profile.looks[-1])) % len(d)] for begin in begins])
                drawn *= random.choice([-1, 1], (verdicts, 1, 1))  # which side of an A/A pair is called B means nothing
            for effect in sorted({*EFFECTS, profile.margin}):
                mark = (" (fresh starts)" if is_fresh else " (one start)") if profile.fresh else ""
                line(profile, METRICS[:2], effect, drawn + math.log1p(effect), mark=mark)


def of_fresh_starts(servers: Sequence[np.ndarray], profile: Profile, random: np.random.Generator) -> np.ndarray:
    """Return the differences of one comparison in which every pair has servers of its own; (pairs, metrics)."""
    pairs = []
    for _ in range(profile.looks[-1]):
        starts = []
        for pick in random.integers(0, len(servers), profile.starts_per_arm):
            rows = servers[pick]
            turn = (random.integers(0, len(rows)) + np.arange(profile.blocks_per_start)) % len(rows)
            starts.append(random.choice([-1, 1]) * rows[turn].mean(axis=0))
        pairs.append(np.mean(starts, axis=0))
    return np.array(pairs)


def between(servers: Sequence[np.ndarray]) -> str:
    """Return the standard deviation of the true differences of pairs of servers, by metric, in words."""
    several = [rows for rows in servers if len(rows) > 1]
    if len(several) < 2:
        return "an unknown amount"
    seen = np.mean([rows.mean(axis=0) ** 2 for rows in several], axis=0)  # A/A: their mean is zero
    noise = np.mean([rows.var(axis=0, ddof=1) / len(rows) for rows in several], axis=0)
    sds = np.sqrt(np.maximum(seen - noise, 0))
    return ", ".join(f"{name} {sd:.1%}" for name, sd in zip(METRICS, sds, strict=False))


def stored_pairs(run: Path) -> list[np.ndarray]:
    """Return the differences of the two medians of every valid pair of a comparison, those of its control included.

    One array of (pairs, metrics) for each pair of servers that was started.
    """
    declared = load_declaration(run)
    blocks = load_blocks(run, declared)
    kinds = [pairs_of(blocks, is_null=null, blocks_per_arm=declared.blocks_per_arm)[0] for null in (False, True)]
    rows = [np.array([[pair.difference(name) for name in METRICS[:2]] for pair in pairs]) for pairs in kinds if pairs]
    return [row[None] for kind in rows for row in kind] if declared.fresh else rows


def stored_live(file: Path) -> list[np.ndarray]:
    """Return the same of a file of live verdicts, each of which had a pair of servers of its own."""
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [np.array([line["differences"][name] for name in METRICS[:2]]).T for line in lines]


# --- the claim of scenarios ---


def band(histories: int, random: np.random.Generator) -> None:
    """Print how often latency_back_in_band calls an unchanged engine slower, for several factors, lengths and drifts."""
    print(f"{histories} histories each; requests before and after; share answered broken (95 % bound)")
    for drift in (0.0, 0.05, 0.15):
        for requests in (20, 60):
            for factor in (1.15, 1.3, 1.5):
                broken = 0
                for _ in range(histories):
                    before, after = histories_of(requests, drift, random)
                    verdict, _, _ = band_finding(before, after, factor=factor, windows=5)
                    broken += verdict is Verdict.BROKEN
                print(
                    f"  drift {drift:4.0%}  requests {requests:3}  factor {factor:4}  broken {broken / histories:.4f} "
                    f"(to {bounds(broken, histories)[1]:.4f})",
                    flush=True,
                )


def histories_of(requests: int, drift: float, random: np.random.Generator) -> tuple[list[Request], list[Request]]:
    """Return the requests before and after a rollout that changed nothing, on a machine that becomes slower by `drift`."""
    steps = random.normal(0, REQUEST_SD * math.sqrt(1 - MEMORY**2), 2 * requests)
    level = np.log1p(drift) * np.arange(2 * requests) / (2 * requests)
    level[requests:] += random.normal(0, START_SD)
    e2e_ms = (TTFT_MS + (TOKENS - 1) * TPOT_MS) * np.exp(level + lfilter([1], [1, -MEMORY], steps))
    made = [
        Request(
            id=f"load-{number}",
            kind="load",
            planned_ns=number * 10**8,
            sent_ns=number * 10**8,
            first_token_ns=None,
            ended_ns=number * 10**8 + round(float(ms) * 1e6),
            endpoint="",
            incarnation="old-1",
            result=RequestResult.OK,
        )
        for number, ms in enumerate(e2e_ms)
    ]
    return made[:requests], made[requests:]


# --- speed ---


def judge(requests: int, random: np.random.Generator) -> None:
    """Store a comparison with so many requests of 16 tokens, and judge it again in a process of its own."""
    pairs = PROFILES["nightly"].looks[-1]
    with tempfile.TemporaryDirectory() as place:
        run = Path(place)
        store(run, pairs, requests // (2 * pairs), random)
        size = sum(file.stat().st_size for file in run.rglob("*") if file.is_file())
        print(f"{requests:,} requests in {2 * pairs} blocks, {size / 2**20:,.0f} MiB on disk", flush=True)
        subprocess.run([sys.executable, __file__, "judge-stored", str(run)], check=True)


def judge_stored(run: Path) -> None:
    """Judge a stored comparison and print time and memory."""
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    seen = judge_run(run)
    took_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        f"judged ({seen.answer}) in {took_s:.2f} s ({cpu_s:.2f} s of processor time), at most {peak / 2**20:,.0f} MiB"
    )


def store(run: Path, pairs: int, requests: int, random: np.random.Generator) -> None:
    """Write the blocks of an A/A comparison with an effect on the margin, so that every look is judged."""
    key = {name: "benchmark" for name in KEY_FIELDS}
    declared = Declaration(
        name="benchmark",
        profile="nightly",
        gating=METRICS,
        arms=tuple(Arm(name=name, key=key) for name in ("old", "new")),
        schedule_sha256="same",
        fresh=True,
        started_at="",
    )
    (run / "comparison.json").write_text(json.dumps(declared.as_json()))
    for number, (arm, pair) in enumerate(order(pairs)):
        folder = run / "blocks" / block_name(number, arm)
        folder.mkdir(parents=True)
        factor = 1.05 if arm == "new" else 1.0
        block_records(requests, factor * math.exp(random.normal(0, Noise().block_sd)), random).save(
            folder / "records.npz"
        )
        (folder / "history.jsonl").write_text("")
        block = {"number": number, "arm": arm, "pair": pair, "is_null": False, "schedule_sha256": "same", "notes": []}
        report = {name: 0.0 for name in ("planned_events_per_s", "lag_ms_p99", "lag_ms_max", "loop_lag_ms_p99")}
        report |= {"achieved_ratio": 1.0, "cpu_ratio": 0.1, "cpu_ratio_max": 0.1, "loaders": 1}
        (folder / "block.json").write_text(json.dumps({**block, "window_ns": [0, 10**18], "report": report}))


def order(pairs: int, blocks: int = 1, in_turn: int = 1) -> Iterator[tuple[str, int]]:
    """Yield arm and pair of each block in the order of a comparison, with so many blocks of each side in a pair."""
    for pair in range(pairs):
        for turn in range(blocks // in_turn):
            for arm in ("old", "new") if (pair + turn) % 2 == 0 else ("new", "old"):
                yield from [(arm, pair)] * in_turn


def block_records(requests: int, factor: float, random: np.random.Generator) -> Records:
    """Return made-up records of answered requests."""
    planned = np.sort(random.integers(0, requests * 10**7, requests))
    first = planned + (1e6 * TTFT_MS * factor * np.exp(random.normal(0, REQUEST_SD, requests))).astype(np.int64)
    gaps = (1e6 * TPOT_MS * factor * np.exp(random.normal(0, REQUEST_SD, (requests, TOKENS - 1)))).astype(np.int64)
    tokens = first[:, None] + np.concatenate([np.zeros((requests, 1), np.int64), np.cumsum(gaps, axis=1)], axis=1)
    full = np.full(requests, TOKENS, np.int64)
    return Records(
        planned_ns=planned,
        dispatched_ns=planned,
        sent_ns=planned,
        first_token_ns=first,
        ended_ns=tokens[:, -1].copy(),
        output_tokens=full,
        is_canary=np.zeros(requests, np.bool_),
        result=np.zeros(requests, np.int64),
        token_counts=full,
        token_ns=tokens.ravel(),
    )


if __name__ == "__main__":
    main()
