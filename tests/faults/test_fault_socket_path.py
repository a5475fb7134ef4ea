"""A launch on a socket that cannot be made: proved only where it cannot, and found by pre-flight on that host."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness import faults
from harness.engine.launch import Launch
from harness.errors import ScenarioInvalid
from harness.faults import FAULTS, LaunchFault
from harness.guards.host import host_findings
from harness.guards.launch import launch_of
from harness.guards.launch_line import line_of
from harness.guards.releases import newest

LAUNCH = Launch(checkpoint_root=Path("root"), checkpoint_name="live")


def test_it_is_proved_where_nobody_may_make_a_socket() -> None:
    fault = faults.forbidden_socket()
    altered, injected = fault.alter(LAUNCH)

    assert isinstance(fault, LaunchFault)
    assert FAULTS["forbidden_socket"] is faults.forbidden_socket
    assert injected.proved, injected.because
    assert altered.arguments(model="m", host="h", port=1)[-2:] == ("--uds", "/sys/engine.sock")
    assert "binding one there gives: " in injected.because
    assert not fault.alter(altered)[1].proved, "it was there already"


def test_it_is_not_proved_where_a_socket_can_be_made_and_none_stays(tmp_path: Path) -> None:
    injected = faults.forbidden_socket(str(tmp_path / "engine.sock")).alter(LAUNCH)[1]

    assert not injected.proved
    assert "this user may make one" in injected.because
    assert list(tmp_path.iterdir()) == []


def test_it_is_not_proved_where_something_is_already(tmp_path: Path) -> None:
    """That would be the old engine's socket, or what is left of it: another fault."""
    (tmp_path / "engine.sock").touch()
    injected = faults.forbidden_socket(str(tmp_path / "engine.sock")).alter(LAUNCH)[1]

    assert not injected.proved
    assert "Address already in use" in injected.because
    assert [path.name for path in tmp_path.iterdir()] == ["engine.sock"]


def test_it_is_not_proved_when_the_launch_keeps_what_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.faults.socket_path.replace", lambda launch, **changes: launch)

    injected = faults.forbidden_socket().alter(LAUNCH)[1]

    assert not injected.proved
    assert '"--uds" was not given, is not given' in injected.because


def test_the_last_path_of_a_launch_counts() -> None:
    there = replace(LAUNCH, extra_arguments=("--uds", "/run/engine.sock"))
    assert faults.forbidden_socket().alter(there)[1].before == {"uds": "/run/engine.sock"}


def test_a_path_that_depends_on_where_the_engine_runs_is_refused() -> None:
    with pytest.raises(ScenarioInvalid, match=r'"engine\.sock" must be absolute'):
        faults.forbidden_socket("engine.sock")


def test_preflight_finds_it_on_the_host() -> None:
    line = faults.forbidden_socket().alter(LAUNCH)[0].arguments(model="m", host="127.0.0.1", port=8000)
    launch = launch_of(line_of(("vllm", "serve", *line)), newest())

    assert "M07" in {finding.id for finding in host_findings(launch)}
