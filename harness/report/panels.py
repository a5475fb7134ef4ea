"""The three panels of a timeline picture: latency of every request, share of answers, errors by kind."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from harness.observe.history import OURS, Request, RequestResult
from harness.report.svg import (
    ANSWERS,
    LEFT,
    RIGHT,
    Axis,
    bin_width_s,
    css,
    decades,
    duration,
    frame,
    glyph,
    log_ticks,
    round_up,
    text,
)
from harness.report.timeline import Span, Timeline

LATENCY_HEIGHT, FAILED_HEIGHT, ANSWERED_HEIGHT, ERRORS_HEIGHT = 190.0, 22.0, 34.0, 46.0
FINE_DOTS_FROM = 800  # more dots than this are drawn smaller

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
class Dot:
    """A request in the picture: where its planned start is, in pixels, and how long it took."""

    x: float
    latency_s: float


def thinned(dots: Sequence[Dot], keep: int) -> list[Dot]:
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


def latency_panel(
    requests: Sequence[Request], timeline: Timeline, axis: Axis, y: float, dots_max: int
) -> tuple[list[str], float, list[tuple[str, str]]]:
    """Draw a dot per answered request, canaries by their answer and failures above; return where it ends and its legend."""

    def dots(chosen: Iterable[Request]) -> list[Dot]:
        return [Dot(axis.x(timeline.seconds(r.planned_ns)), max(r.latency_s, 1e-4)) for r in chosen]

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
    dot_css = "dot fine" if len(shown) > FINE_DOTS_FROM else "dot"
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


def answered_panel(requests: Sequence[Request], timeline: Timeline, axis: Axis, y: float) -> tuple[list[str], float]:
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


def errors_panel(
    requests: Sequence[Request], timeline: Timeline, axis: Axis, y: float
) -> tuple[list[str], float, list[tuple[str, str]]]:
    """Draw how many requests of each kind failed per second; return where the panel ends and its legend."""
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


def _within(request: Request, window: Span, timeline: Timeline) -> bool:
    return window.start_s <= timeline.seconds(request.planned_ns) < window.end_s


def _count(name: str, total: int, shown: int) -> str:
    return f"{name} ({total:,})" if shown == total else f"{name} ({shown:,} of {total:,} drawn, slowest kept)"
