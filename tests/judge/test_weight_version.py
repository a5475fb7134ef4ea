"""The version that an engine tells after an update, beside the weights that it answers from, on histories written by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.judge import claims
from harness.judge.claim import Context
from harness.judge.claims import judge
from harness.judge.detection import detection
from harness.judge.moments import Layer
from harness.judge.verdict import Verdict
from harness.observe.history import Event, EventKind, Request
from tests.judge.histories import before, canary, ended, event, history, load

CONTEXT = Context(scenario="s", engine_label="reference-1")
Things = list[Request | Event]


def update(after: str | None, *, given: str | None = "2", succeeded: bool = True) -> Things:
    """Return an update that was to give a version, and what is told afterwards."""
    told = {"version_before": "1", "version_given": given, "version_after": after}
    end: dict[str, Any] = {"was_answered": True, "because": "finish_weight_update answered 500: no", "how": "update"}
    return [
        event(5, EventKind.PUBLISH_STARTED, version="new", how="atomic"),
        event(5.1, EventKind.ROLLOUT_STARTED, how="update"),
        event(5.2, EventKind.RELOAD_STARTED, incarnation="old-1", expects="new", pause="wait", how="update"),
        event(5.5, EventKind.RELOAD_ENDED, incarnation="old-1", succeeded=succeeded, update=told, **end),
    ]


def checked(answer: str, at_s: float = 6.0) -> Event:
    return event(
        at_s,
        EventKind.CANARY_CHECKED,
        incarnation="old-1",
        answer=answer,
        difference_old=None,
        difference_new=None,
    )


@pytest.mark.parametrize(
    ("things", "expected"),
    [
        ([*update("2"), checked("new")], Verdict.HELD),
        ([*update("2"), canary(6, "old-1", "new")], Verdict.HELD),
        ([*update("2"), checked("old")], Verdict.BROKEN),
        ([*update("2"), checked("new"), canary(7, "old-1", "neither")], Verdict.BROKEN),
        ([*update("1"), checked("old")], Verdict.HELD),
        ([*update("1"), checked("new")], Verdict.BROKEN),
        ([*update("1", succeeded=False), checked("neither")], Verdict.BROKEN),
        ([*update("2"), checked("no answer (Refused: HTTP 500)")], Verdict.UNKNOWN),
        ([*update("2"), checked("ambiguous")], Verdict.UNKNOWN),
        ([*update("2"), checked("old", at_s=5.3)], Verdict.UNKNOWN),
        ([*update("2"), canary(6, "new-1", "old")], Verdict.UNKNOWN),
        ([*update(None), checked("old")], Verdict.UNKNOWN),
        ([*update("2", given=None), checked("old")], Verdict.UNKNOWN),
        ([], Verdict.UNKNOWN),
    ],
    ids=[
        "new under the new",
        "a user's canary too",
        "old under the new",
        "one mixture",
        "old under the old",
        "new under the old",
        "mixture under the old",
        "no answer",
        "ambiguous",
        "in the update",
        "another engine",
        "no version",
        "none given",
        "no update",
    ],
)
def test_version_told_truly(things: Things, expected: Verdict) -> None:
    found = judge((claims.version_told_truly(),), history(*before(), *things, *ended()), CONTEXT)
    assert next(each for each in found if each.claim == "version_told_truly()").verdict is expected


@pytest.mark.parametrize(
    ("answer", "layer"),
    [
        ("no answer (Refused: HTTP 500)", Layer.FIRST_REQUEST),
        ("neither", Layer.CANARY),
        ("old", Layer.STARTUP),
    ],
)
@pytest.mark.parametrize("client_s", [5.25, 5.35])
def test_engine_that_the_first_request_in_an_update_finds_dead(answer: str, layer: Layer, client_s: float) -> None:
    """A user who fails a moment before it changes nothing: who of them comes first is chance."""
    between = replace(checked(answer, at_s=5.3), data={**checked(answer).data, "is_first_request": True})
    users = [load(5.21, "old-1", took_s=0.01), load(client_s, "old-1", result="reset", took_s=0.01)]
    failed = [] if answer == "old" else users
    things = [*update(None, succeeded=False), between, *failed]
    assert detection(history(*before(), *things, *ended())).layer is layer


def test_what_was_given_and_what_is_told_stand_beside_who_noticed() -> None:
    seen = detection(history(*before(), *update("2"), checked("old"), *ended()))
    assert seen.layer is Layer.CANARY
    told = "the update gave version '2' after '1', and `/weight_info` then "
    assert seen.because == f"{told}says '2'; a canary before traffic was answered by: old"
    refused = detection(history(*before(), *update(None, succeeded=False), checked("old"), *ended()))
    assert refused.layer is Layer.STARTUP
    assert refused.because.startswith(
        "the engine refused the update: finish_weight_update answered 500: no; it went on"
    )
    assert refused.because.endswith(f"serving; {told}gives none")
