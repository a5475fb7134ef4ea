from __future__ import annotations

from pathlib import Path

import pytest

from harness import faults
from harness.engine.launch import Launch
from harness.faults import FAULTS, LaunchFault

LAUNCH = Launch(checkpoint_root=Path("root"), checkpoint_name="live")
LAUNCH_FAULTS = [
    faults.launch_dtype("float16"),
    faults.launch_dtype("fp16"),
    faults.launch_argument("--disable-weight-cache"),
    faults.launch_argument("--seed", "3"),
    faults.launch_environment("VLLM_WEIGHT_CACHE_PATH", "/dev/shm/elsewhere"),
]


@pytest.mark.parametrize("fault", LAUNCH_FAULTS)
def test_launch_fault_is_proved_once_and_not_when_it_is_there_already(fault: LaunchFault) -> None:
    altered, injected = fault.alter(LAUNCH)
    again = fault.alter(altered)[1]

    assert isinstance(fault, LaunchFault)
    assert fault.name in FAULTS
    assert injected.proved, injected.because
    assert altered != LAUNCH
    assert not again.proved, again.because
    assert dict(fault.parameters())


@pytest.mark.parametrize("fault", LAUNCH_FAULTS)
def test_launch_fault_is_not_proved_when_the_launch_keeps_what_it_had(
    fault: LaunchFault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.faults.launch.replace", lambda launch, **changes: launch)
    monkeypatch.setattr(Launch, "with_dtype", lambda launch, dtype: launch)

    assert not fault.alter(LAUNCH)[1].proved


def test_the_arguments_reach_the_launch_line() -> None:
    altered = faults.launch_argument("--disable-weight-cache").alter(faults.launch_dtype("fp16").alter(LAUNCH)[0])[0]
    line = altered.arguments(model="m", host="127.0.0.1", port=1)

    assert line[line.index("--dtype") + 1] == "fp16"
    assert line[-1] == "--disable-weight-cache"


@pytest.mark.parametrize(("dtype", "row"), [("float16", "C07"), ("half", "C07"), ("fp16", "L01"), ("bf16", "L01")])
def test_a_spelling_that_is_refused_is_another_row_than_a_wrong_dtype(dtype: str, row: str) -> None:
    assert faults.launch_dtype(dtype).fault_id == row
