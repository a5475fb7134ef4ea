"""What pre-flight says about the host is about this host, only when asked, and goes away with its cause."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.checkpoint import models
from harness.errors import EXIT_BROKEN, EXIT_HELD
from harness.guards.finding import PreflightFinding, Severity
from harness.guards.host import host_findings
from harness.guards.launch import launch_of
from harness.guards.launch_line import line_of
from harness.guards.preflight_command import main
from harness.guards.releases import newest

REFUSES, RISK = Severity.REFUSES, Severity.RISK
ENOUGH_CACHE = {"VLLM_CACHE_ROOT": "/tmp", "HOME": "/tmp"}


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as held:
        yield held


def port_of(listener: socket.socket) -> str:
    return str(listener.getsockname()[1])


def host(
    *words: str, environment: dict[str, str] | None = None, shared_memory: Path = Path("/tmp")
) -> list[PreflightFinding]:
    launch = launch_of(line_of(words), newest())
    return list(host_findings(launch, environment=environment or ENOUGH_CACHE, shared_memory=shared_memory))


def seen(*words: str, **more: object) -> set[tuple[str, Severity]]:
    return {(finding.id, finding.severity) for finding in host(*words, **more)}  # type: ignore[arg-type]


def test_a_port_somebody_listens_on_is_found_until_it_is_free(listener: socket.socket) -> None:
    port = port_of(listener)
    (finding,) = host("--host", "127.0.0.1", "--port", port)
    assert (finding.id, finding.severity) == ("L05", REFUSES)
    assert port in finding.seen
    assert seen("--port", port) == {("L05", REFUSES)}  # every address, as without --host
    listener.close()
    assert seen("--host", "127.0.0.1", "--port", port) == set()


def test_a_port_that_is_held_without_listening_is_no_hindrance() -> None:
    with socket.socket() as held:  # as one keeps a port for an engine
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        assert seen("--host", "127.0.0.1", "--port", port_of(held)) == set()


@pytest.mark.parametrize("address", ["203.0.113.7", "2001:db8::7", "x" * 300])
def test_an_address_that_is_not_this_hosts_cannot_be_listened_on(address: str, listener: socket.socket) -> None:
    free = port_of(listener)
    listener.close()
    assert seen("--host", address, "--port", free) == {("M07", REFUSES)}


def test_a_port_that_is_not_permitted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: socket.socket, address: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    (finding,) = host("--port", "80")
    assert finding.id == "M07"
    assert "Permission denied" in finding.seen


def test_a_socket_file_instead_of_a_port(tmp_path: Path, listener: socket.socket) -> None:
    free = tmp_path / "engine.sock"
    assert seen("--uds", str(free), "--port", port_of(listener)) == set()
    free.touch()
    assert seen("--uds", str(free)) == {("L05", REFUSES)}
    assert seen("--uds", str(tmp_path / "absent" / "engine.sock")) == {("M07", REFUSES)}
    assert [path.name for path in tmp_path.iterdir()] == ["engine.sock"], "nothing that was tried is left"


def test_a_socket_path_that_names_nothing_yet_and_cannot_be_bound(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "absent")
    assert seen("--uds", str(tmp_path / "link")) == {("L05", REFUSES)}, "bind follows no link"
    longest = str(tmp_path / "s").ljust(107, "s")
    assert seen("--uds", longest) == set()
    (finding,) = host("--uds", f"{longest}s")
    assert "its path has 108 bytes" in finding.seen
    assert "at most 107" in finding.expected
    assert seen("--uds", "/" + "s" * 300) == {("M07", REFUSES)}, "longer than any name of a file"


def test_a_cache_of_a_name_that_no_file_can_have(tmp_path: Path) -> None:
    environment = {**ENOUGH_CACHE, "VLLM_CACHE_ROOT": str(tmp_path / ("c" * 300))}
    assert seen("--port", "0", environment=environment) == {("K04", REFUSES)}


def test_a_socket_where_the_kernel_lets_nobody_make_one() -> None:
    """Root passes every check of permissions there, and is refused all the same."""
    (finding,) = host("--uds", "/sys/engine.sock")
    assert finding.id == "M07"
    assert "no socket can be made there: " in finding.seen


def test_shared_memory_is_needed_by_more_than_one_worker(tmp_path: Path) -> None:
    greedy = {**ENOUGH_CACHE, "VLLM_MQ_MAX_CHUNK_BYTES_MB": "100000000"}
    two = ("--port", "0", "--tensor-parallel-size", "2")
    assert seen(*two, environment=greedy) == {("M01", REFUSES)}
    assert seen(*two, shared_memory=tmp_path / "absent") == {("M01", REFUSES)}
    assert seen("--port", "0", environment=greedy) == set()
    (finding,) = host("VLLM_MQ_MAX_CHUNK_BYTES_MB=100000000", "vllm", "serve", "m", *two)  # of the line
    assert "1000000000 MiB" in finding.expected


def test_a_cache_directory_that_cannot_be_written(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    here = {"VLLM_CACHE_ROOT": str(blocked / "cache")}
    assert seen("--port", "0", environment=here) == {("K04", REFUSES)}
    assert seen("--port", "0", "--enforce-eager", environment=here) == {("K04", RISK)}
    assert seen("--port", "0", environment={"HOME": str(blocked)}) == {("K04", REFUSES)}
    assert seen("--port", "0", environment={"XDG_CACHE_HOME": str(tmp_path / "not made yet")}) == set()
    assert not (tmp_path / "not made yet").exists(), "pre-flight makes nothing"


def test_the_command_looks_at_the_host_only_when_asked(
    listener: socket.socket, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    sound = str(models.tiny_llama(hidden=32, intermediate=48).build(tmp_path / "cache"))
    line = ("--", "--host", "127.0.0.1", "--port", port_of(listener))
    assert main([sound, *line]) == EXIT_HELD
    assert main([sound, "--check-host", *line]) == EXIT_BROKEN
    printed = capsys.readouterr().out
    assert "L05  launch arguments" in printed
    assert "answered by the other process" in printed
    listener.close()
    assert main([sound, "--check-host", *line]) == EXIT_HELD
