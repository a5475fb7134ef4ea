"""What CI runs: it installs what is missing, uses a Docker daemon that is there, and ends one that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.clock import poll_until

SCRIPT = Path(__file__).resolve().parents[1] / ".ci" / "run"
LIMIT_S = 60.0
STUBS = {
    "id": 'case "$1" in -u) echo "$FAKE_UID";; *) echo people;; esac',
    "sudo": 'echo "sudo $*" >> "$FAKE/log"; exec "$@"',
    "docker": '[ -e "$FAKE/answers" ]',
    "make": 'echo "make $*" >> "$FAKE/log"; [ -e "$FAKE/answers" ] || exit 8; [ ! -e "$FAKE/fails" ]',
    "apt-get": 'echo "apt-get $*" >> "$FAKE/log"',
    "apt-cache": "exit 1",
    "iptables": "",
    "debootstrap": "",
    "python3": f'exec {sys.executable} "$@"',
}
DOCKERD = f"""#!{sys.executable}
import os, pathlib, signal, sys
fake = pathlib.Path(os.environ["FAKE"])
arguments = sys.argv[1:]
with (fake / "log").open("a") as log:
    print("dockerd", *arguments, file=log)
print("a line of the daemon", flush=True)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
pathlib.Path(arguments[arguments.index("--pidfile") + 1]).write_text(str(os.getpid()))
(fake / "pid").write_text(str(os.getpid()))
(fake / "answers").touch()
signal.sigtimedwait([signal.SIGTERM], {LIMIT_S})
(fake / "answers").unlink()
"""


class Machine:
    """A machine on which every program that the script could start only says what it was asked."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.programs = directory / "bin"
        self.programs.mkdir()
        (directory / "tmp").mkdir()
        for name, text in STUBS.items():
            self.add(name, f"#!/bin/sh\n{text}\n")
        self.add("dockerd", DOCKERD)
        for name in ("bash", "sh", "dirname", "mktemp", "cat", "seq", "sleep", "rm", "tail", "setsid", "env"):
            (self.programs / name).symlink_to(next(p for p in (f"/usr/bin/{name}", f"/bin/{name}") if Path(p).exists()))

    def add(self, name: str, text: str) -> None:
        (self.programs / name).write_text(text)
        (self.programs / name).chmod(0o755)

    def run(self, *, user: int = 1000) -> subprocess.CompletedProcess[str]:
        # The script looks into root's directories last: there nothing must be found on this machine that is missing on that.
        script = SCRIPT.read_text().replace(":/usr/sbin:/sbin", "").replace("/var/run", f"{self.directory}/run")
        (self.directory / ".ci").mkdir(exist_ok=True)
        (self.directory / ".ci" / "run").write_text(script)
        return subprocess.run(
            [self.programs / "bash", self.directory / ".ci" / "run"],
            env={
                "PATH": str(self.programs),
                "FAKE": str(self.directory),
                "FAKE_UID": str(user),
                "TMPDIR": str(self.directory / "tmp"),
            },
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )

    def log(self) -> str:
        path = self.directory / "log"
        return path.read_text() if path.exists() else ""

    def daemon_is_gone(self) -> bool:
        pid = (self.directory / "pid").read_text()
        stat = Path(f"/proc/{pid}/stat")
        return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    pid = tmp_path / "pid"
    if pid.exists() and not machine.daemon_is_gone():
        os.kill(int(pid.read_text()), signal.SIGKILL)


def test_a_daemon_that_answers_is_used_and_not_ended(machine: Machine) -> None:
    (machine.directory / "answers").touch()
    done = machine.run()
    assert done.returncode == 0, done.stderr
    assert machine.log() == "make test REQUIRE=docker PYTHON_FOR_VENV=python3\n"
    assert (machine.directory / "answers").exists()


@pytest.mark.parametrize("user", [0, 1000])
def test_a_daemon_is_started_for_this_user_and_ended(machine: Machine, user: int) -> None:
    done = machine.run(user=user)
    assert done.returncode == 0, done.stderr
    started = next(line for line in machine.log().splitlines() if line.startswith("dockerd "))
    assert "--group people" in started
    assert "Docker daemon: " in done.stdout
    assert ("sudo " in machine.log()) == (user != 0)
    assert not (machine.directory / "answers").exists()
    assert machine.daemon_is_gone()
    assert list((machine.directory / "tmp").iterdir()) == []


def test_a_failure_stays_one_and_shows_the_daemons_log(machine: Machine) -> None:
    (machine.directory / "fails").touch()
    done = machine.run()
    assert done.returncode == 1
    assert "a line of the daemon" in done.stdout
    assert machine.daemon_is_gone()


def test_files_of_a_killed_daemon_are_in_nobodys_way(machine: Machine) -> None:
    run = machine.directory / "run"
    (run / "docker" / "containerd").mkdir(parents=True)
    (run / "docker.pid").write_text(str(os.getpid()))  # alive, but no daemon
    (run / "docker" / "containerd" / "containerd.pid").write_text(str(os.getpid()))
    done = machine.run()
    assert done.returncode == 0, done.stderr
    assert not (run / "docker" / "containerd" / "containerd.pid").exists()
    assert (run / "docker.pid").exists()


def test_a_running_daemon_that_lets_this_user_not_in_is_named(machine: Machine, tmp_path: Path) -> None:
    daemon = tmp_path / "dockerd"  # its name is what the script goes by
    daemon.symlink_to("/bin/sleep")
    (tmp_path / "run").mkdir()
    with subprocess.Popen([daemon, "60"]) as running:
        try:
            comm = Path(f"/proc/{running.pid}/comm")
            poll_until(lambda: comm.read_text() == "dockerd\n" or None, what="it runs", limit_s=LIMIT_S)
            (tmp_path / "run" / "docker.pid").write_text(str(running.pid))
            done = machine.run()
        finally:
            running.kill()
    assert done.returncode == 1
    assert "a Docker daemon runs, but does not answer user people" in done.stderr
    assert "dockerd" not in machine.log().replace("sudo cat", "")


def test_what_is_missing_is_installed(machine: Machine) -> None:
    for name in ("docker", "dockerd", "iptables", "debootstrap"):
        (machine.programs / name).rename(machine.programs / f"later-{name}")
    machine.add(
        "apt-get",
        '#!/bin/sh\necho "apt-get $*" >> "$FAKE/log"\n[ "$1" = install ] || exit 0\n'
        + f"cd {machine.programs}\n"
        + "".join(f"/bin/mv later-{name} {name}\n" for name in ("docker", "dockerd", "iptables", "debootstrap")),
    )
    done = machine.run()
    assert done.returncode == 0, done.stderr
    assert (
        "apt-get install -y -qq --no-install-recommends debootstrap docker.io docker.io iptables\n" in machine.log()
    ), "this release has no package docker-cli"
    assert "ci: install debootstrap docker.io docker.io iptables: " in done.stdout


def test_without_apt_get_what_is_missing_is_named(machine: Machine) -> None:
    for name in ("apt-get", "debootstrap"):
        (machine.programs / name).unlink()
    done = machine.run()
    assert done.returncode == 1
    assert done.stderr == ("ci: these are missing, and without apt-get they must be installed by hand: debootstrap\n")


def test_without_root_and_sudo_there_is_a_sentence(machine: Machine) -> None:
    (machine.programs / "sudo").unlink()
    done = machine.run()
    assert done.returncode == 1
    assert "is not root and there is no sudo, but root is needed for: " in done.stderr


def test_an_old_python_is_passed_over(machine: Machine) -> None:
    (machine.directory / "answers").touch()
    machine.add("python3", "#!/bin/sh\nexit 1\n")
    machine.add("python3.12", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    assert machine.run().returncode == 0
    assert machine.log() == "make test REQUIRE=docker PYTHON_FOR_VENV=python3.12\n"
