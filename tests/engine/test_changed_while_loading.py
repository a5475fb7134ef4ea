"""Real vLLM is seen in the middle of a weight file, and not where it lists files or reads headers."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from engine_kinds import CONTAINER, PROCESS, EngineKind, opened

from harness import faults
from harness.checkpoint.copy import private_copy
from harness.checkpoint.models import tiny_llama
from harness.engine.launch import Launch
from harness.errors import EngineNotReady
from harness.faults.fault import Surroundings
from harness.faults.load_progress import Load

LARGE = {"hidden": 256, "layers": 4, "intermediate": 768, "vocabulary": 10240}  # 16 MB
KINDS = (
    pytest.param(CONTAINER, id="container", marks=(pytest.mark.docker, pytest.mark.slow)),
    pytest.param(PROCESS, id="process", marks=pytest.mark.slow),
)


@pytest.mark.parametrize("kind", KINDS)
def test_vllm_is_stopped_in_the_middle_of_its_weights(kind: EngineKind, tmp_path: Path) -> None:
    old, new = (tiny_llama(seed, **LARGE).build(tmp_path / "models") for seed in (1, 2))
    root = tmp_path / "checkpoints"
    live = private_copy(new, root / "live")
    load = Load.of(live / "model.safetensors")
    fault = faults.changed_while_loading("cut")
    with opened(kind, tmp_path) as starter:
        engine = starter.start(Launch(checkpoint_root=root, checkpoint_name="live"), incarnation="new-1")
        around = Surroundings(live=live, other=old, work=tmp_path, shared=tmp_path)
        struck = fault.strike(engine, around, random=Random(1))
        print(struck.injected.because)
        assert struck.injected.proved, struck.injected.because
        assert load.header_reach_bytes < struck.injected.after["read_bytes"] < load.size_bytes
        with pytest.raises(EngineNotReady):
            engine.wait_ready(kind.ready_limit_s)
        engine.stop()
        struck.finish(limit_s=0)
        assert struck.undone().proved
