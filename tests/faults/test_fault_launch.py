from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from harness import faults
from harness.checkpoint.digest import weights_id
from harness.engine.launch import Launch
from harness.errors import FaultNotApplicable
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


@pytest.fixture
def launch(built: Callable[..., Path]) -> Launch:
    """Launch a checkpoint with 2 heads and 2048 positions."""
    checkpoint = built(2)
    return Launch(checkpoint_root=checkpoint.parent, checkpoint_name=checkpoint.name)


@pytest.mark.parametrize("size", [3, 2])
def test_parallel_size_is_proved_only_where_it_does_not_divide_the_heads(size: int, launch: Launch) -> None:
    altered, injected = faults.parallel_size(size).alter(launch)

    assert altered.extra_arguments == ("--tensor-parallel-size", str(size))
    assert injected.proved == (size == 3), injected.because
    assert not faults.parallel_size(size).alter(altered)[1].proved


@pytest.mark.parametrize(("length", "proved"), [(None, True), (2049, True), (2048, False), (256, False)])
def test_context_length_is_proved_only_beyond_the_config(length: int | None, proved: bool, launch: Launch) -> None:
    altered, injected = faults.context_length(length).alter(launch)

    assert injected.proved == proved, injected.because
    assert altered.max_model_len == (length or 4096)


@pytest.mark.parametrize("fault", [faults.parallel_size(), faults.context_length()])
def test_a_launch_whose_config_cannot_be_read_proves_nothing(fault: LaunchFault) -> None:
    with pytest.raises(FaultNotApplicable, match=r"config\.json"):
        fault.alter(LAUNCH)


def test_a_held_port_is_proved_while_somebody_listens_on_it(launch: Launch) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        fault = faults.held_port(server.getsockname()[1])
        altered, injected = fault.alter(launch)
        assert injected.proved, injected.because
        assert altered.arguments(model="m", host="h", port=1)[-2:] == ("--port", str(fault.port))
        assert not fault.alter(altered)[1].proved

    assert not fault.alter(launch)[1].proved


def test_weights_are_anonymous_unless_the_launch_names_them(launch: Launch, tmp_path: Path) -> None:
    identity = weights_id(launch.checkpoint_root / launch.checkpoint_name)
    named = replace(launch, extra_arguments=("--served-model-name", f"model-{identity}"))

    altered, injected = faults.anonymous_weights().alter(named)

    assert injected.proved, injected.because
    assert altered.extra_arguments == ()
    assert injected.after["weights_id"] == identity
    (tmp_path / identity).symlink_to(launch.checkpoint_root / launch.checkpoint_name)
    versioned = replace(launch, checkpoint_root=tmp_path, checkpoint_name=identity)
    assert not faults.anonymous_weights().alter(versioned)[1].proved
    with pytest.raises(FaultNotApplicable, match="cannot be read"):
        faults.anonymous_weights().alter(LAUNCH)
