"""What stands around the panels of a timeline picture: labels of moments, names of windows, the time axis, the legend."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import escape

from harness.report.printable import printable
from harness.report.svg import CHARACTER_WIDTH, LEFT, RIGHT, WIDTH, Axis, css, round_up, swatch, text
from harness.report.timeline import Moment, Span, Timeline

LABEL_HEIGHT = 17.0


def moment_labels(moments: Sequence[Moment], axis: Axis) -> tuple[list[tuple[Moment, str, float, bool]], float]:
    """Place labels in rows so that none touches another and no line crosses one; return them and where the rows end.

    A label goes right of its line, one row above every label whose line it would stand in. One that would leave the
    picture, or reach the line of one that would, goes left of its line instead, above the others, by the mirrored rule.
    """
    placed: list[tuple[Moment, str, int, bool]] = []
    turned: list[tuple[Moment, str, float]] = []
    edge = WIDTH
    for moment in sorted(moments, key=lambda moment: -moment.at_s):
        x = axis.x(moment.at_s)
        label = printable(moment.label, limit=48) + ("" if moment.at_s < 0 else f", {moment.at_s:.1f} s")
        width = CHARACTER_WIDTH * len(label) + 12
        if x + width > edge and x > width:
            turned.append((moment, label, x - width))
            edge = x
            continue
        row = max((other_row + 1 for other, _, other_row, _ in placed if axis.x(other.at_s) < x + width), default=0)
        placed.append((moment, label, row, False))
    height = lowest = max((row + 1 for _, _, row, _ in placed), default=0)
    for moment, label, left in reversed(turned):
        row = max((r + 1 for other, _, r, is_left in placed if is_left and axis.x(other.at_s) > left), default=lowest)
        placed.append((moment, label, row, True))
        height = max(height, row + 1)
    bottom = LABEL_HEIGHT * height + 4.0
    return [(m, label, bottom - LABEL_HEIGHT * (row + 1) + 10.0, is_left) for m, label, row, is_left in placed], bottom


def moment_lines(labels: Sequence[tuple[Moment, str, float, bool]], axis: Axis, bottom: float) -> list[str]:
    """Draw a line down the picture for each moment, and its label beside it."""
    lines, words = [], []
    for moment, label, y, is_left in labels:
        x = axis.x(moment.at_s)
        kind = css(moment.kind)
        lines.append(f'<path class="m-{kind}" d="M{x:.1f} {y - 8:.1f}V{bottom:.1f}"/>')
        words.append(
            f'<text class="moment t-{kind}{" end" if is_left else ""}" x="{x + (-5 if is_left else 5):.1f}" y="{y:.1f}">'
            f"{escape(label)}<title>{text(moment.note or moment.label)}</title></text>"
        )
    return lines + words


def window_names(windows: Sequence[Span], axis: Axis, y: float) -> list[str]:
    """Draw a band per window, with its name where there is room."""
    parts = []
    for window in windows:
        left, right = axis.x(window.start_s), axis.x(window.end_s)
        parts.append(
            f'<rect class="wb-{css(window.kind)}" x="{left:.1f}" y="{y:.1f}" width="{right - left:.1f}" height="14"/>'
        )
        if right - left > CHARACTER_WIDTH * len(window.kind) + 6:
            parts.append(
                f'<text class="window mid" x="{(left + right) / 2:.1f}" y="{y + 10.5:.1f}">{window.kind}</text>'
            )
    return parts


def time_axis(axis: Axis, y: float) -> list[str]:
    """Draw the seconds since load began."""
    step = round_up(axis.end_s / 10)
    parts = [f'<path class="axis" d="M{LEFT} {y:.1f}H{RIGHT}"/>']
    for index in range(int(axis.end_s / step) + 1):
        x = axis.x(index * step)
        parts.append(f'<path class="axis" d="M{x:.1f} {y:.1f}v4"/>')
        parts.append(f'<text class="tick mid" x="{x:.1f}" y="{y + 16:.1f}">{index * step:g}</text>')
    parts.append(f'<text class="side" x="0" y="{y + 16:.1f}">seconds</text>')
    return parts


def lane_legend(timeline: Timeline) -> list[tuple[str, str]]:
    """Return the legend of windows and health, as class and words."""
    windows = {w.kind: f"window: {w.kind}" for w in timeline.windows}
    health = {span.kind for life in timeline.lives for span in life.health}
    named = {"healthy": "health 200", "unhealthy": "health not 200"}
    return [(f"wb-{css(kind)}", label) for kind, label in windows.items()] + [
        (f"h-{kind}", label) for kind, label in named.items() if kind in health
    ]


def legend_lines(entries: Sequence[tuple[str, str]], y: float) -> tuple[str, float]:
    """Draw the legend in as many lines as it needs; return where it ends."""
    parts: list[str] = []
    x = LEFT
    for name, label in entries:
        width = 22 + CHARACTER_WIDTH * len(label) + 10
        if x + width > WIDTH and x > LEFT:
            x, y = LEFT, y + 18.0
        parts.append(
            f'{swatch(name, x + 7, y - 3.5)}<text class="legend" x="{x + 19:.1f}" y="{y:.1f}">{text(label)}</text>'
        )
        x += width
    return "".join(parts), y + 12.0
