"""Draw the timeline of one scenario as inline SVG: no script, no font and no other file is needed to see it.

Colours are CSS variables of the page, so that the picture follows light and dark; every colour also has a shape or a word.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from markupsafe import Markup

from harness.observe.history import Request, RequestResult
from harness.report.annotations import lane_legend, legend_lines, moment_labels, moment_lines, time_axis, window_names
from harness.report.lanes import answer_lanes, life_lanes, step_lanes
from harness.report.panels import ERROR_CLASSES, answered_panel, errors_panel, latency_panel
from harness.report.svg import WIDTH, Axis, css, text
from harness.report.timeline import Timeline, read_timeline

if TYPE_CHECKING:
    from harness.report.store import ScenarioRecord

DOTS_MAX = 2_000


def timeline_svg(record: ScenarioRecord, *, dots_max: int = DOTS_MAX) -> Markup:
    """Return the picture of one scenario as an `<svg>` element.

    At most `dots_max` answered requests are drawn, the slowest of each column among them; the legend says how many were
    left out. Failed requests and canaries are thinned likewise.
    """
    timeline = read_timeline(record.history)
    axis = Axis(timeline.end_s)
    requests = record.history.requests
    parts: list[str] = []
    labels, y = moment_labels(timeline.moments, axis)
    top = y
    parts += window_names(timeline.windows, axis, y)
    y += 18.0
    panel, y, legend = latency_panel(requests, timeline, axis, y, dots_max)
    parts += panel
    panel, y = answered_panel(requests, timeline, axis, y + 14.0)
    parts += panel
    panel, y, errors = errors_panel(requests, timeline, axis, y + 14.0)
    parts += panel
    legend += errors
    for draw in (answer_lanes(requests, timeline, axis), *life_lanes(timeline, axis), *step_lanes(timeline, axis)):
        if draw is not None:
            y += 6.0
            parts.append(f'<g transform="translate(0 {y:.1f})">{draw[0]}</g>')
            y += draw[1]
    bottom = y + 4.0
    parts += time_axis(axis, bottom)
    shades = [
        f'<rect class="w-{css(w.kind)}" x="{axis.x(w.start_s):.1f}" y="{top:.1f}" '
        f'width="{axis.x(w.end_s) - axis.x(w.start_s):.1f}" height="{bottom - top:.1f}"/>'
        for w in timeline.windows
    ]
    parts = [*shades, *parts, *moment_lines(labels, axis, bottom)]
    swatches, height = legend_lines([*lane_legend(timeline), *legend], bottom + 36.0)
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
