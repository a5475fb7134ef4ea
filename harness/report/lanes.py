"""The lower lanes of a timeline: who answered the canaries, what each engine did, what the rollout and its guards did."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from markupsafe import escape

from harness.observe.history import Request
from harness.report.printable import printable
from harness.report.svg import ANSWERS, CHARACTER_WIDTH, HEALTH_HEIGHTS, LEFT, RIGHT, Axis, css, glyph, text
from harness.report.timeline import Life, Span, Timeline

LANE_HEIGHT = 20.0


def answer_lanes(requests: Sequence[Request], timeline: Timeline, axis: Axis) -> tuple[str, float] | None:
    """Draw who answered each canary: one row per checkpoint, so that the row tells what the colour tells."""
    canaries = [r for r in requests if r.is_canary and r.answer is not None]
    rows = [answer for answer in ANSWERS if any(r.answer == answer for r in canaries)]
    if not rows:
        return None
    parts = ['<text class="side" x="0" y="13">canaries</text>']
    for row, answer in enumerate(rows):
        y = 8.0 + 14.0 * row
        parts.append(f'<path class="grid" d="M{LEFT} {y}H{RIGHT}"/>')
        parts.append(f'<text class="tick end" x="{LEFT - 6}" y="{y + 3.5}">{answer}</text>')
        at = sorted({round(axis.x(timeline.seconds(r.planned_ns)), 1) for r in canaries if r.answer == answer})
        parts.append(f'<path class="a-{answer}" d="{"".join(glyph(answer, x, y) for x in at)}"/>')
    return "".join(parts), 14.0 * len(rows) + 2.0


def life_lanes(timeline: Timeline, axis: Axis) -> Iterable[tuple[str, float]]:
    for index, life in enumerate(timeline.lives):
        title = '<text class="side" x="0" y="14">engines</text>' if index == 0 else ""
        yield title + _life(life, axis), LANE_HEIGHT


def _life(life: Life, axis: Axis) -> str:
    parts = [f'<text class="tick end" x="{LEFT - 6}" y="13.5">{text(life.incarnation, 9)}</text>']
    for span in life.states:
        left, width = axis.x(span.start_s), max(1.5, axis.x(span.end_s) - axis.x(span.start_s))
        note = f"{life.incarnation}: {span.kind}, {span.start_s:.1f} s to {span.end_s:.1f} s"
        parts.append(
            f'<rect class="s-{css(span.kind)}" x="{left:.1f}" y="2" width="{width:.1f}" height="13"><title>{text(note)}'
            "</title></rect>"
        )
        if width > CHARACTER_WIDTH * len(span.kind) + 10:
            parts.append(f'<text class="on-{css(span.kind)}" x="{left + 5:.1f}" y="12.5">{text(span.kind)}</text>')
    for span in life.health:
        left, width = axis.x(span.start_s), max(1.0, axis.x(span.end_s) - axis.x(span.start_s))
        height = HEALTH_HEIGHTS.get(span.kind, 2.0)  # what the colour tells, for whoever does not see it
        parts.append(
            f'<rect class="h-{css(span.kind)}" x="{left:.1f}" y="{20 - height:g}" width="{width:.1f}" height="{height:g}"/>'
        )
    if life.end is not None:
        x = axis.x(life.end.at_s)
        shape = glyph("cross", x, 8.5) if life.end.kind == "dead" else f"M{x:.1f} 2v13"
        parts.append(f'<path class="end-{css(life.end.kind)}" d="{shape}"><title>{text(life.end.note)}</title></path>')
        if life.end.kind == "dead" and x + 40 < RIGHT:
            parts.append(f'<text class="tick" x="{x + 9:.1f}" y="12.5">dead</text>')
    return "".join(parts)


def step_lanes(timeline: Timeline, axis: Axis) -> Iterable[tuple[str, float]]:
    title = '<text class="side" x="0" y="13">steps</text>'
    for kind in ("publish", "rollout", "remedy"):
        spans = [span for span in timeline.steps if span.kind == kind]
        if spans:
            yield title + "".join(_step(span, axis) for span in spans) + _row_name(kind), LANE_HEIGHT - 3
            title = ""
    if any(guard.at_s >= 0.0 for guard in timeline.guards):
        yield title + _row_name("guards") + _guard_marks(timeline, axis), LANE_HEIGHT - 3


def _step(span: Span, axis: Axis) -> str:
    left, width = axis.x(span.start_s), max(2.0, axis.x(span.end_s) - axis.x(span.start_s))
    note = f"{span.kind}, {span.start_s:.1f} s to {span.end_s:.1f} s: {span.note}"
    return f'<rect class="step" x="{left:.1f}" y="3.5" width="{width:.1f}" height="10" rx="1.5"><title>{text(note)}</title></rect>'


def _guard_marks(timeline: Timeline, axis: Axis) -> str:
    """Draw what each guard did, with its name where neither the next mark nor a line stands in the way."""
    parts: list[str] = []
    seen = [guard for guard in timeline.guards if guard.at_s >= 0.0]
    obstacles = sorted([*(axis.x(g.at_s) - 6 for g in seen), *(axis.x(m.at_s) for m in timeline.moments)])
    for guard in seen:
        x = axis.x(guard.at_s)
        kind = guard.kind.removeprefix("canary_")
        shape = kind if guard.kind.startswith("canary_") else {"passed": "tick", "refused": "cross"}.get(kind, "ring")
        note = text(f"{guard.label} at {guard.at_s:.1f} s: {guard.note}")
        parts.append(f'<path class="g-{css(kind)}" d="{glyph(shape, x, 8.5)}"><title>{note}</title></path>')
        label = printable(guard.label, limit=40)
        until = next((obstacle for obstacle in obstacles if obstacle > x), RIGHT)
        if x + 9 + CHARACTER_WIDTH * len(label) <= until:
            parts.append(f'<text class="tick" x="{x + 9:.1f}" y="12">{escape(label)}</text>')
    return "".join(parts)


def _row_name(name: str) -> str:
    return f'<text class="tick end" x="{LEFT - 6}" y="12">{name}</text>'
