"""Room for the copies of a user's checkpoints is looked for before anything is made."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path

import pytest

from harness import requirements
from harness.checkpoint.models import tiny_llama
from harness.errors import UsageError
from harness.settings import settings_from


@pytest.mark.parametrize(("short_bytes", "is_enough"), [(0, True), (1, False)])
def test_three_copies_of_the_new_checkpoint_and_one_of_the_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short_bytes: int, is_enough: bool
) -> None:
    old, new = tiny_llama(seed=1).build(tmp_path), tiny_llama(seed=2).build(tmp_path)
    sizes = [sum(file.stat().st_size for file in path.iterdir()) for path in (old, new)]
    free_bytes = requirements.FREE_BYTES_MIN + sizes[0] + 3 * sizes[1] - short_bytes
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(requirements.shutil, "disk_usage", lambda path: usage(2**40, 0, free_bytes))
    settings = settings_from({"old": str(old), "new": str(new), "results": str(tmp_path / "results")}, {})
    if is_enough:
        requirements.require(settings)
    else:
        with pytest.raises(UsageError, match=r"the temporary directory .* MiB are needed"):
            requirements.require(settings)
