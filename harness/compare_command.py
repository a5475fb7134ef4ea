"""`harness compare`, `harness verdict` and `harness baseline`: is the new side slower, by blocks measured now or stored."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import EXIT_BROKEN, EXIT_HELD, EXIT_UNKNOWN, UsageError
from harness.settings import EXPLAINED

if TYPE_CHECKING:
    from harness.judge.comparison import Comparison

BASELINES = Path("results/baselines")
PROFILE_NAMES = ("nightly", "release", "incident", "screen", "confirm")


def add_commands(commands: Any) -> None:
    """Add the three commands to the command line; what they need is imported when one of them runs."""
    compare = commands.add_parser("compare", help="say whether the new side is slower, by paired blocks of load")
    compare.add_argument(
        "--profile", choices=PROFILE_NAMES, default="nightly", help="margin and looks (default: nightly)"
    )
    compare.add_argument("--same", action="store_true", help="serve the old checkpoint on both sides")
    compare.add_argument(
        "--environment", action="append", default=[], metavar="NAME=VALUE", help="environment of both sides"
    )
    compare.add_argument("--new-arguments", default="", help="launch arguments of the new side alone, in shell quoting")
    compare.add_argument(
        "--new-environment", action="append", default=[], metavar="NAME=VALUE", help="environment of the new side alone"
    )
    compare.add_argument("--new-image", help="container image of the new side")
    compare.add_argument("--new-python", type=Path, help="interpreter with vLLM of the new side")
    compare.add_argument("--block-s", type=float, default=20.0, help="measured seconds of a block (default: 20)")
    compare.add_argument("--warm-s", type=float, default=5.0, help="seconds of load before them (default: 5)")
    compare.add_argument("--prompt-tokens", type=int, default=24)
    compare.add_argument("--output-tokens", type=int, default=16)
    starts = compare.add_mutually_exclusive_group()
    starts.add_argument(
        "--fresh",
        action="store_const",
        const=True,
        help="start engines anew in every pair, two of each side (default: release; others start each side once)",
    )
    starts.add_argument(
        "--one-start",
        dest="fresh",
        action="store_const",
        const=False,
        help="start each side once all the same: quicker, and as wrong as two starts differ; the answer says so",
    )
    compare.add_argument(
        "--blocks-per-start",
        type=int,
        default=None,
        help="blocks that each fresh start serves, one after the other (default: 1; release: 3)",
    )
    compare.add_argument(
        "--blocks-per-arm",
        type=int,
        default=None,
        help="blocks of each side in a pair (default: two fresh starts with all their blocks; one start: 1, release 2)",
    )
    compare.add_argument(
        "--no-canaries",
        action="store_true",
        help="do not check that each side answers rightly, before, in and after blocks",
    )
    compare.add_argument(
        "--null-every", type=int, default=4, metavar="PAIRS", help="pairs per pair of the negative control; 0: none"
    )
    compare.add_argument("--spare-pairs", type=int, default=4, help="void pairs that are repeated (default: 4)")
    compare.add_argument("--family", type=int, default=1, help="comparisons of a release that are judged together")
    compare.add_argument("--failure-budget", type=float, default=0.01, help="share of requests that may fail")
    compare.add_argument("--slo", default="", help="for goodput, such as ttft_ms=200,tpot_ms=40,e2e_ms=2000")
    compare.add_argument("--limit", action="append", default=[], metavar="GATE=NUMBER", help="another limit of a gate")
    compare.add_argument("--confirms", type=Path, metavar="RUN", help="the screening that this comparison confirms")
    compare.add_argument("--baselines", type=Path, default=BASELINES, metavar="DIR")
    for name, text in EXPLAINED.items():
        compare.add_argument(f"--{name}", default=None, help=text)
    compare.set_defaults(command=_compare)

    verdict = commands.add_parser("verdict", help="judge stored comparisons together, or the spikes of stored rollouts")
    verdict.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    verdict.set_defaults(command=_verdict)

    baseline = commands.add_parser("baseline", help="keep the blocks of a comparison, and hold later ones against them")
    actions = baseline.add_subparsers(required=True, metavar="ACTION")
    for name, act, text in (
        ("accept", _accept, "as the baseline of their engine, model, flags, hardware, driver and load"),
        ("compare", _against, "with the baseline of the same key; days apart, so it is no verdict"),
    ):
        action = actions.add_parser(name, help=text)
        action.add_argument("run", type=Path, metavar="RUN")
        action.add_argument("--arm", choices=("old", "new"), default="new" if name == "accept" else "old")
        action.add_argument("--into", type=Path, default=BASELINES, metavar="DIR")
        action.set_defaults(command=act)


def _compare(options: argparse.Namespace) -> int:
    import shlex

    from harness.compare import Options, compare
    from harness.judge.gates import GateLimits
    from harness.judge.slo import parse_slo
    from harness.settings import require_free, settings_from

    settings = settings_from(vars(options), os.environ)
    try:
        new_arguments = tuple(shlex.split(options.new_arguments))
        require_free(new_arguments)
    except ValueError as error:
        raise UsageError(f'new-arguments "{options.new_arguments}" cannot be read as a command line: {error}') from None
    asked = Options(
        profile=options.profile,
        same=options.same,
        environment=tuple(_named(text, "environment") for text in options.environment),
        new_arguments=new_arguments,
        new_environment=tuple(_named(text, "new-environment") for text in options.new_environment),
        new_image=options.new_image,
        new_python=options.new_python,
        block_s=options.block_s,
        warm_s=options.warm_s,
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        fresh=options.fresh,
        blocks_per_arm=options.blocks_per_arm,
        blocks_per_start=options.blocks_per_start,
        canaries=not options.no_canaries,
        null_every=options.null_every,
        spare_pairs=options.spare_pairs,
        family=options.family,
        failure_budget=options.failure_budget,
        slo=parse_slo(options.slo) if options.slo else None,
        limits=GateLimits().with_changes(dict(_number(text) for text in options.limit)),
        confirms=options.confirms,
        baselines=options.baselines,
    )
    run, comparison = compare(settings, asked, progress=_say)
    _show(comparison)
    print(f"comparison: {run}/report.html")
    return _exit_code([comparison])


def _verdict(options: argparse.Namespace) -> int:
    from harness.judge.blocks import is_comparison

    named: dict[Path, Path] = {}
    for run in options.runs:
        named.setdefault(run.resolve(), run)  # a link names no further run
    runs = [run for run in named.values() if is_comparison(run)]
    others = [run for run in named.values() if run not in runs]
    if runs and others:
        raise UsageError(f'"{others[0]}" is not a comparison: judge comparisons and rollouts apart')
    if others:
        return _spikes(others)
    return judge_comparisons(runs)


def judge_comparisons(runs: Sequence[Path]) -> int:
    """Judge stored comparisons together, show and keep each verdict, and return the exit code of all."""
    from harness.judge.blocks import load_blocks, load_declaration
    from harness.judge.comparison import judge_blocks
    from harness.judge.copies import copies_among
    from harness.judge.together import judge_together
    from harness.report.comparison import write_comparison
    from harness.report.printable import printable

    declared = [load_declaration(run) for run in runs]
    blocks = [load_blocks(run, each) for run, each in zip(runs, declared, strict=True)]
    copies = copies_among({str(run): measured for run, measured in zip(runs, blocks, strict=True)})
    for copy, other in copies.items():
        print(printable(f'"{copy}" has blocks of "{other}": it is a copy of it and counts no second time'))
    whole = [each for each in zip(runs, declared, blocks, strict=True) if str(each[0]) not in copies]
    together = judge_together([judge_blocks(*each[1:]) for each in whole])
    for (run, _, measured), comparison in zip(whole, together, strict=True):
        _show(comparison)
        write_comparison(run, comparison, measured)
    return _exit_code(together)


def _spikes(runs: Sequence[Path]) -> int:
    """Say for each scenario of stored runs whether the spike of its rollouts is beyond the budget."""
    from harness.judge.comparison import VERDICTS
    from harness.judge.spike import judge_spikes, rollout_spike
    from harness.judge.verdict import Verdict, exit_code_of
    from harness.report.printable import printable
    from harness.report.store import load_run

    peaks: dict[str, list[float]] = {}
    loaded = [load_run(run) for run in runs]
    for run in {run.name: run for run in loaded}.values():  # a copy is the same run
        for record in run.scenarios:
            seen = rollout_spike(record.history)
            void = [f for f in record.findings if f.claim == "load_valid()" and f.verdict is not Verdict.HELD]
            if seen is not None and void:
                peaks.setdefault(f"{record.name} [{record.mode}]", [])
                print(printable(f'"{run.name}/{record.directory.name}" counts for nothing: {void[0].because}'))
            elif seen is not None:
                peaks.setdefault(f"{record.name} [{record.mode}]", []).append(seen.peak_ratio)
    if not peaks:
        raise UsageError("no rollout with requests before and after its start is in these runs")
    verdicts = []
    for name, values in sorted(peaks.items()):
        judged = judge_spikes(values)
        print(printable(f"{name}: spike beyond the budget: {judged.answer}: {judged.because}"))
        verdicts.append(str(VERDICTS[judged.answer]))
    return exit_code_of(verdicts)


def _accept(options: argparse.Namespace) -> int:
    from harness.judge.baseline import accept, load

    place = accept(options.run, options.into, arm=options.arm)
    kept = load(place)
    print(
        f'harness: {len(kept.blocks)} blocks of "{kept.run}" are the baseline "{place}"; deciding: {", ".join(kept.gating())}'
    )
    return EXIT_HELD


def _against(options: argparse.Namespace) -> int:
    from harness.judge.baseline import changes, find
    from harness.judge.blocks import load_blocks, load_declaration

    declared = load_declaration(options.run)
    baseline = find(options.into, declared.arm(options.arm).key)
    blocks = [
        block
        for block in load_blocks(options.run, declared)
        if block.arm == options.arm and not block.is_null and not block.failed_gates
    ]
    if not blocks:
        raise UsageError(f'"{options.run}" has no valid block of arm "{options.arm}"')
    print(f'{declared.name}, arm {options.arm}, against "{baseline.run}" (other days, so no verdict)')
    for change in changes(baseline, blocks):
        print(f"  {change.metric:18}{change.baseline_ms:10.2f} ms{change.now_ms:10.2f} ms{change.ratio - 1:+9.1%}")
    return EXIT_HELD


def _show(comparison: Comparison) -> None:
    from harness.report.printable import printable

    declared = comparison.declaration
    print(printable(f"{declared.name} ({declared.profile}): slower: {comparison.answer}: {comparison.because}"))
    if comparison.pairs > 1:
        print(f"  {'metric':18}{'old':>10}{'new':>10}{'effect':>9}{'95 % interval':>20}{'pair sd':>9}{'finds':>8}")
    for name, found in comparison.reported.items():
        if not math.isfinite(found.effect):
            continue  # infinite in some block, or zero where several tokens come at once
        old, new = comparison.medians_ms[name]
        decides = "*" if name in declared.gating else " "
        interval = f"{found.low:+.1%} to {found.high:+.1%}"
        print(
            f" {decides}{name:18}{old:8.1f} ms{new:7.1f} ms{found.effect:+9.1%}{interval:>20}"
            f"{found.pair_sd:9.1%}{found.detectable:+8.1%}"
        )
    for name, found in comparison.null.items():
        seen = f"{found.effect:+.1%} ({found.pairs} pairs)" if found.pairs > 1 else "one pair, too few to say"
        print(f"  negative control {name}: {seen}")
    if comparison.power:
        print(printable(f"  {comparison.power}"))
    for note in comparison.notes:
        print(printable(f"  note: {note}"))


def _exit_code(comparisons: Sequence[Comparison]) -> int:
    from harness.judge.paired import Slower

    answers = {comparison.answer for comparison in comparisons}
    if Slower.YES in answers:
        return EXIT_BROKEN
    return EXIT_HELD if answers == {Slower.NO} else EXIT_UNKNOWN


def _named(text: str, option: str) -> tuple[str, str]:
    name, is_given, value = text.partition("=")
    if not is_given or not name:
        raise UsageError(f'{option} "{text}" is not NAME=VALUE')
    return name, value


def _number(text: str) -> tuple[str, float]:
    name, value = _named(text, "limit")
    try:
        return name, float(value)
    except ValueError:
        raise UsageError(f'limit of gate {name} must be a number, got "{value}"') from None


def _say(text: str) -> None:
    print(f"harness: {text}", flush=True)
