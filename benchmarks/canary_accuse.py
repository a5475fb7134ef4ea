"""Ask a good engine under open-loop load pass after pass, and count how often it is accused or does not answer."""

from __future__ import annotations

import os
import random
import statistics
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from canary_engine import MAX_MODEL_LEN, Served

from harness.clock import Deadline
from harness.engine.launch import SERVED_MODEL_NAME
from harness.guards.canary import Answer, Golden, GoldenPair
from harness.guards.canary_command import API_KEY_VARIABLE, canary_main
from harness.guards.canary_pass import ask
from harness.load.driver import LoadDriver
from harness.load.plan import make_plan
from harness.load.shape import steady
from harness.observe.history import Request

OUTPUT_TOKENS = 16
PERIOD_S = 10.0  # how often a probe asks by default


@dataclass(slots=True)
class Tally:
    """What came of the passes so far."""

    accused: list[float] = field(default_factory=list)  # how far each accused answer was from the golden
    unanswered: Counter[str] = field(default_factory=Counter)
    took_s: list[float] = field(default_factory=list)  # of the passes that were answered
    largest: float = 0.0
    load: Counter[str] = field(default_factory=Counter)  # how the other requests ended
    lock: Lock = field(default_factory=Lock)

    def lines(self) -> list[str]:
        """Return it for people."""
        answered = len(self.took_s)
        lines = [
            f"{answered + sum(self.unanswered.values()):,} passes: {len(self.accused)} accused, "
            f"{sum(self.unanswered.values())} unanswered; largest difference {self.largest:.3g}"
        ]
        if answered and not self.accused:
            bound = 3 / answered
            lines.append(
                f"none in {answered:,}: at 95 % confidence fewer than {bound:.2g} of all passes are accusations (rule of three); "
                f"asked every {PERIOD_S:g} s that is fewer than one in {PERIOD_S / bound / 3600:.1f} hours"
            )
        if self.accused:
            lines.append(f"accusations: differences of {', '.join(f'{value:.3g}' for value in self.accused[:10])}")
        lines += [f"unanswered: {count} times {what}" for what, count in self.unanswered.most_common(5)]
        if answered > 1:
            cuts = statistics.quantiles(self.took_s, n=100)
            lines.append(
                f"a pass took {1000 * statistics.median(self.took_s):.1f} ms (median), {1000 * cuts[98]:.1f} ms (99th percentile)"
            )
        lines.append(f"other requests: {', '.join(f'{count:,} {how}' for how, count in self.load.most_common())}")
        return lines


def accuse(
    served: Served,
    golden: Golden,
    tally: Tally,
    *,
    passes: int,
    together: int,
    rate_rps: float,
    deadline: Deadline,
    place: Path,
) -> None:
    """Ask `passes` passes, `together` at a time, while other requests arrive at a fixed rate."""

    def on_request(request: Request) -> None:
        tally.load[request.result] += 1

    plan = make_plan(
        steady(rate_rps=rate_rps, canary_ratio=0.0, output_tokens=OUTPUT_TOKENS),
        seed=1,
        horizon_s=deadline.remaining_s() + 60.0,
        vocabulary_size=golden.vocabulary_size or MAX_MODEL_LEN,
        canary_prompts=golden.prompts,
    )
    driver = LoadDriver(
        plan,
        directory=place,
        api_key=served.api.api_key or "",
        model=SERVED_MODEL_NAME,
        on_request=on_request,
        run_label=served.run_label,
    )
    try:
        driver.start(served.engine.endpoint, served.engine.incarnation)
        with ThreadPoolExecutor(together) as pool:
            for _ in pool.map(lambda _: ask_one(served, golden, tally, deadline), range(passes)):
                pass
        print("the command, under this load:", flush=True)
        priced(served, golden, place)
        report = driver.stop()
    finally:
        driver.close()
    print(
        f"load: {report.achieved_ratio:.1%} of the arrivals were sent on time, {report.dropped} dropped, {report.late} late"
    )
    print("the command, on the idle engine:", flush=True)
    priced(served, golden, place)


def ask_one(served: Served, golden: Golden, tally: Tally, deadline: Deadline) -> None:
    """Ask one pass, drawn as the command draws it, and count what came of it; nothing once the time is up."""
    if deadline.is_expired():
        return
    rotation = random.randrange(golden.passes)
    try:
        asked = ask(served.api, SERVED_MODEL_NAME, golden.prompts, rotation=rotation)
    except (OSError, ValueError) as error:
        with tally.lock:
            tally.unanswered[f"{type(error).__name__}: {error}"] += 1
        return
    comparison = GoldenPair(golden, golden).compare(asked.rows, rotation)
    with tally.lock:
        tally.took_s.append(asked.took_s)
        tally.largest = max(tally.largest, comparison.difference_old)
        if comparison.answer is Answer.NEITHER:
            tally.accused.append(comparison.difference_old)


def priced(served: Served, golden: Golden, place: Path) -> None:
    """Run `harness canary` itself, which prints what it costs."""
    golden.save(place / "golden.json")
    os.environ[API_KEY_VARIABLE] = served.api.api_key or ""
    canary_main([served.engine.endpoint, "--golden", str(place / "golden.json")])
