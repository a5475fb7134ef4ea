"""A copy at a limited rate, running in a thread while an engine starts on what is there so far.

It cuts each file to nothing and lets it grow, or preallocates it, or writes only the blocks that differ, into the same file.
"""

from __future__ import annotations

import filecmp
import os
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.clock import now_ns, seconds_between
from harness.errors import WaitExpired
from harness.faults.facts import file_facts
from harness.faults.fault import Fault, Injected

BEGIN_LIMIT_S = 30.0
END_LIMIT_S = 10.0
STEPS_PER_S = 20
LARGEST_STEP_BYTES = 4 * 1024**2
BLOCK_BYTES = 128 * 1024  # the largest that rsync compares


class SlowCopy:
    """The running copy: `start` returns when the first slow file is begun, `finish` waits for or ends the rest."""

    def __init__(
        self,
        *,
        fault: Fault,
        source: Path,
        live: Path,
        slow: Sequence[str],
        afterwards: Sequence[str],
        rate_bytes_per_s: float,
        preallocate: bool = False,
        in_place: bool = False,
    ) -> None:
        self._fault = fault
        self._source = source
        self._live = live
        self._slow = tuple(slow)
        self._afterwards = tuple(afterwards)
        self._rate_bytes_per_s = rate_bytes_per_s
        self._preallocate = preallocate
        self._in_place = in_place
        self._before = self._identities() if in_place else {}
        self._total_bytes = sum((source / name).stat().st_size for name in slow)
        self._copied_bytes = 0
        self._error: OSError | None = None
        self._begun = threading.Event()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="slow-copy", daemon=True)
        self._injected: Injected | None = None

    @property
    def injected(self) -> Injected:
        """Return the proof taken when `start` returned."""
        return self.state() if self._injected is None else self._injected

    def start(self) -> None:
        """Begin to copy and prove that it is not done.

        Raises: WaitExpired when nothing was written in time.
        """
        self._thread.start()
        if not self._begun.wait(BEGIN_LIMIT_S):
            self.finish(limit_s=0)
            raise WaitExpired("first byte of a slow copy", limit_s=BEGIN_LIMIT_S, tries=1, last_seen="nothing written")
        self._injected = self.state()

    def state(self) -> Injected:
        """Say from the disk which files are not as they will be, while the copy still runs."""
        copied, is_running = self._copied_bytes, self._thread.is_alive()
        incomplete = [name for name in (*self._slow, *self._afterwards) if not self._is_complete(name)]
        unfinished_weights = [name for name in incomplete if name in self._slow]
        mixed, moved, blocks = True, list[str](), ""
        if self._in_place:
            mixed, moved = self._mixture()
            blocks = f"; {'some' if mixed else 'no'} new blocks in old files, {len(moved)} under another inode"
        ended = "running" if is_running else "ended" if self._error is None else f"ended by {self._error}"
        return Injected.of(
            self._fault,
            proved=is_running and bool(unfinished_weights) and mixed and not moved,
            because=f"the copy is {ended} at {copied:,} of {self._total_bytes:,} bytes; not complete on disk: "
            + (", ".join(f'"{name}"' for name in incomplete) or "nothing")
            + blocks,
            before={"total_bytes": self._total_bytes, "rate_bytes_per_s": self._rate_bytes_per_s},
            after={
                "copied_bytes": copied,
                "is_running": is_running,
                "incomplete_files": incomplete,
                "sizes_bytes": {name: (self._live / name).stat().st_size for name in self._slow if self._exists(name)},
            },
        )

    def finish(self, *, limit_s: float) -> None:
        """Wait until all is copied, or end the copy when the limit passes. Idempotent."""
        self._thread.join(limit_s)
        if self._thread.is_alive():
            self._end.set()
            self._thread.join(END_LIMIT_S)

    def _run(self) -> None:
        started_ns = now_ns()
        try:
            for name in self._slow:
                if not self._copy(name, started_ns):
                    return
            for name in self._afterwards:
                shutil.copyfile(self._source / name, self._live / name)
        except OSError as error:
            self._error = error
        finally:
            self._begun.set()

    def _copy(self, name: str, started_ns: int) -> bool:
        if self._in_place and self._exists(name):
            return self._update(name, started_ns)
        step = self._step_bytes()
        with (self._source / name).open("rb") as reader, (self._live / name).open("wb", buffering=0) as writer:
            if self._preallocate:
                os.truncate(writer.fileno(), os.fstat(reader.fileno()).st_size)
            self._begun.set()
            while block := reader.read(step):
                if not self._wait_for(block, started_ns):
                    return False
                writer.write(block)
                self._copied_bytes += len(block)
        return True

    def _update(self, name: str, started_ns: int) -> bool:
        """Write the blocks that differ into the live file, as `rsync --inplace` does; whoever maps it sees each at once."""
        step = min(BLOCK_BYTES, self._step_bytes())
        with (self._source / name).open("rb") as reader, (self._live / name).open("r+b", buffering=0) as writer:
            while block := reader.read(step):
                if not self._wait_for(block, started_ns):
                    return False
                begin = reader.tell() - len(block)
                if os.pread(writer.fileno(), len(block), begin) != block:
                    os.pwrite(writer.fileno(), block, begin)
                    self._begun.set()
                self._copied_bytes += len(block)
            os.truncate(writer.fileno(), os.fstat(reader.fileno()).st_size)
        return True

    def _wait_for(self, block: bytes, started_ns: int) -> bool:
        """Wait until a block is due; False when the copy is to end."""
        due_s = (self._copied_bytes + len(block)) / self._rate_bytes_per_s
        return not self._end.wait(max(0.0, due_s - seconds_between(started_ns, now_ns())))

    def _step_bytes(self) -> int:
        return min(LARGEST_STEP_BYTES, max(1, int(self._rate_bytes_per_s / STEPS_PER_S)))

    def _identities(self) -> dict[str, tuple[int, dict[str, Any] | None]]:
        """Return inode and content of the live files that will be written to slowly."""
        live = {name: self._live / name for name in self._slow if self._exists(name)}
        return {name: (path.stat().st_ino, file_facts(path)) for name, path in live.items()}

    def _mixture(self) -> tuple[bool, list[str]]:
        """Say whether any file is no longer as it was, and which are not the same files any more."""
        now = self._identities()
        changed = [name for name, (_, content) in self._before.items() if name not in now or now[name][1] != content]
        moved = [name for name, (inode, _) in self._before.items() if name not in now or now[name][0] != inode]
        return bool(changed), moved

    def _exists(self, name: str) -> bool:
        return (self._live / name).exists()

    def _is_complete(self, name: str) -> bool:
        return self._exists(name) and filecmp.cmp(self._source / name, self._live / name, shallow=False)
