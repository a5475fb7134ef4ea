"""Draw the timeline of one scenario as inline SVG: no script, no font and no other file is needed to see it.

Colours are CSS variables of the page, so that the picture follows light and dark; every colour also has a shape or a word.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

from harness.observe.history import OURS, Request, RequestResult
from harness.report.lanes import answer_lanes, life_lanes, step_lanes
from harness.report.printable import printable
from harness.report.svg import (
    ANSWERS,
    CHARACTER_WIDTH,
    LEFT,
    RIGHT,
    WIDTH,
    Axis,
    bin_width_s,
    css,
    decades,
    duration,
    frame,
    glyph,
    log_ticks,
    round_up,
    swatch,
    text,
)
from harness.report.timeline import Moment, Span, Timeline, read_timeline

if TYPE_CHECKING:
    from harness.report.store import ScenarioRecord

LATENCY_HEIGHT, FAILED_HEIGHT, ANSWERED_HEIGHT, ERRORS_HEIGHT = 190.0, 22.0, 34.0, 46.0
LABEL_HEIGHT = 17.0
DOTS_MAX = 2_000
_FINE_DOTS_FROM = 800  # more dots than this are drawn smaller

ERROR_CLASSES: dict[RequestResult, str] = {
    RequestResult.NO_ENDPOINT: "no server",
    RequestResult.DNS: "no server",
    RequestResult.UNREACHABLE: "no server",
    RequestResult.REFUSED: "no server",
    RequestResult.CONNECT_TIMEOUT: "no server",
    RequestResult.RESET: "connection cut",
    RequestResult.CLOSED: "connection cut",
    RequestResult.RESET_MID_STREAM: "connection cut",
    RequestResult.TRUNCATED_FRAMING: "connection cut",
    RequestResult.TRUNCATED_PROTOCOL: "connection cut",
    RequestResult.TRUNCATED: "connection cut",
    RequestResult.HTTP_4XX: "HTTP 4xx",
    RequestResult.HTTP_5XX: "HTTP 5xx",
    RequestResult.FIRST_TOKEN_TIMEOUT: "too late",
    RequestResult.HEADERS_THEN_SILENCE: "too late",
    RequestResult.STALL: "too late",
    RequestResult.DEADLINE: "too late",
    RequestResult.INBAND_ERROR: "bad answer",
    RequestResult.ABORTED: "bad answer",
    RequestResult.MALFORMED: "bad answer",
    RequestResult.WRONG_MODEL: "bad answer",
    RequestResult.WRONG_CONTENT: "bad answer",
    RequestResult.MIXED_VERSION: "bad answer",
    RequestResult.DROPPED: "harness",
    RequestResult.LATE: "harness",
    RequestResult.HARNESS_BUG: "harness",
}
_ERROR_ORDER = tuple(dict.fromkeys(ERROR_CLASSES.values()))


@dataclass(frozen=True, slots=True)
class _Dot:
    x: float
    latency_s: float


def timeline_svg(record: ScenarioRecord, *, dots_max: int = DOTS_MAX) -> Markup:
    """Return the picture of one scenario as an `<svg>` element.

    At most `dots_max` answered requests are drawn, the slowest of each column among them; the legend says how many were
    left out. Failed requests and canaries are thinned likewise.
    """
    timeline = read_timeline(record.history)
    axis = Axis(timeline.end_s)
    requests = record.history.requests
    parts: list[str] = []
    labels, y = _moment_labels(timeline.moments, axis)
    top = y
    parts += _window_names(timeline.windows, axis, y)
    y += 18.0
    panel, y, legend = _latency_panel(requests, timeline, axis, y, dots_max)
    parts += panel
    panel, y = _answered_panel(requests, timeline, axis, y + 14.0)
    parts += panel
    panel, y, errors = _errors_panel(requests, timeline, axis, y + 14.0)
    parts += panel
    legend += errors
    for draw in (answer_lanes(requests, timeline, axis), *life_lanes(timeline, axis), *step_lanes(timeline, axis)):
        if draw is not None:
            y += 6.0
            parts.append(f'<g transform="translate(0 {y:.1f})">{draw[0]}</g>')
            y += draw[1]
    bottom = y + 4.0
    parts += _time_axis(axis, bottom)
    shades = [
        f'<rect class="w-{css(w.kind)}" x="{axis.x(w.start_s):.1f}" y="{top:.1f}" '
        f'width="{axis.x(w.end_s) - axis.x(w.start_s):.1f}" height="{bottom - top:.1f}"/>'
        for w in timeline.windows
    ]
    parts = [*shades, *parts, *_moment_lines(labels, axis, bottom)]
    swatches, height = _legend([*_lane_legend(timeline), *legend], bottom + 36.0)
    key = f"{css(record.name)}-{css(record.mode)}"
    return Markup(  # noqa: S704 - every word in it went through text or css
        f'<svg class="timeline" viewBox="0 0 {WIDTH:.0f} {height:.0f}" role="img" '
        f'aria-labelledby="t-{key} d-{key}" xmlns="http://www.w3.org/2000/svg">'
        f'<title id="t-{key}">{text(f"Timeline of {record.name}, {record.mode}")}</title>'
        f'<desc id="d-{key}">{text(describe(timeline, requests))}</desc>'
        f"{''.join(parts)}{swatches}</svg>"
    )


def describe(timeline: Timeline, requests: Sequence[Request]) -> str:
    """Say in words what the picture shows, for people who cannot see it."""
    failed = Counter(ERROR_CLASSES[r.result] for r in requests if r.result is not RequestResult.OK)
    failures = ", ".join(f"{count} {name}" for name, count in failed.most_common()) or "none"
    moments = "; ".join(f"{m.label} at {m.at_s:.1f} s" for m in timeline.moments) or "none"
    canaries = Counter(str(r.answer) for r in requests if r.is_canary and r.answer is not None)
    answers = ", ".join(f"{count} {name}" for name, count in canaries.items()) or "none"
    return (
        f"{len(requests):,} requests in {timeline.end_s:.1f} s; failed: {failures}. Canary answers: {answers}. "
        f"Moments: {moments}."
    )


def thinned(dots: Sequence[_Dot], keep: int) -> list[_Dot]:
    """Return about `keep` dots: the slowest of each half pixel column, then evenly spaced others."""
    if len(dots) <= keep:
        return list(dots)
    slowest: dict[int, int] = {}
    columns = max(1, keep // 2)
    for index, dot in enumerate(dots):
        column = int((dot.x - LEFT) / (RIGHT - LEFT) * columns)
        if column not in slowest or dots[slowest[column]].latency_s < dot.latency_s:
            slowest[column] = index
    chosen = set(slowest.values())
    others = max(0, keep - len(chosen))
    chosen.update(int(step * len(dots) / others) for step in range(others))
    return [dots[index] for index in sorted(chosen)]


def _latency_panel(
    requests: Sequence[Request], timeline: Timeline, axis: Axis, y: float, dots_max: int
) -> tuple[list[str], float, list[tuple[str, str]]]:
    def dots(chosen: Iterable[Request]) -> list[_Dot]:
        return [_Dot(axis.x(timeline.seconds(r.planned_ns)), max(r.latency_s, 1e-4)) for r in chosen]

    answered = [r for r in requests if r.result is RequestResult.OK]
    plain = dots(r for r in answered if not r.is_canary)
    failed = dots(r for r in requests if r.result is not RequestResult.OK)
    canaries = {a: dots(r for r in answered if r.is_canary and (r.answer or "ambiguous") == a) for a in ANSWERS}
    low, high = decades(
        [dot.latency_s for dot in plain] + [dot.latency_s for group in canaries.values() for dot in group]
    )
    top = y + FAILED_HEIGHT
    bottom = top + LATENCY_HEIGHT

    def at(latency_s: float) -> float:
        share = (math.log10(latency_s) - math.log10(low)) / (math.log10(high) - math.log10(low))
        return bottom - LATENCY_HEIGHT * min(1.0, max(0.0, share))

    parts = [
        f'<text class="side" x="0" y="{y + 15:.1f}">failed</text>',
        f'<text class="side" x="0" y="{top + 18:.1f}">latency</text>',
        f'<text class="tick" x="0" y="{top + 33:.1f}">from planned</text>',
        f'<text class="tick" x="0" y="{top + 46:.1f}">start</text>',
        frame(y, FAILED_HEIGHT),
        frame(top, LATENCY_HEIGHT),
    ]
    for tick in log_ticks(low, high):
        parts.append(f'<path class="grid" d="M{LEFT} {at(tick):.1f}H{RIGHT}"/>')
        parts.append(f'<text class="tick end" x="{LEFT - 6}" y="{at(tick) + 3.5:.1f}">{duration(tick)}</text>')
    shown = thinned(plain, dots_max)
    dot_css = "dot fine" if len(shown) > _FINE_DOTS_FROM else "dot"
    parts.append(f'<path class="{dot_css}" d="{"".join(f"M{d.x:.1f} {at(d.latency_s):.1f}h0" for d in shown)}"/>')
    for window in timeline.windows:
        inside = [r.latency_s for r in answered if not r.is_canary and _within(r, window, timeline)]
        if len(inside) >= 3:
            parts.append(
                f'<path class="median" d="M{axis.x(window.start_s):.1f} {at(median(inside)):.1f}H{axis.x(window.end_s):.1f}">'
                f"<title>{text(f'median {window.kind}: {duration(median(inside))} of {len(inside):,} answers')}</title></path>"
            )
    for answer in ANSWERS:
        marks = "".join(glyph(answer, d.x, at(d.latency_s)) for d in thinned(canaries[answer], dots_max))
        parts.append(f'<path class="a-{answer}" d="{marks}"/>' if marks else "")
    crosses = "".join(glyph("cross", d.x, y + FAILED_HEIGHT / 2) for d in thinned(failed, dots_max))
    parts.append(f'<path class="failed" d="{crosses}"/>' if crosses else "")
    if not requests:
        parts.append(
            f'<text class="side mid" x="{(LEFT + RIGHT) / 2}" y="{top + 90:.1f}">no request was recorded</text>'
        )
    legend = [("dot", _count("answered", len(plain), len(shown)))] if plain else []
    legend += [("median", "median in window")] if plain else []
    legend += [(f"a-{a}", f"canary: {a} ({len(canaries[a]):,})") for a in ANSWERS if canaries[a]]
    legend += [("failed", f"failed ({len(failed):,})")] if failed else []
    return parts, bottom, legend


def _answered_panel(requests: Sequence[Request], timeline: Timeline, axis: Axis, y: float) -> tuple[list[str], float]:
    """Draw which share of the arrivals of each bin was answered; the harness's own failures do not count."""
    width_s = bin_width_s(timeline.end_s, len(requests))
    ratio: dict[int, list[int]] = {}
    for request in requests:
        if request.result not in OURS:
            ratio.setdefault(int(timeline.seconds(request.planned_ns) // width_s), []).append(
                request.result is RequestResult.OK
            )
    parts = [f'<text class="side" x="0" y="{y + 13:.1f}">answered</text>', frame(y, ANSWERED_HEIGHT)]
    for share, label in ((1.0, "100%"), (0.0, "0")):
        at = y + ANSWERED_HEIGHT * (1 - share)
        parts.append(f'<text class="tick end" x="{LEFT - 6}" y="{at + (8 if share else 0):.1f}">{label}</text>')
    shapes: dict[str, str] = {"answered": "", "unanswered": ""}
    for index, answers in sorted(ratio.items()):
        left, right = axis.x(index * width_s), axis.x((index + 1) * width_s)
        height = ANSWERED_HEIGHT * sum(answers) / len(answers)
        base = y + ANSWERED_HEIGHT
        shapes["answered"] += f"M{left:.1f} {base:.1f}v{-height:.1f}H{right:.1f}v{height:.1f}z"
        shapes["unanswered"] += f"M{left:.1f} {base - height:.1f}V{y:.1f}H{right:.1f}V{base - height:.1f}z"
    parts += [f'<path class="{name}" d="{shape}"/>' for name, shape in shapes.items() if shape]
    return parts, y + ANSWERED_HEIGHT


def _errors_panel(
    requests: Sequence[Request], timeline: Timeline, axis: Axis, y: float
) -> tuple[list[str], float, list[tuple[str, str]]]:
    width_s = bin_width_s(timeline.end_s, len(requests))
    bins: dict[int, Counter[str]] = {}
    for request in requests:
        if request.result is not RequestResult.OK:
            name = ERROR_CLASSES[request.result]
            bins.setdefault(int(timeline.seconds(request.planned_ns) // width_s), Counter())[name] += 1
    most = max((sum(counts.values()) for counts in bins.values()), default=0) / width_s
    top_rate = round_up(most) if most else 1.0
    parts = [
        f'<text class="side" x="0" y="{y + 13:.1f}">errors</text>',
        f'<text class="tick" x="0" y="{y + 27:.1f}">per second</text>',
        frame(y, ERRORS_HEIGHT),
        f'<text class="tick end" x="{LEFT - 6}" y="{y + 8:.1f}">{top_rate:g}</text>',
        f'<text class="tick end" x="{LEFT - 6}" y="{y + ERRORS_HEIGHT:.1f}">0</text>',
    ]
    shapes: dict[str, list[str]] = {}
    for index, counts in sorted(bins.items()):
        left, right = axis.x(index * width_s), axis.x((index + 1) * width_s)
        base = y + ERRORS_HEIGHT
        for name in _ERROR_ORDER:
            height = ERRORS_HEIGHT * counts[name] / width_s / top_rate
            if height:
                shapes.setdefault(name, []).append(
                    f"M{left + 0.5:.1f} {base:.1f}v-{height:.1f}H{max(left + 1.5, right - 0.5):.1f}v{height:.1f}z"
                )
            base -= height
    parts += [f'<path class="e-{css(name)}" d="{"".join(shapes[name])}"/>' for name in _ERROR_ORDER if name in shapes]
    totals = sum(bins.values(), Counter[str]())
    legend = [(f"e-{css(name)}", f"{name} ({totals[name]:,})") for name in _ERROR_ORDER if totals[name]]
    return parts, y + ERRORS_HEIGHT, legend


def _moment_labels(moments: Sequence[Moment], axis: Axis) -> tuple[list[tuple[Moment, str, float, bool]], float]:
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


def _moment_lines(labels: Sequence[tuple[Moment, str, float, bool]], axis: Axis, bottom: float) -> list[str]:
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


def _window_names(windows: Sequence[Span], axis: Axis, y: float) -> list[str]:
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


def _time_axis(axis: Axis, y: float) -> list[str]:
    step = round_up(axis.end_s / 10)
    parts = [f'<path class="axis" d="M{LEFT} {y:.1f}H{RIGHT}"/>']
    for index in range(int(axis.end_s / step) + 1):
        x = axis.x(index * step)
        parts.append(f'<path class="axis" d="M{x:.1f} {y:.1f}v4"/>')
        parts.append(f'<text class="tick mid" x="{x:.1f}" y="{y + 16:.1f}">{index * step:g}</text>')
    parts.append(f'<text class="side" x="0" y="{y + 16:.1f}">seconds</text>')
    return parts


def _lane_legend(timeline: Timeline) -> list[tuple[str, str]]:
    windows = {w.kind: f"window: {w.kind}" for w in timeline.windows}
    health = {span.kind for life in timeline.lives for span in life.health}
    named = {"healthy": "health 200", "unhealthy": "health not 200"}
    return [(f"wb-{css(kind)}", label) for kind, label in windows.items()] + [
        (f"h-{kind}", label) for kind, label in named.items() if kind in health
    ]


def _legend(entries: Sequence[tuple[str, str]], y: float) -> tuple[str, float]:
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


def _within(request: Request, window: Span, timeline: Timeline) -> bool:
    return window.start_s <= timeline.seconds(request.planned_ns) < window.end_s


def _count(name: str, total: int, shown: int) -> str:
    return f"{name} ({total:,})" if shown == total else f"{name} ({shown:,} of {total:,} drawn, slowest kept)"
