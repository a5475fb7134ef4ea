"""Starting reference engines in tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.engine.engine import EngineSite
from harness.engine.launch import Launch
from harness.engine.process_child import ProcessEngine
from harness.engine.reference_starter import ReferenceStarter
from harness.label import new_label

API_KEY = "key-of-the-tests"
READY_LIMIT_S = 20.0

Start = Callable[..., ProcessEngine]


@contextmanager
def starting(directory: Path) -> Iterator[Start]:
    """Give a function that starts an engine on a checkpoint, optionally with planted defects; all are ended at the end."""
    starters: list[ReferenceStarter] = []

    def start(path: Path, *defects: str, **launch: object) -> ProcessEngine:
        starter = ReferenceStarter(defects=defects)
        starter.open(
            EngineSite(
                run_label=str(new_label()),
                log_directory=directory / "logs",
                work_directory=directory / "work",
                api_key=API_KEY,
            )
        )
        starters.append(starter)
        request = Launch(checkpoint_root=path.parent, checkpoint_name=path.name, **launch)  # type: ignore[arg-type]
        return starter.start(request, incarnation=f"engine-{len(starters)}")

    try:
        yield start
    finally:
        for starter in starters:
            starter.close()
