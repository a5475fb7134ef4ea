"""A strike that is cut short is undone all the same: what a fault wrote down before it acted is called."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from harness.engine.engine import Engine, EngineIdentity
from harness.faults.fault import LiveFault, Struck, Surroundings
from harness.guards.canary import Answer
from harness.incident import Incident
from harness.observe.history import Recorder


class CutShort:
    """A fault that acts and never gets to hand over how it is undone."""

    name = "cut_short"
    fault_id = "M04"

    def __init__(self) -> None:
        self.acts = False

    def parameters(self) -> Mapping[str, Any]:
        return {}

    def undo(self) -> str:
        return "call what was written down"

    def require(self, identity: EngineIdentity) -> None: ...

    def end(self) -> None:
        self.acts = False

    def strike(self, engine: Engine, surroundings: Surroundings, *, random: Random) -> Struck:
        surroundings.undos.append(self.end)
        self.acts = True
        raise KeyboardInterrupt


def test_what_was_written_down_is_undone_after_an_interrupt(tmp_path: Path) -> None:
    fault = CutShort()
    assert isinstance(fault, LiveFault)
    recorder = Recorder(tmp_path / "history.jsonl")
    ground: Any = SimpleNamespace(
        recorder=recorder,
        scenario=SimpleNamespace(faults=(fault,)),
        launch=SimpleNamespace(checkpoint_root=tmp_path, checkpoint_name="live"),
        old=tmp_path,
        new=tmp_path,
        work=tmp_path,
        cache=tmp_path / "cache",
        random=Random(1),
    )
    incident = Incident(ground, service=SimpleNamespace())  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        incident.strike(SimpleNamespace(incarnation="old-1"), expects=Answer.OLD)  # type: ignore[arg-type]
    assert fault.acts

    incident.finish()
    incident.finish()

    assert not fault.acts
    recorder.close()
