"""Axes, marks and safe words for pictures in SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import escape

from harness.report.printable import printable

WIDTH = 1080.0
LEFT, RIGHT = 128.0, 1056.0
CHARACTER_WIDTH = 6.3  # at 11 px, a little wide so that labels never touch
ANSWERS = ("old", "new", "neither", "ambiguous")
HEALTH_HEIGHTS = {"healthy": 1.5, "unhealthy": 5.0}
_BIN_WIDTHS_S = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)


@dataclass(frozen=True, slots=True)
class Axis:
    """The time axis: seconds to units of the picture; what lies outside sticks to the edge."""

    end_s: float

    def x(self, at_s: float) -> float:
        """Return where a time lies."""
        return LEFT + (RIGHT - LEFT) * min(1.0, max(0.0, at_s / self.end_s))


def glyph(shape: str, x: float, y: float) -> str:
    """Return the path of a mark: answers and results differ in shape, not only in colour."""
    return {
        "old": f"M{x - 3.5:.1f} {y - 3.5:.1f}h7v7h-7z",
        "new": f"M{x:.1f} {y - 4.5:.1f}l4.5 8h-9z",
        "neither": f"M{x:.1f} {y - 5.5:.1f}l5.5 5.5l-5.5 5.5l-5.5 -5.5z",
        "cross": f"M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8",
        "tick": f"M{x - 4:.1f} {y:.1f}l3 3.5l5.5 -7",
    }.get(shape, f"M{x - 4:.1f} {y:.1f}a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z")


def swatch(name: str, x: float, y: float) -> str:
    """Draw what a legend entry stands for, in the middle of (x, y); `name` is the class of the thing."""
    if name == "dot":
        return f'<path class="dot" d="M{x:.1f} {y:.1f}h0"/>'
    if name == "median":
        return f'<path class="median" d="M{x - 8:.1f} {y:.1f}h16"/>'
    if name.startswith("a-") or name == "failed":
        return f'<path class="{name}" d="{glyph("cross" if name == "failed" else name[2:], x, y)}"/>'
    height = HEALTH_HEIGHTS.get(name.removeprefix("h-"), 9)
    return f'<rect class="{name} swatch" x="{x - 7:.1f}" y="{y - height / 2:.1f}" width="14" height="{height}"/>'


def frame(y: float, height: float) -> str:
    """Draw the outline of a panel."""
    return f'<rect class="frame" x="{LEFT}" y="{y:.1f}" width="{RIGHT - LEFT}" height="{height}"/>'


def bin_width_s(end_s: float, arrivals: int) -> float:
    """Return a width that gives at most a hundred bins, and about four arrivals in each: an empty bin looks like an outage."""
    least_s = max(end_s / 100, 4 * end_s / max(arrivals, 1))
    return next((width for width in _BIN_WIDTHS_S if width >= min(least_s, end_s)), end_s / 100)


def round_up(value: float) -> float:
    """Return the next of 1, 2, 5, 10, 20, 50 and so on."""
    power = 10.0 ** math.floor(math.log10(value))
    return next((power * factor for factor in (1, 2, 5) if power * factor >= value * (1 - 1e-9)), power * 10)


def decades(latencies_s: Sequence[float]) -> tuple[float, float]:
    """Return the ends of a log axis that holds all values with room, at least one decade long."""
    if not latencies_s:
        return 0.01, 1.0
    low = 10.0 ** (math.floor(math.log10(min(latencies_s) * 0.9) * 2) / 2)
    high = 10.0 ** (math.ceil(math.log10(max(latencies_s) * 1.1) * 2) / 2)
    return low, max(high, low * 10)


def log_ticks(low: float, high: float) -> list[float]:
    """Return the values to write at a log axis: fewer per decade the longer it is."""
    factors = (1,) if high / low > 2_000 else (1, 3) if high / low > 40 else (1, 2, 5)
    ticks = (
        10.0**power * f
        for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for f in factors
    )
    return [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]


def duration(seconds: float) -> str:
    """Write a time in the unit that people would use."""
    return f"{seconds * 1000:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def css(name: str) -> str:
    """Return `name` as a class or id that cannot break out of an attribute."""
    return "".join(character if character.isascii() and character.isalnum() else "-" for character in name.lower())[:80]


def text(text: object, limit: int = 300) -> str:
    """Return an untrusted word as it may stand between tags."""
    return str(escape(printable(text, limit=limit)))
