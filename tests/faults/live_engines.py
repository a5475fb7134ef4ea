"""Engines that are one process of Python's, for faults that strike what runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

SLEEPER = "import sys; print('up', flush=True); sys.stdin.readline()"
# Maps a file, reads so many bytes of it, says so, waits for a line, and reads the last byte: SIGBUS when it was cut meanwhile.
MAPPING_READER = """
import mmap, sys
file = open(sys.argv[1], "rb")
mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
file.close()
for place in range(0, int(sys.argv[2]), mmap.PAGESIZE):
    mapped[place]
print("up", flush=True)
sys.stdin.readline()
print(mapped[-1], flush=True)
"""
# The same with a descriptor.
READER = """
import os, sys
file = os.open(sys.argv[1], os.O_RDONLY)
left = int(sys.argv[2])
while left:
    left -= len(os.read(file, left))
print("up", flush=True)
sys.stdin.readline()
print(os.pread(file, 1, os.fstat(file).st_size - 1)[0], flush=True)
"""
# Maps a segment of shared memory and keeps it, as an engine does with its message queues.
SEGMENT_HOLDER = """
import mmap, sys
with open("/dev/shm/" + sys.argv[1], "w+b") as file:
    file.truncate(4096)
    mapped = mmap.mmap(file.fileno(), 4096)
print("up", flush=True)
sys.stdin.readline()
"""
# Its child removes the segment as soon as the parent, which maps it, has ended: so does Python's resource tracker.
TIDY_FAMILY = """
import mmap, os, sys
path = "/dev/shm/" + sys.argv[1]
with open(path, "w+b") as file:
    file.truncate(4096)
    mapped = mmap.mmap(file.fileno(), 4096)
read, write = os.pipe()
if os.fork() == 0:
    os.close(write)
    os.read(read, 1)
    os.unlink(path)
    os._exit(0)
os.close(read)
print("up", flush=True)
sys.stdin.readline()
"""


def segment_name(unique: object) -> str:
    """Return a name of a segment as Python and vLLM give them."""
    return f"psm_{unique}"


@dataclass(slots=True)
class ProcessAlone:
    """An engine whose only process can be looked at, signalled and frozen, unless it is `deaf` to that."""

    process: subprocess.Popen[str]
    is_deaf: bool = False
    has_family: bool = False  # its children are its processes too
    incarnation: str = "old-1"
    endpoint: str = "http://127.0.0.1:9"  # nothing answers there
    log_path: Path = field(default_factory=lambda: Path("/nowhere"))

    def exit_code(self) -> int | None:
        return self.process.poll()

    def parts(self) -> frozenset[str]:
        return frozenset({str(self.process.pid)})

    def wait_ready(self, limit_s: float) -> float:
        return 0.0

    def stop(self, grace_s: float = 10.0) -> int | None:
        self.process.kill()
        return self.process.wait(timeout=10)

    def processes(self, role: str) -> tuple[int, ...]:
        if self.process.poll() is not None:
            return ()
        children = psutil.Process(self.process.pid).children() if self.has_family else []
        return (self.process.pid, *(child.pid for child in children))

    def kill(self, role: str, signal_number: int) -> int:
        if not self.is_deaf:
            self.process.send_signal(signal_number)
        return self.process.pid

    def pause(self) -> None:
        if not self.is_deaf:
            for pid in self.processes("core"):
                os.kill(pid, signal.SIGSTOP)

    def resume(self) -> None:
        for pid in self.processes("core"):
            os.kill(pid, signal.SIGCONT)

    def go_on(self) -> int:
        """Let it do what it waits with, and return how it ended."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.process.wait(timeout=10)


@contextmanager
def running(code: str, *arguments: str, is_deaf: bool = False) -> Iterator[ProcessAlone]:
    """Give such an engine, up; it is gone afterwards."""
    with subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        try:
            yield ProcessAlone(process, is_deaf=is_deaf)
        finally:
            process.kill()
