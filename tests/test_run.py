"""What a run does around its scenarios."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness import sweep
from harness.observe.history import EventKind
from harness.run import Run
from harness.settings import Settings
from harness.sweep import Leftovers

NOBODY = 65534


@contextmanager
def as_an_ordinary_user() -> Iterator[None]:
    """Do without the powers of root, for whom mode bits mean nothing."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def test_read_only_directories_of_a_scenario_are_no_left_overs(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[EventKind] = []
    recorder = SimpleNamespace(event=lambda source, kind, **data: events.append(kind))
    run = Run(Settings(), progress=lambda _: None, expectations=Path("/nowhere"))
    monkeypatch.setattr(sweep, "find_of", lambda label: Leftovers(label=label))
    with as_an_ordinary_user():
        scratch = Path(tempfile.mkdtemp(dir="/tmp"))
        try:
            (scratch / "checkpoint").mkdir()
            (scratch / "checkpoint" / "shard").write_bytes(b"x")
            (scratch / "checkpoint").chmod(0o555)

            run._look_for_left_overs(SimpleNamespace(recorder=recorder), scratch)  # type: ignore[arg-type]

            assert not scratch.exists()
            assert events == [EventKind.NOTHING_LEFT]
        finally:
            sweep.remove_directory(scratch)
