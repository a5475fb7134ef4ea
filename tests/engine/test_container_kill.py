"""A signal to a process in a container, whose end may end the shell that sent it."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from harness.engine.container_engine import ContainerEngine
from harness.errors import HarnessError


class Shells:
    """A container in which a shell finds a process or not, and ends as told when it signals."""

    def __init__(self, found: bytes, signalled: int | None, *, looks_before: int = 0) -> None:
        self.found = found
        self.looks_before = looks_before
        self.signalled = signalled
        self.sent: list[str] = []

    def exec_run(self, command: Sequence[str]) -> SimpleNamespace:
        """Answer as `Container.exec_run` does."""
        script = command[-1]
        if script.startswith("kill"):
            self.sent.append(script)
            return SimpleNamespace(exit_code=self.signalled, output=b"")
        self.looks_before -= 1
        found = b"" if self.looks_before >= 0 else self.found
        return SimpleNamespace(exit_code=0 if found else 1, output=found)


def engine_with(shells: Shells) -> ContainerEngine:
    engine = ContainerEngine.__new__(ContainerEngine)
    engine._incarnation = "old-1"
    engine._container = shells
    return engine


@pytest.mark.parametrize("signalled", [0, 137, None])
def test_a_signal_counts_although_the_shell_that_sent_it_ended_with_the_container(signalled: int | None) -> None:
    shells = Shells(found=b"7\n", signalled=signalled)
    assert engine_with(shells).kill("server", signal.SIGKILL) == 7
    assert shells.sent == ["kill -9 7"]


def test_a_server_that_docker_has_yet_to_start_is_waited_for_and_a_core_is_not() -> None:
    assert engine_with(Shells(found=b"7\n", signalled=0, looks_before=2)).kill("server", signal.SIGTERM) == 7
    with pytest.raises(HarnessError, match="no core process"):
        engine_with(Shells(found=b"7\n", signalled=0, looks_before=1)).kill("core", signal.SIGTERM)


@pytest.mark.parametrize(("role", "number"), [("core", signal.SIGSTOP), ("server", signal.SIGCONT)])
def test_a_shell_that_was_cut_off_by_something_else_has_not_signalled(role: str, number: int) -> None:
    with pytest.raises(HarnessError, match=f"no {role} process that takes signal {int(number)}"):
        engine_with(Shells(found=b"7\n", signalled=137)).kill(role, number)


@pytest.mark.parametrize(("found", "signalled", "sent"), [(b"", 0, []), (b"7\n", 1, ["kill -9 7"])])
def test_no_process_or_one_that_takes_no_signal_is_an_error(
    monkeypatch: pytest.MonkeyPatch, found: bytes, signalled: int, sent: list[str]
) -> None:
    monkeypatch.setattr("harness.engine.container_signals.SERVER_LIMIT_S", 0.1)
    shells = Shells(found=found, signalled=signalled)
    with pytest.raises(HarnessError, match="no server process that takes signal 9"):
        engine_with(shells).kill("server", signal.SIGKILL)
    assert shells.sent == sent
