"""A reload in place, end to end on the reference engine: good ones do no harm, and each planted defect is noticed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness import Guard, Scenario, claims, faults, goldens, load, rollout
from harness.engine.dev_api import Reply
from harness.engine.rollout import How
from harness.errors import ScenarioInvalid
from harness.guards.engine_api import EngineApi
from harness.judge.claim import Claim, Context
from harness.judge.claims import JUDGES
from harness.judge.detection import Detection
from harness.judge.moments import Layer
from harness.judge.reloads import reloads
from harness.judge.verdict import Verdict
from harness.observe import noise
from harness.observe.history import Event, EventKind, History, Recorder, load_history
from harness.reload import OF_NO_BYTES, InPlace, compared
from harness.scenario import Mode
from harness.under_way import UnderWay, Witnessed, _Stream
from tests.planted import DEFECT, Planted, PlantingStarter, require, run_on, short

DOWN = "model.layers.1.mlp.down_proj.weight"
READY_LIMIT_S = 180.0  # of an engine that is ready within a second, on a machine that others use
LIMIT_S = 900.0  # of a scenario of seconds, likewise: past it canaries get no time to answer
CONTEXT = Context(scenario="s", engine_label="reference-1")
SAFELY = rollout.reload_in_place(ready_limit_s=READY_LIMIT_S)
CARELESSLY = rollout.reload_in_place(reset_prefix_cache=False, pause=False, ready_limit_s=READY_LIMIT_S)
CLAIMED = (claims.answers_unmixed(), claims.checksums_trusted())

Record = Callable[..., tuple[list[Detection], list[History]]]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep checkpoints and known-good answers of these tests to themselves.

    The reference engine gives the same answer to the last bit, also under load, and computes it with our own forward pass: to
    ask it forty times how far noise moves it, and to compute it again, took most of the time that these tests took.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(noise, "NOISE_CHECKS", 4)
        patch.setattr(noise, "NOISE_CHECKS_DECODED", 2)
        patch.setattr(goldens, "forward_pass_for", lambda source: None)
        patch.setenv("ROLLOUT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def reload(
    name: str, *injected: faults.Fault, how: rollout.Rollout = SAFELY, claimed: Sequence[Claim] = CLAIMED
) -> Scenario:
    return short(name, *injected, claims=tuple(claimed), rollout=how, guarded_rollout=how, limit_s=LIMIT_S)


@pytest.fixture
def record(tmp_path: Path) -> Record:
    """Give a function that records reloads without load, all in one run, on engines with planted defects."""

    def play(*scenarios: Scenario, planted: Planted | None = None) -> tuple[list[Detection], list[History]]:
        starter = PlantingStarter(planted or {})
        with run_on(starter, tmp_path) as run:
            seen = [run.start_only(scenario, number) for number, scenario in enumerate(scenarios, start=1)]
        return [detected for detected, _ in seen], [load_history(place / "history.jsonl") for _, place in seen]

    return play


def judged(claim: Claim, history: History) -> Verdict:
    return JUDGES[claim.name](history, CONTEXT, **claim.parameters)[0]


def starts(history: History) -> list[str]:
    """Return the incarnations that were really started: not those taken over."""
    events = history.of(EventKind.ENGINE_STARTING)
    return [e.data["incarnation"] for e in events if "handed_on" not in e.data["launch"]]


def test_good_reloads_do_no_harm_and_share_one_engine_with_others_that_it_survives(record: Record) -> None:
    good, quick = reload("good"), (claims.checksums_trusted(),)  # answers under way take their time
    again = reload("again", claimed=quick)
    refused = reload("refused", faults.drop_tensor(DOWN), claimed=quick)
    detected, histories = record(good, again, refused, again)
    assert [seen.layer for seen in detected] == [Layer.HARMLESS, Layer.HARMLESS, Layer.STARTUP, Layer.HARMLESS]
    assert [len(starts(history)) for history in histories] == [1, 0, 0, 1]  # what refused is not used again
    assert judged(claims.answers_unmixed(), histories[0]) is Verdict.HELD
    assert judged(claims.checksums_trusted(), histories[1]) is Verdict.HELD
    assert "missing_tensor" in detected[2].because
    assert "went on serving" in detected[2].because
    pause, *_, resume = histories[0].of(EventKind.RELOAD_ENDED)[0].data["calls"]
    assert (pause["call"], resume["call"]) == ("pause", "resume")
    called = reloads(histories[0])[0]
    assert called.started_ns < called.call_ns[0] < called.call_ns[1] < called.ended_ns <= called.after_ns


@pytest.mark.parametrize(
    ("defect", "injected", "how", "layer", "said"),
    [
        ("keeps_prefix_cache", (), CARELESSLY, Layer.CANARY, "the KV cache is stale"),
        ("reload_ignores_missing_tensor", (faults.drop_tensor(DOWN),), SAFELY, Layer.CANARY, "neither"),
        ("dies_after_failed_reload", (faults.drop_tensor(DOWN),), SAFELY, Layer.STARTUP, "then: a canary"),
        ("checksums_of_nothing", (), SAFELY, Layer.HARMLESS, "21 of 21 parameters the digest of no bytes"),
    ],
)
def test_planted_defect_is_noticed(
    record: Record, defect: str, injected: tuple[faults.Fault, ...], how: rollout.Rollout, layer: Layer, said: str
) -> None:
    claimed = (claims.checksums_trusted(),)  # nothing is under way: the strict engine would refuse
    (seen,), (history,) = record(
        reload("defective", *injected, how=how, claimed=claimed), planted={"old-1": {DEFECT: defect}}
    )
    assert (seen.layer, said in seen.because) == (layer, True), seen.because
    if defect == "checksums_of_nothing":
        assert judged(claims.checksums_trusted(), history) is Verdict.BROKEN


@pytest.mark.parametrize("pause", ["none", "keep"])
def test_answers_under_way_are_mixed_by_an_engine_that_reloads_under_them_and_not_by_the_strict_one(
    record: Record, pause: str
) -> None:
    unpaused = reload("unpaused", how=rollout.reload_in_place(pause=pause, ready_limit_s=READY_LIMIT_S))
    (strict,), _ = record(unpaused)
    assert strict.layer is Layer.STARTUP
    assert "pause first" in strict.because
    (mixing,), (history,) = record(unpaused, planted={"old-1": {DEFECT: "reloads_under_requests"}})
    assert mixing.layer is Layer.CANARY
    assert "tokens of both checkpoints" in mixing.because
    assert judged(claims.answers_unmixed(), history) is Verdict.BROKEN


def test_gate_behind_a_reload_ends_a_mixture_and_a_restart_is_the_remedy(tmp_path: Path) -> None:
    scenario = short(
        "gated",
        faults.drop_tensor(DOWN),
        claims=(claims.detected_by("canary"), claims.recovered(within_s=90.0)),
        load=load.steady(
            rate_rps=5.0, canary_ratio=0.5, tail_s=0.5, output_tokens=4
        ),  # patient: nothing here is about speed
        limit_s=180.0,
        rollout=SAFELY,
        guarded_rollout=SAFELY,
        guards=(Guard.CANARY_GATE,),
    )
    starter = PlantingStarter({"old-1": {DEFECT: "reload_ignores_missing_tensor"}})
    with run_on(starter, tmp_path) as run:
        seen = run.scenario(scenario, Mode.GUARDED)
        good, place = run.start_only(reload("good"), 1)  # which takes no engine that reads elsewhere
    assert good.layer is Layer.HARMLESS
    assert len(starts(load_history(place / "history.jsonl"))) == 1
    require(
        seen, detected_by=Verdict.HELD, recovered=Verdict.HELD, faults_proved=Verdict.HELD, faults_undone=Verdict.HELD
    )
    stopped = seen.history.of(EventKind.ENGINE_STOPPED)[0].data
    assert (stopped["incarnation"], stopped["how"]) == ("old-1", "refused by the canary gate")
    assert seen.history.of(EventKind.REMEDY_ENDED)[0].data["completed"]


ONE, TWO, THREE = ("0" * 63 + digit for digit in "123")
NESTED = {"0": {"a": ONE, "b": TWO}, "1": {"a": ONE, "b": TWO}}


@pytest.mark.parametrize(
    ("before", "after", "verdict", "said"),
    [
        ({"a": ONE}, {"a": TWO}, Verdict.HELD, "all 1 parameters"),
        (NESTED, {"0": {"a": TWO, "b": TWO}, "1": {"a": TWO, "b": TWO}}, Verdict.BROKEN, "0/b, 1/b"),
        (NESTED, {"0": {"a": TWO, "b": ONE}, "1": {"a": TWO, "b": ONE}}, Verdict.HELD, "all 4 parameters"),
        ([{"a": ONE}, {"a": ONE}], [{"a": TWO}, {"a": ONE}], Verdict.BROKEN, "1/a"),
        ([{"a": ONE}, {"a": ONE}], [{"a": TWO}, {"a": "sha256:" + OF_NO_BYTES}], Verdict.BROKEN, "1/a"),
        ({"a": ONE, "b": ONE}, {"a": TWO}, Verdict.BROKEN, "1 were given before or after it only (for example b)"),
        ({"a": ONE}, {"a": TWO, "b": TWO}, Verdict.BROKEN, "1 were given before or after it only (for example b)"),
        ([{"a": ONE}, {"a": ONE}], [{"a": TWO}], Verdict.BROKEN, "for example 1/a"),
        (
            {"a": {"sha256": ONE, "dtype": "float32"}},
            {"a": {"sha256": TWO}},
            Verdict.UNKNOWN,
            "'float32' at \"a/dtype\"",
        ),
        ({"a": 5}, {"a": 6}, Verdict.UNKNOWN, '5 at "a" is no hexadecimal digest'),
        (ONE, TWO, Verdict.UNKNOWN, "in place of all"),
        ([{}], [{}], Verdict.UNKNOWN, "no digest"),
        ({}, {}, Verdict.UNKNOWN, "HTTP 200"),
    ],
)
def test_checksums_are_read_of_every_rank_or_nothing_is_known(
    before: object, after: object, verdict: Verdict, said: str
) -> None:
    replies = [
        Reply(call="weight_checker", status=200, took_s=0.1, said="", body=body)
        for body in ({"checksums": before}, {}, {"checksums": after}, {})
    ]
    ended: dict[str, Any] = {"incarnation": "old-1", "succeeded": True, "weights": compared(replies)}
    event = Event(id="e1", at_ns=1, source="operator", kind=EventKind.RELOAD_ENDED, data=ended)
    found, because, _ = JUDGES["checksums_trusted"](History(requests=(), events=(event,)), CONTEXT)
    assert found is verdict
    assert said in because


@pytest.mark.parametrize(
    ("last_ns", "is_failed", "expected"),
    [
        (19, False, (1, 0, 0, 0)),
        (20, False, (1, 0, 1, 0)),
        (30, False, (1, 0, 1, 0)),
        (31, False, (1, 1, 0, 0)),
        (31, True, (1, 0, 0, 1)),
    ],
)
def test_answers_under_way_are_told_apart_by_their_last_token(
    last_ns: int, is_failed: bool, expected: tuple[int, ...]
) -> None:
    answers = UnderWay(EngineApi(url="http://127.0.0.1:1", limit_s=1.0), "m", [], max_tokens=2)
    stream = _Stream(prompt=(1,), tokens=[1, 2], token_ns=[5, last_ns], failed="reset" if is_failed else "")
    answers._streams = [stream]
    seen = answers.witness(10, call_ns=20, after_ns=30)
    assert (seen.under_way, seen.mixed, seen.undecided, seen.failed) == expected


@pytest.mark.parametrize(
    ("under_way", "mixed", "undecided", "failed", "answer"),
    [
        (4, 0, 3, 0, "new"),
        (4, 1, 0, 0, "neither"),
        (0, 0, 0, 0, "ambiguous"),
        (4, 0, 0, 4, "ambiguous"),
        (4, 0, 4, 0, "ambiguous"),
    ],
    ids=["whole", "mixed", "none under way", "all failed", "all undecided"],
)
def test_only_whole_answers_under_way_are_right(
    tmp_path: Path, under_way: int, mixed: int, undecided: int, failed: int, answer: str
) -> None:
    recorder = Recorder(tmp_path / "history.jsonl")
    recorder.event("operator", EventKind.RELOAD_STARTED, incarnation="old-1", expects="new")
    service: Any = SimpleNamespace(ground=SimpleNamespace(recorder=recorder))
    engine: Any = SimpleNamespace(incarnation="old-1")
    seen = Witnessed(under_way=under_way, mixed=mixed, undecided=undecided, failed=failed, because="")
    answers: Any = SimpleNamespace(witness=lambda *_, **__: seen)
    InPlace(service=service, rollout=SAFELY)._witness(engine, answers, 0, succeeded=True)
    recorder.close()
    [checked] = recorder.snapshot().of(EventKind.CANARY_CHECKED)
    assert checked.data["answer"] == answer


def test_faults_of_a_start_cannot_act_in_a_reload() -> None:
    with pytest.raises(ScenarioInvalid, match="an engine that reloads is not started"):
        reload("launched", faults.launch_dtype("float16"))


def test_pause_is_one_of_three() -> None:
    assert rollout.reload_in_place(pause=True) == rollout.reload_in_place(pause="wait")
    assert rollout.reload_in_place(pause=False) == rollout.reload_in_place(pause="none")
    with pytest.raises(ScenarioInvalid, match='pause is "abort"'):
        rollout.reload_in_place(pause="abort")


def test_remedy_of_a_reload_is_a_start() -> None:
    assert SAFELY.as_remedy(beside=False).how is How.RESTART
    assert SAFELY.as_remedy(beside=True).how is How.BLUE_GREEN
    assert rollout.blue_green().as_remedy(beside=False).how is How.BLUE_GREEN
