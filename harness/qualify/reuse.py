"""What an earlier call of a qualification left behind, and whether it is about what is asked now.

The directory of a qualification is named after both sides. A name may come to mean another build, and the same sides may be
asked about with other checkpoints, launch arguments or scenarios: what was seen then answers another question.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.adapted import adapted
from harness.checkpoint.stamp import stamps_of
from harness.qualify.evidence import Known
from harness.report.store import MALFORMED, RunRecord
from harness.scenario import Mode, Scenario
from harness.settings import Settings

# Of the settings of a run, those that decide what is seen in it; which engine it was, its build says.
DECISIVE = (
    "model",
    "old",
    "new",
    "max_model_len",
    "engine_arguments",
    "gpus",
    "memory_gib",
    "patience",
    "rate_rps",
    "seed",
)
NOT_DECLARED = ("about", "old", "new")  # prose, and the checkpoints: they change places from scenario to scenario


def why_of_another(run: Path, settings: Settings, now: Known, *, ignored: Sequence[str] = ()) -> str:
    """Say why a run that an earlier call made is not about what is asked now; empty when it is, or does not say.

    `ignored` are settings that decide nothing there.
    """
    try:
        fields = json.loads((run / "run.json").read_text(encoding="utf-8"))
        label, made = fields.get("engine_label"), fields.get("engine_build")
    except (OSError, *MALFORMED) as error:
        return f"it cannot be read: {error}"
    if label and now.label and label != now.label:
        return f"it is on {label}, and {now.label} is there now"
    if made and now.builds and made not in now.builds:
        return f'it is of build "{made}", and "{", ".join(now.builds)}" is there now'
    stored, asked = fields.get("settings") or {}, _as_stored(settings.as_json())
    for name in DECISIVE:
        if name not in ignored and name in stored and stored[name] != asked[name]:
            return f"its {name} is {json.dumps(stored[name])}, and {json.dumps(asked[name])} is asked for"
    stamps = fields.get("checkpoints")
    if "old" not in ignored and stamps and stamps != stamps_of(settings):
        return "its checkpoints have been written since"
    return ""


def as_declared(settings: Settings) -> Settings:
    """Return settings that replace nothing that scenarios declare."""
    return replace(settings, model=None, old=None, new=None, engine_arguments=())


def as_asked(run: RunRecord, scenarios: Sequence[Scenario], settings: Settings) -> tuple[RunRecord, list[str]]:
    """Return a run without the guarded scenarios that are declared otherwise now, and their names."""
    now = {scenario.name: _declared(adapted(scenario, settings)) for scenario in scenarios}
    changed = [record for record in run.scenarios if record.mode == Mode.GUARDED and _differs(record.directory, now)]
    kept = tuple(record for record in run.scenarios if record not in changed)
    return replace(run, scenarios=kept), [record.name for record in changed]


def _declared(scenario: Scenario) -> dict[str, Any]:
    """Return a scenario as a guarded run of it is stored, but for what may differ."""
    claims = [{"name": claim.name, "parameters": dict(claim.parameters)} for claim in scenario.claims(Mode.GUARDED)]
    return _as_stored(_compared({"declaration": dict(scenario.declaration()), "claims": claims}))


def _differs(directory: Path, now: Mapping[str, dict[str, Any]]) -> bool:
    stored = json.loads((directory / "scenario.json").read_text(encoding="utf-8"))
    name = stored["declaration"]["name"]
    if name not in now or "timeline" not in stored["declaration"]:  # not asked for, or it does not say
        return False
    return _compared({key: stored[key] for key in ("declaration", "claims")}) != now[name]


def _compared(stored: Mapping[str, Any]) -> dict[str, Any]:
    declared = {name: value for name, value in stored["declaration"].items() if name not in NOT_DECLARED}
    return {**stored, "declaration": declared}


def _as_stored(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is read back after this was written."""
    read: dict[str, Any] = json.loads(json.dumps(value, default=str))
    return read
