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

from harness.clock import seconds_between
from harness.observe.history import OURS, Request, RequestResult
from harness.report.printable import printable
from harness.report.timeline import Life, Moment, Span, Timeline, read_timeline

if TYPE_CHECKING:
    from harness.report.store import ScenarioRecord

WIDTH = 1080.0
LEFT, RIGHT = 112.0, 1056.0
LATENCY_HEIGHT, FAILED_HEIGHT, ANSWERED_HEIGHT, ERRORS_HEIGHT, LANE_HEIGHT = 190.0, 22.0, 34.0, 46.0, 20.0
LABEL_HEIGHT = 17.0
CHARACTER_WIDTH = 6.3  # at 11 px, a little wide so that labels never touch
DOTS_MAX = 2_000

ERROR_CLASSES: dict[RequestResult, str] = {
    RequestResult.NO_ENDPOINT: "no server",
    RequestResult.UNREACHABLE: "no server",
    RequestResult.REFUSED: "no server",
    RequestResult.CONNECT_TIMEOUT: "no server",
    RequestResult.RESET: "connection cut",
    RequestResult.CLOSED: "connection cut",
    RequestResult.RESET_MID_STREAM: "connection cut",
    RequestResult.TRUNCATED: "connection cut",
    RequestResult.HTTP_4XX: "HTTP 4xx",
    RequestResult.HTTP_5XX: "HTTP 5xx",
    RequestResult.FIRST_TOKEN_TIMEOUT: "too late",
    RequestResult.STALL: "too late",
    RequestResult.DEADLINE: "too late",
    RequestResult.INBAND_ERROR: "bad answer",
    RequestResult.ABORTED: "bad answer",
    RequestResult.MALFORMED: "bad answer",
    RequestResult.DROPPED: "harness",
    RequestResult.HARNESS_BUG: "harness",
}
_ERROR_ORDER = tuple(dict.fromkeys(ERROR_CLASSES.values()))
_ANSWERS = ("old", "new", "neither", "ambiguous")
_BIN_WIDTHS_S = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)


@dataclass(frozen=True, slots=True)
class _Axis:
    end_s: float

    def x(self, at_s: float) -> float:
        return LEFT + (RIGHT - LEFT) * min(1.0, max(0.0, at_s / self.end_s))


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
    axis = _Axis(timeline.end_s)
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
    for draw in (_answer_lanes(requests, timeline, axis), *_life_lanes(timeline, axis), *_step_lanes(timeline, axis)):
        if draw is not None:
            y += 6.0
            parts.append(f'<g transform="translate(0 {y:.1f})">{draw[0]}</g>')
            y += draw[1]
    bottom = y + 4.0
    parts += _time_axis(axis, bottom)
    shades = [
        f'<rect class="w-{_css(w.kind)}" x="{axis.x(w.start_s):.1f}" y="{top:.1f}" '
        f'width="{axis.x(w.end_s) - axis.x(w.start_s):.1f}" height="{bottom - top:.1f}"/>'
        for w in timeline.windows
    ]
    parts = [*shades, *parts, *_moment_lines(labels, axis, bottom)]
    swatches, height = _legend([*_lane_legend(timeline), *legend], bottom + 36.0)
    key = f"{_css(record.name)}-{_css(record.mode)}"
    return Markup(  # noqa: S704 - every word in it went through _text or _css
        f'<svg class="timeline" viewBox="0 0 {WIDTH:.0f} {height:.0f}" role="img" '
        f'aria-labelledby="t-{key} d-{key}" xmlns="http://www.w3.org/2000/svg">'
        f'<title id="t-{key}">{_text(f"Timeline of {record.name}, {record.mode}")}</title>'
        f'<desc id="d-{key}">{_text(describe(timeline, requests))}</desc>'
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
    requests: Sequence[Request], timeline: Timeline, axis: _Axis, y: float, dots_max: int
) -> tuple[list[str], float, list[tuple[str, str]]]:
    def dots(chosen: Iterable[Request]) -> list[_Dot]:
        return [_Dot(axis.x(_planned_s(r, timeline)), max(r.latency_s, 1e-4)) for r in chosen]

    answered = [r for r in requests if r.result is RequestResult.OK]
    plain = dots(r for r in answered if not r.is_canary)
    failed = dots(r for r in requests if r.result is not RequestResult.OK)
    canaries = {a: dots(r for r in answered if r.is_canary and (r.answer or "ambiguous") == a) for a in _ANSWERS}
    low, high = _decades(
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
        _frame(y, FAILED_HEIGHT),
        _frame(top, LATENCY_HEIGHT),
    ]
    for tick in _log_ticks(low, high):
        parts.append(f'<path class="grid" d="M{LEFT} {at(tick):.1f}H{RIGHT}"/>')
        parts.append(f'<text class="tick end" x="{LEFT - 6}" y="{at(tick) + 3.5:.1f}">{_duration(tick)}</text>')
    shown = thinned(plain, dots_max)
    parts.append(f'<path class="dot" d="{"".join(f"M{d.x:.1f} {at(d.latency_s):.1f}h0" for d in shown)}"/>')
    for window in timeline.windows:
        inside = [r.latency_s for r in answered if not r.is_canary and _within(r, window, timeline)]
        if len(inside) >= 3:
            parts.append(
                f'<path class="median" d="M{axis.x(window.start_s):.1f} {at(median(inside)):.1f}H{axis.x(window.end_s):.1f}">'
                f"<title>{_text(f'median {window.kind}: {_duration(median(inside))} of {len(inside):,} answers')}</title></path>"
            )
    for answer in _ANSWERS:
        marks = "".join(_glyph(answer, d.x, at(d.latency_s)) for d in thinned(canaries[answer], dots_max))
        parts.append(f'<path class="a-{answer}" d="{marks}"/>' if marks else "")
    crosses = "".join(_glyph("cross", d.x, y + FAILED_HEIGHT / 2) for d in thinned(failed, dots_max))
    parts.append(f'<path class="failed" d="{crosses}"/>' if crosses else "")
    if not requests:
        parts.append(
            f'<text class="side mid" x="{(LEFT + RIGHT) / 2}" y="{top + 90:.1f}">no request was recorded</text>'
        )
    legend = [("dot", _count("answered", len(plain), len(shown)))] if plain else []
    legend += [("median", "median in window")] if plain else []
    legend += [(f"a-{a}", f"canary: {a} ({len(canaries[a]):,})") for a in _ANSWERS if canaries[a]]
    legend += [("failed", f"failed ({len(failed):,})")] if failed else []
    return parts, bottom, legend


def _answered_panel(requests: Sequence[Request], timeline: Timeline, axis: _Axis, y: float) -> tuple[list[str], float]:
    """Draw which share of the arrivals of each bin was answered; the harness's own failures do not count."""
    width_s = _bin_width_s(timeline.end_s)
    ratio: dict[int, list[int]] = {}
    for request in requests:
        if request.result not in OURS:
            ratio.setdefault(int(_planned_s(request, timeline) // width_s), []).append(
                request.result is RequestResult.OK
            )
    parts = [f'<text class="side" x="0" y="{y + 13:.1f}">answered</text>', _frame(y, ANSWERED_HEIGHT)]
    for share, label in ((1.0, "100%"), (0.0, "0")):
        at = y + ANSWERED_HEIGHT * (1 - share)
        parts.append(f'<text class="tick end" x="{LEFT - 6}" y="{at + (8 if share else 0):.1f}">{label}</text>')
    shapes = []
    for index, answers in sorted(ratio.items()):
        left, right = axis.x(index * width_s), axis.x((index + 1) * width_s)
        height = ANSWERED_HEIGHT * sum(answers) / len(answers)
        if height:
            shapes.append(f"M{left:.1f} {y + ANSWERED_HEIGHT:.1f}v-{height:.1f}H{right:.1f}v{height:.1f}z")
    parts.append(f'<path class="answered" d="{"".join(shapes)}"/>' if shapes else "")
    return parts, y + ANSWERED_HEIGHT


def _errors_panel(
    requests: Sequence[Request], timeline: Timeline, axis: _Axis, y: float
) -> tuple[list[str], float, list[tuple[str, str]]]:
    width_s = _bin_width_s(timeline.end_s)
    bins: dict[int, Counter[str]] = {}
    for request in requests:
        if request.result is not RequestResult.OK:
            name = ERROR_CLASSES[request.result]
            bins.setdefault(int(_planned_s(request, timeline) // width_s), Counter())[name] += 1
    most = max((sum(counts.values()) for counts in bins.values()), default=0) / width_s
    top_rate = _round_up(most) if most else 1.0
    parts = [
        f'<text class="side" x="0" y="{y + 13:.1f}">errors</text>',
        f'<text class="tick" x="0" y="{y + 27:.1f}">per second</text>',
        _frame(y, ERRORS_HEIGHT),
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
    parts += [f'<path class="e-{_css(name)}" d="{"".join(shapes[name])}"/>' for name in _ERROR_ORDER if name in shapes]
    totals = sum(bins.values(), Counter[str]())
    legend = [(f"e-{_css(name)}", f"{name} ({totals[name]:,})") for name in _ERROR_ORDER if totals[name]]
    return parts, y + ERRORS_HEIGHT, legend


def _answer_lanes(requests: Sequence[Request], timeline: Timeline, axis: _Axis) -> tuple[str, float] | None:
    """Draw who answered each canary: one row per checkpoint, so that the row tells what the colour tells."""
    canaries = [r for r in requests if r.is_canary and r.answer is not None]
    rows = [answer for answer in _ANSWERS if any(r.answer == answer for r in canaries)]
    if not rows:
        return None
    parts = ['<text class="side" x="0" y="13">canaries</text>']
    for row, answer in enumerate(rows):
        y = 8.0 + 14.0 * row
        parts.append(f'<path class="grid" d="M{LEFT} {y}H{RIGHT}"/>')
        parts.append(f'<text class="tick end" x="{LEFT - 6}" y="{y + 3.5}">{answer}</text>')
        at = sorted({round(axis.x(_planned_s(r, timeline)), 1) for r in canaries if r.answer == answer})
        parts.append(f'<path class="a-{answer}" d="{"".join(_glyph(answer, x, y) for x in at)}"/>')
    return "".join(parts), 14.0 * len(rows) + 2.0


def _life_lanes(timeline: Timeline, axis: _Axis) -> Iterable[tuple[str, float]]:
    for index, life in enumerate(timeline.lives):
        title = '<text class="side" x="0" y="14">engines</text>' if index == 0 else ""
        yield title + _life(life, axis), LANE_HEIGHT


def _life(life: Life, axis: _Axis) -> str:
    parts = [f'<text class="tick end" x="{LEFT - 6}" y="13.5">{_text(life.incarnation, 9)}</text>']
    for span in life.states:
        left, width = axis.x(span.start_s), max(1.5, axis.x(span.end_s) - axis.x(span.start_s))
        note = f"{life.incarnation}: {span.kind}, {span.start_s:.1f} s to {span.end_s:.1f} s"
        parts.append(
            f'<rect class="s-{_css(span.kind)}" x="{left:.1f}" y="2" width="{width:.1f}" height="13"><title>{_text(note)}'
            "</title></rect>"
        )
        if width > CHARACTER_WIDTH * len(span.kind) + 10:
            parts.append(f'<text class="on-{_css(span.kind)}" x="{left + 5:.1f}" y="12.5">{_text(span.kind)}</text>')
    for span in life.health:
        left, width = axis.x(span.start_s), max(1.0, axis.x(span.end_s) - axis.x(span.start_s))
        parts.append(f'<rect class="h-{_css(span.kind)}" x="{left:.1f}" y="16.5" width="{width:.1f}" height="3"/>')
    if life.end is not None:
        x = axis.x(life.end.at_s)
        shape = _glyph("cross", x, 8.5) if life.end.kind == "dead" else f"M{x:.1f} 2v13"
        parts.append(
            f'<path class="end-{_css(life.end.kind)}" d="{shape}"><title>{_text(life.end.note)}</title></path>'
        )
        if life.end.kind == "dead" and x + 40 < RIGHT:
            parts.append(f'<text class="tick" x="{x + 9:.1f}" y="12.5">dead</text>')
    return "".join(parts)


def _step_lanes(timeline: Timeline, axis: _Axis) -> Iterable[tuple[str, float]]:
    title = '<text class="side" x="0" y="13">steps</text>'
    for kind in ("publish", "rollout", "remedy"):
        spans = [span for span in timeline.steps if span.kind == kind]
        if spans:
            yield title + "".join(_step(span, axis) for span in spans) + _row_name(kind), LANE_HEIGHT - 3
            title = ""
    if timeline.guards:
        yield title + _row_name("guards") + _guard_marks(timeline.guards, axis), LANE_HEIGHT - 3


def _step(span: Span, axis: _Axis) -> str:
    left, width = axis.x(span.start_s), max(2.0, axis.x(span.end_s) - axis.x(span.start_s))
    note = f"{span.kind}, {span.start_s:.1f} s to {span.end_s:.1f} s: {span.note}"
    return f'<rect class="step" x="{left:.1f}" y="3.5" width="{width:.1f}" height="10" rx="1.5"><title>{_text(note)}</title></rect>'


def _guard_marks(guards: Sequence[Moment], axis: _Axis) -> str:
    parts: list[str] = []
    seen = [guard for guard in guards if guard.at_s >= 0.0]
    for guard, following in zip(seen, [*seen[1:], None], strict=True):
        x = axis.x(guard.at_s)
        kind = guard.kind.removeprefix("canary_")
        shape = kind if guard.kind.startswith("canary_") else {"passed": "tick", "refused": "cross"}.get(kind, "ring")
        parts.append(
            f'<path class="g-{_css(kind)}" d="{_glyph(shape, x, 8.5)}"><title>{_text(f"{guard.label}: {guard.note}")}</title></path>'
        )
        label = printable(guard.label, limit=30)
        until = RIGHT if following is None else axis.x(following.at_s) - 6
        if x + 9 + CHARACTER_WIDTH * len(label) <= until:
            parts.append(f'<text class="tick" x="{x + 9:.1f}" y="12">{escape(label)}</text>')
    return "".join(parts)


def _row_name(name: str) -> str:
    return f'<text class="tick end" x="{LEFT - 6}" y="12">{name}</text>'


def _moment_labels(moments: Sequence[Moment], axis: _Axis) -> tuple[list[tuple[Moment, str, float, bool]], float]:
    """Place labels in rows so that none touches another and no line crosses one; return them and where the rows end.

    From right to left: a label goes right of its line in the lowest row that is free there, so the lines of labels in
    higher rows pass on the left of the labels below. One that would leave the picture goes left of its line, on top.
    """
    taken: list[float] = []  # per row: where the leftmost label so far begins
    rows: list[tuple[Moment, str, int, bool]] = []
    turned: list[tuple[Moment, str]] = []
    for moment in sorted(moments, key=lambda moment: -moment.at_s):
        x = axis.x(moment.at_s)
        label = f"{printable(moment.label, limit=48)} {moment.at_s:.1f} s"
        width = CHARACTER_WIDTH * len(label) + 12
        if x + width > WIDTH:
            turned.append((moment, label))
            continue
        row = next((index for index, left in enumerate(taken) if x + width <= left), len(taken))
        row = max([row, *(r + 1 for m, _, r, _ in rows if x <= axis.x(m.at_s) < x + 2)])
        taken += [math.inf] * (row + 1 - len(taken))
        taken[row] = x
        rows.append((moment, label, row, False))
    for moment, label in turned:
        rows.append((moment, label, len(taken), True))
        taken.append(0.0)
    bottom = LABEL_HEIGHT * len(taken) + 4.0
    return [(m, label, bottom - LABEL_HEIGHT * (row + 1) + 10.0, left) for m, label, row, left in rows], bottom


def _moment_lines(labels: Sequence[tuple[Moment, str, float, bool]], axis: _Axis, bottom: float) -> list[str]:
    lines, words = [], []
    for moment, label, y, is_left in labels:
        x = axis.x(moment.at_s)
        kind = _css(moment.kind)
        lines.append(f'<path class="m-{kind}" d="M{x:.1f} {y - 8:.1f}V{bottom:.1f}"/>')
        words.append(
            f'<text class="moment t-{kind}{" end" if is_left else ""}" x="{x + (-5 if is_left else 5):.1f}" y="{y:.1f}">'
            f"{escape(label)}<title>{_text(moment.note or moment.label)}</title></text>"
        )
    return lines + words


def _window_names(windows: Sequence[Span], axis: _Axis, y: float) -> list[str]:
    parts = []
    for window in windows:
        left, right = axis.x(window.start_s), axis.x(window.end_s)
        parts.append(
            f'<rect class="wb-{_css(window.kind)}" x="{left:.1f}" y="{y:.1f}" width="{right - left:.1f}" height="14"/>'
        )
        if right - left > CHARACTER_WIDTH * len(window.kind) + 6:
            parts.append(
                f'<text class="window mid" x="{(left + right) / 2:.1f}" y="{y + 10.5:.1f}">{window.kind}</text>'
            )
    return parts


def _time_axis(axis: _Axis, y: float) -> list[str]:
    step = _round_up(axis.end_s / 10)
    parts = [f'<path class="axis" d="M{LEFT} {y:.1f}H{RIGHT}"/>']
    for index in range(int(axis.end_s / step) + 1):
        x = axis.x(index * step)
        parts.append(f'<path class="axis" d="M{x:.1f} {y:.1f}v4"/>')
        parts.append(f'<text class="tick mid" x="{x:.1f}" y="{y + 16:.1f}">{index * step:g}</text>')
    parts.append(f'<text class="tick end" x="{LEFT - 6}" y="{y + 16:.1f}">seconds</text>')
    return parts


def _lane_legend(timeline: Timeline) -> list[tuple[str, str]]:
    windows = {w.kind: f"window: {w.kind}" for w in timeline.windows}
    health = {span.kind for life in timeline.lives for span in life.health}
    named = {"healthy": "health 200", "unhealthy": "health not 200"}
    return [(f"wb-{_css(kind)}", label) for kind, label in windows.items()] + [
        (f"h-{kind}", label) for kind, label in named.items() if kind in health
    ]


def _legend(entries: Sequence[tuple[str, str]], y: float) -> tuple[str, float]:
    parts: list[str] = []
    x = LEFT
    for css, label in entries:
        width = 22 + CHARACTER_WIDTH * len(label) + 10
        if x + width > WIDTH and x > LEFT:
            x, y = LEFT, y + 18.0
        parts.append(
            f'{_swatch(css, x + 7, y - 3.5)}<text class="legend" x="{x + 19:.1f}" y="{y:.1f}">{_text(label)}</text>'
        )
        x += width
    return "".join(parts), y + 12.0


def _swatch(css: str, x: float, y: float) -> str:
    if css == "dot":
        return f'<path class="dot" d="M{x:.1f} {y:.1f}h0"/>'
    if css == "median":
        return f'<path class="median" d="M{x - 8:.1f} {y:.1f}h16"/>'
    if css.startswith("a-") or css == "failed":
        return f'<path class="{css}" d="{_glyph("cross" if css == "failed" else css[2:], x, y)}"/>'
    height = 3 if css.startswith("h-") else 9
    return f'<rect class="{css} swatch" x="{x - 7:.1f}" y="{y - height / 2:.1f}" width="14" height="{height}"/>'


def _glyph(shape: str, x: float, y: float) -> str:
    """Return the path of a mark: answers and results differ in shape, not only in colour."""
    return {
        "old": f"M{x - 3.5:.1f} {y - 3.5:.1f}h7v7h-7z",
        "new": f"M{x:.1f} {y - 4.5:.1f}l4.5 8h-9z",
        "neither": f"M{x:.1f} {y - 5.5:.1f}l5.5 5.5l-5.5 5.5l-5.5 -5.5z",
        "cross": f"M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8",
        "tick": f"M{x - 4:.1f} {y:.1f}l3 3.5l5.5 -7",
    }.get(shape, f"M{x - 4:.1f} {y:.1f}a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z")


def _frame(y: float, height: float) -> str:
    return f'<rect class="frame" x="{LEFT}" y="{y:.1f}" width="{RIGHT - LEFT}" height="{height}"/>'


def _planned_s(request: Request, timeline: Timeline) -> float:
    return seconds_between(timeline.origin_ns, request.planned_ns)


def _within(request: Request, window: Span, timeline: Timeline) -> bool:
    return window.start_s <= _planned_s(request, timeline) < window.end_s


def _bin_width_s(end_s: float) -> float:
    return next((width for width in _BIN_WIDTHS_S if end_s / width <= 100), end_s / 100)


def _round_up(value: float) -> float:
    """Return the next of 1, 2, 5, 10, 20, 50 and so on."""
    power = 10.0 ** math.floor(math.log10(value))
    return next((power * factor for factor in (1, 2, 5) if power * factor >= value * (1 - 1e-9)), power * 10)


def _decades(latencies_s: Sequence[float]) -> tuple[float, float]:
    """Return the ends of a log axis that holds all values with room, at least one decade long."""
    if not latencies_s:
        return 0.01, 1.0
    low = 10.0 ** (math.floor(math.log10(min(latencies_s) * 0.9) * 2) / 2)
    high = 10.0 ** (math.ceil(math.log10(max(latencies_s) * 1.1) * 2) / 2)
    return low, max(high, low * 10)


def _log_ticks(low: float, high: float) -> list[float]:
    factors = (1,) if high / low > 2_000 else (1, 3) if high / low > 40 else (1, 2, 5)
    ticks = (
        10.0**power * f
        for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for f in factors
    )
    return [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]


def _duration(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def _count(name: str, total: int, shown: int) -> str:
    return f"{name} ({total:,})" if shown == total else f"{name} ({shown:,} of {total:,} drawn, slowest kept)"


def _css(name: str) -> str:
    """Return `name` as a class or id that cannot break out of an attribute."""
    return "".join(character if character.isascii() and character.isalnum() else "-" for character in name.lower())[:80]


def _text(text: object, limit: int = 300) -> str:
    return str(escape(printable(text, limit=limit)))
