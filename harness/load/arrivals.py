"""When requests arrive: points of a random process, laid out along a rate that may change."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from random import Random

from harness.load.shape import LoadShape, Profile

SHARE_MIN = 1e-9  # of the nominal rate
BUSY_S = 5.0  # the planned rates are those of the busiest stretch of this length


def arrival_times(shape: LoadShape, random: Random, *, horizon_s: float, exactly: int | None = None) -> list[float]:
    """Return the times in seconds at which requests of a shape arrive before `horizon_s`, in order.

    The process makes points at a rate of one; where the rate's integral reaches a point, a request arrives. With
    `exactly`, the points are scaled so that so many arrive within the horizon: of a Poisson process those are the same
    as the ones that by chance has so many.
    Times are whole microseconds, so that the last bit of another platform's logarithm does not change them.
    """
    if shape.process == "trace":
        return [row.at_s for row in shape.trace if row.at_s < horizon_s]
    rate = Rate(shape.rate_rps, shape.profile)
    expected = rate.until(horizon_s)
    points = _points(shape, random)
    if exactly is None:
        times = []
        for point in points:
            if point >= expected:
                break
            times.append(round(rate.when(point), 6))
        return times
    wanted = list(islice(points, exactly + 1))
    scale = expected / wanted[-1]
    return [round(rate.when(point * scale), 6) for point in wanted[:-1]]


def even_times(rate_rps: float, horizon_s: float) -> list[float]:
    """Return evenly spaced times before `horizon_s`, beginning at zero."""
    if rate_rps <= 0:
        return []
    return [round(number / rate_rps, 6) for number in range(math.ceil(horizon_s * rate_rps))]


def busiest_per_s(arrivals: Iterable[tuple[float, int]]) -> tuple[float, float]:
    """Return the requests and the events (tokens) per second of the busiest five seconds of (seconds, tokens)."""
    requests, events = Counter[int](), Counter[int]()
    last_s = 0.0
    for at_s, tokens in arrivals:
        stretch = int(at_s // BUSY_S)
        requests[stretch] += 1
        events[stretch] += tokens
        last_s = max(last_s, at_s)
    stretch_s = min(BUSY_S, max(last_s, 1.0))
    return max(requests.values()) / stretch_s, max(events.values()) / stretch_s


def _points(shape: LoadShape, random: Random) -> Iterator[float]:
    if shape.process == "constant":
        point = -0.5  # the first comes half a gap after the start
        while True:
            point += 1.0
            yield point
    point, k = 0.0, shape.burstiness
    while True:
        point += random.gammavariate(k, 1 / k) if shape.process == "gamma" else random.expovariate(1.0)
        yield point


@dataclass(frozen=True, slots=True)
class _Piece:
    start_s: float
    end_s: float
    start_rps: float
    slope: float
    before: float  # arrivals expected before it


class Rate:
    """A rate that is linear between the points of a profile."""

    def __init__(self, rate_rps: float, profile: Profile) -> None:
        # A rate of almost nothing, once squared, is nothing: no time could be computed from it.
        shares = [(at_s, share if share >= SHARE_MIN else 0.0) for at_s, share in profile]
        points = [(at_s, rate_rps * share) for at_s, share in shares] or [(0.0, rate_rps)]
        points = [(0.0, points[0][1]), *points, (math.inf, points[-1][1])]
        self._pieces: list[_Piece] = []
        before = 0.0
        for (start_s, start_rps), (end_s, end_rps) in pairwise(points):
            if end_s > start_s:
                slope = 0.0 if math.isinf(end_s) else (end_rps - start_rps) / (end_s - start_s)
                self._pieces.append(_Piece(start_s, end_s, start_rps, slope, before))
                before += 0.0 if math.isinf(end_s) else (start_rps + end_rps) / 2 * (end_s - start_s)

    def until(self, at_s: float) -> float:
        """Return how many arrivals are expected before `at_s`."""
        piece = next(piece for piece in self._pieces if at_s < piece.end_s)
        passed_s = at_s - piece.start_s
        return piece.before + (piece.start_rps + piece.slope * passed_s / 2) * passed_s

    def when(self, expected: float) -> float:
        """Return the time before which so many arrivals are expected; the inverse of `until`."""
        piece = [piece for piece in self._pieces if piece.before <= expected][-1]
        rest = expected - piece.before
        root = math.sqrt(max(0.0, piece.start_rps**2 + 2 * piece.slope * rest))
        return piece.start_s if rest <= 0 else piece.start_s + 2 * rest / (piece.start_rps + root)
