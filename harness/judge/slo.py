"""What users were promised: limits on the latencies of one request, each with its unit in its name."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from harness.errors import ScenarioInvalid, UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Limits that one request must keep to count as good; None: there is no such limit. Counted from the planned start.

    Raises: ScenarioInvalid naming the limit that is no positive number, or when there is none at all.
    """

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    def __post_init__(self) -> None:
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in given.items():
            if value is not None and (isinstance(value, bool) or not (math.isfinite(value) and value > 0)):
                raise ScenarioInvalid(f"slo {name} is {value!r}: it must be a number of milliseconds above zero")
        if all(value is None for value in given.values()):
            raise ScenarioInvalid(f"slo sets no limit: give at least one of {', '.join(given)}")

    def as_json(self) -> dict[str, float]:
        """Return the limits that there are."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}


def parse_slo(text: str) -> Slo:
    """Read `ttft_ms=200,tpot_ms=40,e2e_ms=2000`.

    Raises: UsageError naming the part that is unknown, has no unit, or is no positive number.
    """
    known = [field.name for field in fields(Slo)]
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if f"{name}_ms" in known:
            raise UsageError(f'slo "{part.strip()}" has no unit: write {name}_ms={value or "NUMBER"}')
        if name not in known:
            raise UsageError(f'slo "{part.strip()}" is unknown; limits: {", ".join(known)}')
        try:
            limits[name] = float(value)
        except ValueError:
            raise UsageError(f'slo {name} must be a number of milliseconds, got "{value}"') from None
    try:
        return Slo(**limits)
    except ScenarioInvalid as error:
        raise UsageError(str(error)) from None
