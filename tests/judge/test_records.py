"""Nothing in a file of records is trusted: a result that is no position in its classes is refused, not read as another."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from harness.errors import HarnessError
from harness.judge.records import Records
from tests.judge.measured import request


@pytest.mark.parametrize("code", [-1, 200])
def test_a_result_that_is_no_position_is_refused(tmp_path: Path, code: int) -> None:
    Records.of([request(0.1), request(0.2)]).save(tmp_path / "good.npz")
    with np.load(tmp_path / "good.npz") as good:
        columns = {name: good[name] for name in good.files}
    np.savez(tmp_path / "bad.npz", **{**columns, "result": np.array([0, code], np.int64)})
    assert len(Records.load(tmp_path / "good.npz")) == 2
    with pytest.raises(HarnessError, match="does not hold records of requests"):
        Records.load(tmp_path / "bad.npz")
