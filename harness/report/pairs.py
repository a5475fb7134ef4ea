"""Draw the pairs of a comparison, one metric a picture: each pair's effect, the margin, and what follows from all pairs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

from harness.judge.paired import Evidence
from harness.report.svg import LEFT, RIGHT, WIDTH, css, glyph, round_up, text

HEIGHT, TOP, BOTTOM = 230.0, 16.0, 196.0
PLOT_RIGHT = RIGHT - 92.0  # what follows from all pairs stands to the right of them
DRAWN_MAX = 200


def pairs_svg(metric: str, differences: Sequence[float], seen: Evidence, *, margin: float) -> Markup:
    """Return one metric's pairs as an `<svg>` element; a pair without a finite difference is a cross at the top.

    `differences` are ln T(B) - ln T(A) in the order in which they were measured; at most 200 are drawn.
    """
    effects = [math.expm1(d) if math.isfinite(d) else math.nan for d in differences[:DRAWN_MAX]]
    finite = [effect for effect in effects if math.isfinite(effect)]
    bounds = [bound for bound in (seen.low, seen.high) if math.isfinite(bound) and seen.method != "none"]
    reach = round_up(1.1 * max((abs(value) for value in (*finite, *bounds, margin)), default=margin))
    floor = -reach if min((*finite, *bounds), default=0.0) < -reach / 4 else -reach / 4
    step = reach / 2

    def y(effect: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * min(1.0, max(0.0, (effect - floor) / (reach - floor)))

    def x(number: int) -> float:
        return LEFT + (PLOT_RIGHT - LEFT) * (number + 0.5) / max(len(effects), 1)

    parts = [f'<rect class="frame" x="{LEFT}" y="{TOP}" width="{PLOT_RIGHT - LEFT:.1f}" height="{BOTTOM - TOP}"/>']
    for tick in range(-2 if floor == -reach else 0, 3):
        at = y(tick * step)
        parts.append(f'<path class="{"grid" if tick else "axis"}" d="M{LEFT} {at:.1f}H{PLOT_RIGHT:.1f}"/>')
        label = f"{100 * tick * step:+.3g} %" if tick else "0"
        parts.append(f'<text class="tick end" x="{LEFT - 6}" y="{at + 3.5:.1f}">{label}</text>')
    parts.append(f'<path class="m-fault" d="M{LEFT} {y(margin):.1f}H{RIGHT}"/>')
    parts.append(f'<text class="moment t-fault" x="{LEFT + 6}" y="{y(margin) - 4:.1f}">margin {margin:+.0%}</text>')
    dots = "".join(f"M{x(n):.1f} {y(effect):.1f}h0" for n, effect in enumerate(effects) if math.isfinite(effect))
    parts.append(f'<path class="dot" d="{dots}"/>' if dots else "")
    lost = "".join(glyph("cross", x(n), TOP + 8) for n, effect in enumerate(effects) if not math.isfinite(effect))
    parts.append(f'<path class="failed" d="{lost}"/>' if lost else "")
    if len(bounds) == 2 and math.isfinite(seen.effect):
        middle = (PLOT_RIGHT + RIGHT) / 2
        parts.append(
            f'<rect class="wb-before" x="{middle - 7:.1f}" y="{y(seen.high):.1f}" width="14" '
            f'height="{max(y(seen.low) - y(seen.high), 1):.1f}"/>'
        )
        parts.append(f'<path class="median" d="M{middle - 12:.1f} {y(seen.effect):.1f}h24"/>')
        parts.append(
            f'<text class="tick mid" x="{middle:.1f}" y="{BOTTOM + 15}">{text(f"{seen.effect:+.1%}")}</text>'
            f'<text class="tick mid" x="{middle:.1f}" y="{TOP - 5}">95 % interval</text>'
        )
    for number in range(0, len(effects), max(1, len(effects) // 12)):
        parts.append(f'<text class="tick mid" x="{x(number):.1f}" y="{BOTTOM + 15}">{number + 1}</text>')
    parts.append(f'<text class="side" x="0" y="{TOP + 12}">{text(metric, limit=18)}</text>')
    parts.append(f'<text class="tick" x="0" y="{TOP + 27}">new against old</text>')
    parts.append(f'<text class="side" x="0" y="{BOTTOM + 15}">pair</text>')
    key = css(metric)
    return Markup(  # noqa: S704 - every word in it went through text or css
        f'<svg class="timeline" viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" role="img" aria-labelledby="t-{key} d-{key}" '
        f'xmlns="http://www.w3.org/2000/svg"><title id="t-{key}">{text(f"Pairs by {metric}")}</title>'
        f'<desc id="d-{key}">{text(describe(metric, effects, seen, margin=margin))}</desc>{"".join(parts)}</svg>'
    )


def describe(metric: str, effects: Sequence[float], seen: Evidence, *, margin: float) -> str:
    """Say in words what the picture shows, for people who cannot see it."""
    above = sum(effect > margin for effect in effects)
    lost = sum(not math.isfinite(effect) for effect in effects)
    whole = (
        ""
        if not math.isfinite(seen.effect)
        else f" All together: {seen.effect:+.1%}, {seen.low:+.1%} to {seen.high:+.1%}."
    )
    return (
        f"{len(effects)} pairs by {metric}: in {above} the new side is slower by more than the margin of {margin:.0%}"
        + (f", {lost} have no finite value" if lost else "")
        + f".{whole}"
    )
