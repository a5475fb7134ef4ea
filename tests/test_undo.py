"""The proof that a remedy undid a fault looks at every file of the live checkpoint, not at its weights alone."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest

from harness import Scenario, claims, faults, load, models
from harness.checkpoint.copy import private_copy
from harness.checkpoint.digest import weights_id
from harness.clock import Deadline
from harness.engine.launch import Launch
from harness.faults import Damage
from harness.ground import LIVE, Ground
from harness.guards import publish
from harness.judge.claim import Context
from harness.judge.own_answers import faults_undone
from harness.judge.verdict import Verdict
from harness.observe.history import EventKind, History, Recorder, load_history
from harness.operations import Operations
from harness.scenario import Mode
from harness.service import Service

CONTEXT = Context(scenario="undo", engine_label="reference-1.0", expected_layers=(), faults=())


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    cache = tmp_path_factory.mktemp("models")
    old, new = (
        models.tiny_llama(seed, hidden=32, heads=2, kv_heads=1, intermediate=64, vocabulary=300) for seed in (1, 2)
    )
    return old.build(cache), new.build(cache)


def after_remedy(fault: Damage, checkpoints: tuple[Path, Path], place: Path, *, damaged: bool) -> History:
    """Publish the new checkpoint, still damaged or not, as if a remedy had; then prove it undone."""
    old, new = checkpoints
    scenario = Scenario(
        name="undo",
        old=models.directory(old),
        new=models.directory(new),
        faults=(fault,),
        load=load.steady(rate_rps=1.0, canary_ratio=0.5, tail_s=1.0),
        unguarded=(claims.recovered(within_s=1.0),),
        guarded=(claims.recovered(within_s=1.0),),
    )
    recorder = Recorder(place / "history.jsonl")
    nothing = cast(Any, None)
    ground = Ground(
        scenario=scenario,
        mode=Mode.UNGUARDED,
        starter=nothing,
        recorder=recorder,
        goldens=nothing,
        old=old,
        new=new,
        work=place,
        cache=place,
        launch=Launch(checkpoint_root=place / "checkpoints", checkpoint_name=LIVE),
        api_key="",
        random=Random(1),
        deadline=Deadline.after(60.0),
    )
    operations = Operations(ground, Service(ground))
    source = new
    if damaged:
        source = private_copy(new, place / "damaged")
        assert fault.damage(source, old=old, random=Random(1)).proved
    root = operations.publication.root
    root.mkdir()
    publish.publish(source, root, name=LIVE)
    recorder.event("operator", EventKind.REMEDY_STARTED, what="the undamaged checkpoint")
    operations._undone = []
    try:
        operations.prove_undone()
    finally:
        recorder.close()
    return load_history(place / "history.jsonl")


ROPE = faults.mismatched_config(changes={"rope_theta": 500.0})


@pytest.mark.parametrize(
    ("fault", "file"),
    [
        (ROPE, "config.json"),
        (faults.permuted_tokenizer(), "tokenizer.json"),
        (faults.changed_chat_template(), "chat_template.jinja"),
        (faults.generation_defaults(), "generation_config.json"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_damage_that_leaves_the_weights_alone_is_not_undone_by_their_digest(
    fault: Damage, file: str, checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    history = after_remedy(fault, checkpoints, tmp_path, damaged=True)

    assert weights_id(tmp_path / "checkpoints" / LIVE) == weights_id(checkpoints[1])
    verdict, because, _ = faults_undone(history, CONTEXT)
    assert verdict is Verdict.UNKNOWN
    assert f"{file} " in because


def test_the_undamaged_checkpoint_is_proof(checkpoints: tuple[Path, Path], tmp_path: Path) -> None:
    history = after_remedy(ROPE, checkpoints, tmp_path, damaged=False)

    (undone,) = history.of(EventKind.FAULT_UNDONE)
    assert undone.data["proved"]
    assert faults_undone(history, CONTEXT)[0] is Verdict.HELD
    assert json.loads((tmp_path / "checkpoints" / LIVE / "config.json").read_text())["rope_theta"] != 500.0
