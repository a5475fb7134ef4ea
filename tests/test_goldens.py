"""Known-good answers that several runs on one machine measure at the same time."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness import goldens
from harness.checkpoint.models import tiny_llama
from harness.engine.engine import EngineIdentity
from harness.engine.launch import Launch
from harness.goldens import Goldens
from harness.guards.canary import Golden

IDENTITY = EngineIdentity(kind="reference", name="reference", version="1.0", build="b", hardware="h")


def test_two_runs_that_measure_the_same_at_once_both_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUT_CACHE", str(tmp_path))
    source = tiny_llama(seed=1).build(tmp_path)
    launch = Launch(checkpoint_root=source.parent, checkpoint_name=source.name)
    runs = [Goldens(Any, IDENTITY, api_key="k", seed=1, progress=lambda _: None) for _ in range(2)]  # type: ignore[arg-type]
    other: list[Golden] = []

    def measured(_: object, request: Any, **__: object) -> Any:
        golden = Golden(
            weights_id=request.weights_id,
            engine="reference-1.0",
            build="b",
            hardware="h",
            flags=(),
            prompts=request.prompts,
            prompt_logprobs=tuple((0.0,) * (len(prompt) - 1) for prompt in request.prompts),
            noise_max=0.0,
            noise_checks=1,
            tolerance=0.001,
        )

        def save(path: Path) -> None:
            partial = path.with_name(f"{path.name}.partial")
            partial.write_text(json.dumps(asdict(golden)))
            if not other:  # the other run comes in between, from its start to its end
                other.append(golden)
                other[0] = runs[1].of(source, launch, vocabulary_size=512)
            partial.replace(path)

        return SimpleNamespace(save=save)

    monkeypatch.setattr(goldens, "measure_golden", measured)
    assert runs[0].of(source, launch, vocabulary_size=512) == other[0]
    assert len(list((tmp_path / "goldens").iterdir())) == 1
