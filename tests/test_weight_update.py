"""An update over a transfer engine, end to end on the reference engine: the strict one refuses what a planted defect serves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from harness import Scenario, claims, faults, goldens, models, reload, rollout
from harness.checkpoint.copy import private_copy
from harness.checkpoint.manifest import read_checkpoint
from harness.engine.dev_api import Reply
from harness.engine.rollout import Flaw, How, Pause
from harness.errors import HarnessError, ScenarioInvalid
from harness.in_place import roll_in_place
from harness.judge.claim import Context
from harness.judge.claims import JUDGES
from harness.judge.detection import Detection
from harness.judge.moments import Layer
from harness.judge.verdict import Verdict
from harness.observe import noise
from harness.observe.history import EventKind, History, Recorder, load_history
from harness.weight_update import ABSENT_FILE, Sent, _left_out, _next_version
from tests.planted import DEFECT, Planted, PlantingStarter, run_on, short

TRULY = claims.version_told_truly()
CONTEXT = Context(scenario="s", engine_label="reference-1")
LAST_LAYER = 9  # tensors of a Llama layer

Record = Callable[..., tuple[list[Detection], list[History]]]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep checkpoints and known-good answers of these tests to themselves, measured without noise: there is none here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(noise, "NOISE_CHECKS", 4)
        patch.setattr(noise, "NOISE_CHECKS_DECODED", 2)
        patch.setattr(goldens, "forward_pass_for", lambda source: None)
        patch.setenv("ROLLOUT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def update(flaw: Flaw = Flaw.NONE) -> Scenario:
    how = rollout.update_weights(flaw=flaw, ready_limit_s=180.0)
    return short(f"update_{flaw}", claims=(TRULY,), rollout=how, guarded_rollout=how, limit_s=900.0)


@pytest.fixture
def record(tmp_path: Path) -> Record:
    """Give a function that records updates without load, all in one run, on engines with planted defects."""

    def play(*flaws: Flaw, planted: Planted | None = None) -> tuple[list[Detection], list[History]]:
        with run_on(PlantingStarter(planted or {}), tmp_path) as run:
            seen = [run.start_only(update(flaw), number) for number, flaw in enumerate(flaws, start=1)]
        return [detected for detected, _ in seen], [load_history(place / "history.jsonl") for _, place in seen]

    return play


def truly(history: History) -> Verdict:
    return JUDGES["version_told_truly"](history, CONTEXT)[0]


def told(history: History) -> dict[str, object]:
    return dict(history.of(EventKind.RELOAD_ENDED)[0].data["update"])


def test_good_updates_share_an_engine_and_each_gives_a_version_of_its_own(record: Record) -> None:
    detected, histories = record(Flaw.NONE, Flaw.REQUEST_BETWEEN)
    assert [seen.layer for seen in detected] == [Layer.HARMLESS] * 2, detected
    assert [truly(history) for history in histories] == [Verdict.HELD] * 2
    assert [told(history)["version_after"] for history in histories] == ["1", "2"]
    assert "`/weight_info` then says '1'" in detected[0].because
    calls = [call["call"] for call in histories[0].of(EventKind.RELOAD_ENDED)[0].data["calls"]]
    chunks = ["update_weights"] * 2
    assert calls[:3] == ["pause", "init_weight_transfer_engine", "start_weight_update"]
    assert calls[3:] == [*chunks, "finish_weight_update", "reset_prefix_cache", "resume"]
    between = [e for e in histories[1].of(EventKind.CANARY_CHECKED) if "first chunk" in e.data.get("when", "")]
    assert [event.data["answer"] for event in between] == ["old"]
    assert "handed_on" in histories[1].of(EventKind.ENGINE_STARTING)[0].data["launch"]


@pytest.mark.parametrize("flaw", [Flaw.PART_NOT_SENT, Flaw.CHUNK_REFUSED])
def test_strict_engine_refuses_an_incomplete_update_and_tells_the_version_that_it_had(
    record: Record, flaw: Flaw
) -> None:
    (seen,), (history,) = record(flaw)
    assert (seen.layer, "refused the update" in seen.because, "went on serving" in seen.because) == (
        Layer.STARTUP,
        True,
        True,
    ), seen.because
    assert truly(history) is Verdict.HELD
    assert (told(history)["version_given"], told(history)["version_after"]) == ("1", "default")


@pytest.mark.parametrize(("flaw", "answer"), [(Flaw.NOTHING_SENT, "old"), (Flaw.LAYER_NOT_SENT, "neither")])
def test_other_weights_under_the_new_version_are_noticed_and_the_claim_breaks(
    record: Record, flaw: Flaw, answer: str
) -> None:
    (seen,), (history,) = record(flaw, planted={"old-1": {DEFECT: "finishes_incomplete_update"}})
    assert seen.layer is Layer.CANARY
    assert f"was answered by: {answer}" in seen.because
    told = "the update gave version '1' after 'default', and `/weight_info` then says '1'; a canary"
    assert seen.because.startswith(told)
    assert truly(history) is Verdict.BROKEN


def test_engine_that_dies_of_a_refused_chunk_is_told_with_the_refusal(record: Record) -> None:
    (seen,), (history,) = record(Flaw.CHUNK_REFUSED, planted={"old-1": {DEFECT: "dies_after_failed_reload"}})
    assert seen.layer is Layer.STARTUP
    assert 'cannot be read, the first is "' in seen.because
    assert "then: a canary" in seen.because
    assert truly(history) is Verdict.UNKNOWN


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.tiny_llama(seed=2).build(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(
    ("flaw", "chunks", "left_out"),
    [
        (Flaw.NONE, 2, 0),
        (Flaw.NOTHING_SENT, 0, None),
        (Flaw.LAYER_NOT_SENT, 2, LAST_LAYER),
        (Flaw.PART_NOT_SENT, 2, 1),
        (Flaw.REQUEST_BETWEEN, 2, 0),
    ],
)
def test_what_is_sent_and_what_is_left_out_are_the_checkpoint(
    checkpoint: Path, flaw: Flaw, chunks: int, left_out: int | None
) -> None:
    places = {(tensor.shard, tensor.name) for tensor in read_checkpoint(checkpoint).tensors}
    sent = Sent.of(checkpoint, flaw)
    there = [(file, name) for chunk in sent.chunks for file, names in chunk.items() for name in names]
    assert len(sent.chunks) == chunks
    assert len(sent.left_out) == (len(places) if left_out is None else left_out)
    assert len(there) == len(set(there))
    assert set(there) == {place for place in places if place[1] not in sent.left_out}


def test_refused_chunk_is_the_second_and_names_a_file_that_is_not_there(checkpoint: Path) -> None:
    first, second = Sent.of(checkpoint, Flaw.CHUNK_REFUSED).chunks
    assert list(second) == [ABSENT_FILE]
    assert ABSENT_FILE not in first
    assert not (checkpoint / ABSENT_FILE).exists()


def test_part_of_a_fused_tensor_is_of_the_last_layer() -> None:
    names = [f"model.layers.{layer}.mlp.{part}.weight" for layer in (2, 10) for part in ("down_proj", "gate_proj")]
    assert list(_left_out(names, Flaw.PART_NOT_SENT)) == ["model.layers.10.mlp.gate_proj.weight"]


@pytest.mark.parametrize("flaw", [Flaw.LAYER_NOT_SENT, Flaw.PART_NOT_SENT])
def test_model_of_other_names_is_refused(flaw: Flaw) -> None:
    with pytest.raises(HarnessError, match="leaves out nothing: of 1 tensors"):
        _left_out(["transformer.h.0.weight"], flaw)


@pytest.mark.parametrize("flaw", [Flaw.LAYER_NOT_SENT, Flaw.PART_NOT_SENT])
def test_an_update_that_cannot_be_made_leaves_the_engine_as_it_is(
    flaw: Flaw, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = private_copy(checkpoint, tmp_path / "live")
    renamed = faults.rename_prefix("model.layers.", to="model.blocks.")
    assert renamed.damage(live, old=checkpoint, random=Random(1)).proved
    called: list[str] = []

    class Api:
        def __getattr__(self, call: str) -> Callable[..., Reply]:
            def answer(**_: object) -> Reply:
                called.append(call)
                return Reply(call=call, status=200, took_s=0.0, said="")

            return answer

    monkeypatch.setattr(reload, "DevApi", lambda **how: Api())
    recorder = Recorder(tmp_path / "history.jsonl")
    ground = SimpleNamespace(
        scenario=SimpleNamespace(unguarded=(), guarded=()),
        goldens=SimpleNamespace(old=SimpleNamespace(deep=None), new=SimpleNamespace(deep=None)),
        recorder=recorder,
        api_key="",
        deadline=SimpleNamespace(remaining_s=lambda: 60.0),
    )
    service: Any = SimpleNamespace(ground=ground)
    engine: Any = SimpleNamespace(endpoint="http://127.0.0.1:1", incarnation="old-1")
    how = rollout.update_weights(flaw=flaw)
    try:
        with pytest.raises(HarnessError, match=f'flaw "{flaw}" leaves out nothing: of 21 tensors none is named'):
            roll_in_place(engine, how, service=service, live=live, is_gated=False)
    finally:
        recorder.close()
    assert called == []
    assert recorder.snapshot().last(EventKind.RELOAD_STARTED) is None


@pytest.mark.parametrize(("before", "given"), [("default", "1"), (None, "1"), ("1", "2"), ("41", "42"), ("v3", "1")])
def test_an_update_gives_another_version_than_there_is(before: str | None, given: str) -> None:
    assert _next_version(before) == given


def test_flaw_is_a_known_one_and_the_remedy_is_a_start() -> None:
    flawed = rollout.update_weights(flaw="request_between")
    assert (flawed.how, flawed.flaw, flawed.pause) == (How.UPDATE, Flaw.REQUEST_BETWEEN, Pause.NONE)
    assert rollout.update_weights().pause is Pause.WAIT
    assert flawed.as_remedy(beside=False).how is How.RESTART
    with pytest.raises(ScenarioInvalid, match='flaw is "half"'):
        rollout.update_weights(flaw="half")


@pytest.mark.parametrize("other", [["nothing_sent"], {"pause": "wait"}, 3, None], ids=repr)
def test_what_is_no_text_is_refused_in_words(other: Any) -> None:
    with pytest.raises(ScenarioInvalid, match=r'flaw is ".*", expected one of none, nothing_sent'):
        rollout.update_weights(flaw=other)
    with pytest.raises(ScenarioInvalid, match=r'pause is ".*", expected True, False or one of wait'):
        rollout.reload_in_place(pause=other)
    with pytest.raises(ScenarioInvalid, match=r'an adapter is updated ".*", expected one of in_place'):
        rollout.update_adapter(other)
