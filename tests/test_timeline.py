"""The wait for somebody to notice, where the scenario's own time is over before that wait is."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness import claims
from harness.clock import Deadline, now_ns
from harness.errors import LoadBroken
from harness.judge.claim import Context
from harness.judge.claims import judge
from harness.judge.detection import detection
from harness.judge.moments import Layer
from harness.judge.verdict import Verdict
from harness.observe.history import EventKind, History, Recorder
from harness.scenario import Mode
from harness.timeline import Timeline
from tests.judge.histories import before, ended, event, history, load, remedy, rollout
from tests.planted import UNSEEN, short

SCENARIO = short("cut", UNSEEN, claims=(claims.detected_by("canary"),))
CONTEXT = Context(scenario="cut", engine_label="reference-1", expected_layers=(Layer.CANARY,) * 3)
CLAIMS = (claims.detected_by("canary"), claims.detected_within(limit_s=3.0), claims.layer_as_expected())


def played(directory: Path, *, left_s: float, traffic: Any = None) -> History:
    """Carry out a timeline whose scenario has so much time left, on operations that do nothing."""
    recorder = Recorder(directory / "history.jsonl")

    def began(kind: EventKind) -> Any:
        return lambda: recorder.event("operator", kind)

    operations: Any = SimpleNamespace(
        service=SimpleNamespace(look_after=lambda: None, traffic=traffic),
        publish_new=began(EventKind.PUBLISH_STARTED),
        start_rollout=began(EventKind.ROLLOUT_STARTED),
        remedy=began(EventKind.REMEDY_STARTED),
        rollout_succeeded=True,
    )
    ground: Any = SimpleNamespace(
        recorder=recorder, scenario=SCENARIO, mode=Mode.UNGUARDED, deadline=Deadline.after(left_s)
    )
    with closing(recorder):
        Timeline(ground, operations, now_ns()).carry_out()
    return recorder.snapshot()


def test_a_wait_that_was_cut_says_so(tmp_path: Path) -> None:
    seen = played(tmp_path, left_s=0.05)
    assert seen.first(EventKind.REMEDY_STARTED) is not None
    assert detection(seen).layer is Layer.NEVER
    assert "time" in detection(seen).doubt


def unnoticed(**more: Any) -> History:
    users = [load(6.2 + at * 0.25, "new-1", took_s=0.05) for at in range(8)]
    told = event(8.9, EventKind.DETECTION_SEEN, layer="never", because="nobody noticed anything", **more)
    return history(*before(), *rollout(), *users, told, *remedy(), *ended())


@pytest.mark.parametrize("claim", CLAIMS, ids=str)
def test_nobody_had_the_time_to_notice_is_unknown_and_nobody_noticed_is_broken(claim: claims.Claim) -> None:
    for seen, expected in ((unnoticed(is_cut=True), Verdict.UNKNOWN), (unnoticed(), Verdict.BROKEN)):
        found = next(finding for finding in judge((claim,), seen, CONTEXT) if finding.claim == str(claim))
        assert found.verdict is expected, found.because


def test_a_scenario_whose_load_has_died_ends_at_once(tmp_path: Path) -> None:
    """Without canaries nobody notices anything: waiting would only spend the time that is left."""

    def require_running() -> None:
        raise LoadBroken("loader 0 died")

    with pytest.raises(LoadBroken, match="loader 0 died"):
        played(tmp_path, left_s=60.0, traffic=SimpleNamespace(require_running=require_running))
