"""Compare what transformers builds with the built-in formulas, on every captured layout and damages of it.

Runs in an interpreter that has torch and transformers; prints one JSON line a layout, for the slow tests to judge.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable

from harness.guards.finding import BLOCKING, PreflightFinding
from harness.guards.layout import layout_findings
from harness.guards.transformers_layout import deep_findings
from tests.guards.layout_files import Layout, load, names


def main(only: str = "") -> None:
    """Print what each of the two says about the layout as captured, and where they differ about damaged ones."""
    for name in names():
        if only not in name:
            continue
        layout = load(name)
        damages = list(damaged(layout))
        said = {what: brief(deep_findings(broken.as_checkpoint())) for what, broken in damages}
        by_formula = {what: brief(layout_findings(broken.as_checkpoint())) for what, broken in damages}
        result = {
            "name": name,
            "has_formula": layout.has_formula,
            "good": brief(deep_findings(layout.as_checkpoint())),
            "damages": len(damages),
            "missed": [what for what, found in said.items() if not found],
            "different": {what: [said[what], by_formula[what]] for what in said if said[what] != by_formula[what]},
        }
        print(json.dumps(result), flush=True)


def brief(findings: Iterable[PreflightFinding]) -> list[list[str]]:
    """Return id, severity and place of what blocks."""
    return sorted([finding.id, finding.severity, finding.where] for finding in findings if finding.severity in BLOCKING)


def damaged(layout: Layout) -> Iterable[tuple[str, Layout]]:
    """Yield one damage of each kind to the first tensor of each kind of name, and a layer too many and too few."""
    seen = set()
    for name, shape in layout.shapes.items():
        kind = "".join(character for character in name if not character.isdigit())
        if kind in seen:
            continue
        seen.add(kind)
        rest = {other: one for other, one in layout.shapes.items() if other != name}
        yield f"drop {name}", layout.with_shapes(rest)
        yield f"rename {name}", layout.with_shapes({**rest, f"{name}.old": shape})
        if len(shape) == 2 and shape[0] != shape[1]:
            yield f"transpose {name}", layout.with_shapes({**rest, name: shape[::-1]})
        for dimension in range(len(shape)):
            wide = (*shape[:dimension], shape[dimension] + 32, *shape[dimension + 1 :])
            yield f"widen {dimension} of {name}", layout.with_shapes({**rest, name: wide})


if __name__ == "__main__":
    main(*sys.argv[1:])
