"""Is latency back in its old band? Within one scenario only; a verdict on "slower" needs paired blocks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median

from harness.clock import seconds_between
from harness.judge.verdict import Verdict
from harness.observe.history import Request, RequestResult

REQUESTS_PER_WINDOW_MIN = 3

Latency = Callable[[Request], float]  # in seconds


def from_planned_s(request: Request) -> float:
    """Return the latency that counts: what a stalled engine keeps waiting is in it."""
    return request.latency_s


def from_dispatch_s(request: Request) -> float:
    """Return the latency without the generator's own delay, in which no engine has a part."""
    taken_up_ns = request.planned_ns if request.dispatched_ns is None else request.dispatched_ns
    return seconds_between(taken_up_ns, request.ended_ns)


def band_finding(
    before: Sequence[Request], after: Sequence[Request], *, factor: float, windows: int
) -> tuple[Verdict, str, tuple[str, ...]]:
    """Compare the median latency of `windows` windows after recovery with the band of the windows before the fault.

    Latency is counted from the planned start; a failed request counts as infinitely slow. The band's upper end is the
    largest window median before the fault, times `factor`; it is held when more than half of the windows are inside.
    Where it would be another without the generator's own delay, that delay decides, and it is unknown.
    """
    before_medians = window_medians(before, windows)
    after_medians = window_medians(after, windows)
    if before_medians is None or after_medians is None:
        needed = windows * REQUESTS_PER_WINDOW_MIN
        text = f"too few requests to compare: {len(before)} before and {len(after)} after, {needed} needed for {windows} windows"
        return Verdict.UNKNOWN, text, ()
    limit_s = max(before_medians) * factor
    if not math.isfinite(limit_s):
        return Verdict.UNKNOWN, "most requests of a window before the fault failed, so there is no old band", ()
    inside = sum(value <= limit_s for value in after_medians)
    verdict = Verdict.HELD if inside * 2 > windows else Verdict.BROKEN
    shown = ", ".join(f"{value * 1000:.0f}" for value in after_medians)
    said = (
        f"{inside} of {windows} windows after recovery have a median latency of at most {limit_s * 1000:.0f} ms "
        f"(old band up to {max(before_medians) * 1000:.0f} ms, factor {factor:g}); seen: {shown} ms"
    )
    undelayed = [window_medians(part, windows, latency=from_dispatch_s) or [] for part in (before, after)]
    undelayed_inside = sum(value <= max(undelayed[0]) * factor for value in undelayed[1])
    if (undelayed_inside * 2 > windows) is not (verdict is Verdict.HELD):
        delayed = (
            f"without the generator's own delay it would be {undelayed_inside}: nobody knows how fast the engine was"
        )
        return Verdict.UNKNOWN, f"{said}; {delayed}", ()
    return verdict, said, ()


def window_medians(
    requests: Sequence[Request], windows: int, *, latency: Latency = from_planned_s
) -> list[float] | None:
    """Return the median latency in seconds of `windows` windows with equally many arrivals, or None when too few."""
    ordered = sorted((r for r in requests if not r.is_ours), key=lambda request: request.planned_ns)
    if len(ordered) < windows * REQUESTS_PER_WINDOW_MIN:
        return None
    edges = [round(index * len(ordered) / windows) for index in range(windows + 1)]
    slices = [ordered[start:end] for start, end in pairwise(edges)]
    return [median(latency(r) if r.result is RequestResult.OK else float("inf") for r in part) for part in slices]
