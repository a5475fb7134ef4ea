"""What a colour says in the lanes, a shape says too: not everybody sees red from green."""

from __future__ import annotations

import re

from harness.observe.history import EventKind
from harness.report.plots import timeline_svg


def test_bad_health_is_taller_than_good_health_in_the_lane_and_in_the_legend(unguarded, make_scenario) -> None:
    story = unguarded()
    story.event(17.0, EventKind.HEALTH, incarnation="new-2", status=503, took_ms=2.0)
    svg = str(timeline_svg(make_scenario(story)))
    for pattern in (r'<rect class="h-{}" [^>]*height="([\d.]+)"', r'<rect class="h-{} swatch" [^>]*height="([\d.]+)"'):
        good, bad = ({float(h) for h in re.findall(pattern.format(kind), svg)} for kind in ("healthy", "unhealthy"))
        assert good
        assert bad
        assert min(bad) >= 2 * max(good)
