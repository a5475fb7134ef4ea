"""What one loader is given: fixed figures, or half of what was measured on this very processor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.engine.process_child import processor_name
from harness.errors import ScenarioInvalid
from harness.load import capacity
from harness.load.capacity import FILE_NAME, FIXED, Measured, capacity_here, cores_here
from harness.load.loaders import require_keepable
from harness.load.shape import constant


def measured(**changes: object) -> Measured:
    fields: dict[str, object] = {
        "processor": processor_name(),
        "cores": cores_here(),
        "events_per_s": 20_000.0,
        "requests_per_s": 1_200.0,
        "measured_at": "2026-11-30T09:00:00+00:00",
    }
    return Measured(**{**fields, **changes})  # type: ignore[arg-type]


def test_half_of_what_was_measured_is_given(tmp_path: Path) -> None:
    path = measured().save(tmp_path / "new")
    here = capacity_here(path.parent)

    assert (here.events_per_s, here.requests_per_s) == (10_000.0, 600.0)
    assert path.name == FILE_NAME
    assert [each.name for each in path.parent.iterdir()] == [FILE_NAME]


def test_the_refusal_names_the_measured_figure(tmp_path: Path) -> None:
    measured(events_per_s=2_000.0).save(tmp_path)
    shape = constant(rate_rps=40.0, output_tokens=50)
    require_keepable(shape, seed=1, horizon_s=20.0, cores=1, capacity=FIXED)

    with pytest.raises(ScenarioInvalid) as refused:
        require_keepable(shape, seed=1, horizon_s=20.0, cores=1, capacity=capacity_here(tmp_path))
    assert "take 600 and 1,000 (half of the 2,000 events and 1,200 requests per second measured on" in str(
        refused.value
    )
    assert processor_name() in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"processor": 1}',
        json.dumps(
            {"processor": "another", "cores": cores_here(), "events_per_s": 1, "requests_per_s": 1, "measured_at": ""}
        ),
        json.dumps(
            {
                "processor": processor_name(),
                "cores": cores_here(),
                "events_per_s": 0,
                "requests_per_s": 1,
                "measured_at": "",
            }
        ),
        json.dumps(
            {
                "processor": processor_name(),
                "cores": cores_here() + 1,
                "events_per_s": 9,
                "requests_per_s": 9,
                "measured_at": "",
            }
        ),
    ],
)
def test_anything_else_leaves_the_fixed_figures(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE_NAME).write_text(text)

    assert capacity_here(tmp_path) is FIXED
    assert capacity_here(tmp_path / "absent") is FIXED


def test_what_is_measured_is_found_where_checkpoints_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUT_CACHE", str(tmp_path))
    assert capacity_here() is FIXED
    measured().save(capacity.default_cache())

    assert capacity_here().events_per_s == 10_000.0
