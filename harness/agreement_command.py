"""`harness agreement`: what pre-flight foresees of every recorded start, beside what was recorded, as one page."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from harness.errors import EXIT_HELD, UsageError
from harness.guards.command import CommandParser
from harness.judge.agreement import Agreement, Compared, as_markdown, compare
from harness.judge.matrix import Release, load_releases
from harness.prediction import is_foreseeable, predict
from harness.report.pages import write_page
from harness.scenario import Scenario
from harness.suite import collect


def agreement_main(arguments: Sequence[str]) -> int:
    """Write the page and say how often predictions agree; return 0: a difference is for people to read."""
    parser = CommandParser(
        prog="harness agreement",
        description="Compare what pre-flight says about every fault with what recorded starts of releases did.",
    )
    parser.add_argument(
        "paths", type=Path, nargs="*", default=[Path("scenarios")], help="scenario files or directories"
    )
    parser.add_argument("--of", dest="of_engine", default="vllm-cpu", help="the engine's name (default: vllm-cpu)")
    parser.add_argument("--expectations", type=Path, default=Path("scenarios/expectations"), metavar="DIR")
    parser.add_argument("--out", type=Path, default=Path("docs/preflight-agreement.md"), metavar="FILE")
    options = parser.parse_args(list(arguments))
    releases = load_releases(options.expectations, options.of_engine)
    compared = compare_all(collect(options.paths), releases)
    write_page(options.out, as_markdown(compared, releases))
    counts = ", ".join(f"{sum(each.agreement is kind for each in compared)} {kind}" for kind in Agreement)
    print(f'harness: {len(compared)} predictions ({counts}) shown in "{options.out}"')
    return EXIT_HELD


def compare_all(scenarios: Sequence[Scenario], releases: Sequence[Release]) -> list[Compared]:
    """Predict every scenario of which starts are recorded, and compare; each damage is made once for all releases.

    Reloads, incidents and compile caches are left out: no file and no launch line is wrong.

    Raises: UsageError when none of the scenarios is recorded.
    """
    compared = []
    with tempfile.TemporaryDirectory(prefix="harness-agreement-") as scratch:
        for scenario in filter(is_foreseeable, scenarios):
            recorded = [release for release in releases if scenario.name in release.known]
            if not recorded:
                continue
            engines = {release.version: f"{release.name}=={release.version}" for release in recorded}
            predicted = predict(scenario, tuple(engines.values()), Path(scratch) / scenario.name)
            ids = tuple(fault.fault_id for fault in scenario.faults)
            for release in recorded:
                known = release.known[scenario.name]
                prediction = predicted[engines[release.version]]
                compared.append(compare(scenario.name, ids, release.version, prediction, known.layers, known.seen))
    if not compared:
        raise UsageError("no start of these scenarios is recorded; record some with: make matrix")
    return compared
